"""Documents, as plain text, out of Wikipedia dumps, JSONL, parquet and text files, always as a stream."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast
from xml.etree import ElementTree

from megatron_ce_adaptor.longrun.data_errors import DatasetError, explain_os_error, missing_package
from megatron_ce_adaptor.longrun.wiki_markup import wiki_to_text

__all__ = ["DatasetError", "bundled_enwiki_slice", "file_sha256", "iter_documents", "source_sha256"]

_OPENERS: dict[str, Callable[..., Any]] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
_KINDS = {".xml": "dump", ".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".parquet": "parquet"}
_MEDIAWIKI_NAMESPACE = "http://www.mediawiki.org/xml/export-"
_ARTICLE_NAMESPACE = "0"
_SLICE_NAME = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
# A text file is one document, but one far beyond this size is cut at a line end so that it streams.
_TEXT_DOCUMENT_CHARACTERS = 16 * 2**20
_WORKER_BACKLOG = 16  # articles in flight per worker: keeps workers busy without reading the dump ahead


def bundled_enwiki_slice() -> Path:
    """Return the path of gensim's 106-article slice of enwiki, a genuine dump of 2016.

    Raises:
        DatasetError: gensim is not installed, or was installed without its test data.
    """
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None:
        raise missing_package("the bundled slice of enwiki", "gensim", "'megatron-ce-adaptor[longrun]'")
    path = Path(spec.origin).parent / "test" / "test_data" / _SLICE_NAME
    if not path.is_file():
        raise DatasetError(
            f"the installed gensim does not carry its slice of enwiki ({_SLICE_NAME}): "
            "reinstall gensim 4.4.0 from its wheel, or name a dump with --input"
        )
    return path


def iter_documents(source: Path, json_key: str = "text", workers: int = 1) -> Iterator[str]:
    """Yield the non-empty documents of one source in its own order.

    Args:
        source: ``*.xml`` (MediaWiki dump: articles only, no redirects), ``*.jsonl``/``*.json`` (one object
            a line), ``*.txt`` (one document a file), each also as ``.bz2``, ``.gz`` or ``.xz``;
            ``*.parquet``; or a folder, whose ``*.txt`` files are taken in the order of their names, those of
            subfolders included.
        json_key: the JSONL key or parquet column that holds the text.
        workers: processes that turn wiki markup into text; 1 works in this process.

    Raises:
        DatasetError: the source is missing, unreadable, damaged, of unknown kind or holds no document.
    """
    count = 0
    for document in _open_documents(source, json_key, workers):
        if document.strip():
            count += 1
            yield document
    if count == 0:
        raise DatasetError(f"{source} holds no document: every record is empty or skipped")


def source_sha256(source: Path) -> str:
    """Return the sha256 of a file, or of the names and contents of a folder's ``*.txt`` files."""
    if not source.is_dir():
        return file_sha256(source)
    digest = hashlib.sha256()
    for path in _text_files(source):
        digest.update(f"{path.relative_to(source).as_posix()}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Return the sha256 of one file, in hexadecimal."""
    try:
        digest = hashlib.sha256()
        with open(path, "rb") as stream:
            while block := stream.read(2**20):
                digest.update(block)
        return digest.hexdigest()
    except OSError as error:
        raise explain_os_error("read", path, error) from error


def _open_documents(source: Path, json_key: str, workers: int) -> Iterator[str]:
    if not source.exists():
        raise DatasetError(f"the input {source} does not exist")
    if source.is_dir():
        return (text for path in _text_files(source) for text in _iter_text(path))
    kind = _kind_of(source)
    if kind == "dump":
        return _map_in_order(wiki_to_text, _iter_dump_articles(source), workers)
    if kind == "jsonl":
        return _iter_jsonl(source, json_key)
    if kind == "parquet":
        return _iter_parquet(source, json_key)
    return _iter_text(source)


def _kind_of(source: Path) -> str:
    suffixes = [suffix.lower() for suffix in source.suffixes]
    if suffixes and suffixes[-1] in _OPENERS:
        suffixes.pop()
    kind = _KINDS.get(suffixes[-1]) if suffixes else None
    # Dumps in parts are called "...articles1.xml-p10p30302.bz2": the page range hangs on the suffix.
    if kind is None and suffixes and any(suffix.startswith(".xml-p") for suffix in suffixes):
        kind = "dump"
    if kind is None:
        raise DatasetError(
            f"the kind of {source} is unknown: expected *.xml, *.jsonl, *.json or *.txt "
            "(each also .bz2, .gz or .xz), *.parquet or a folder of *.txt"
        )
    return kind


def _text_files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*.txt") if path.is_file())
    if not paths:
        raise DatasetError(f"the folder {folder} holds no .txt file")
    return paths


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacking it by its suffix, and turn every way of being unreadable into a sentence."""
    try:
        if path.suffix.lower() in _OPENERS and path.stat().st_size == 0:
            raise DatasetError(f"{path} is empty")
        with _OPENERS.get(path.suffix.lower(), open)(path, "rb") as stream:
            yield stream
    except EOFError as error:
        raise DatasetError(f"{path} is cut off: the compressed data end too early; fetch it again") from error
    except (zlib.error, lzma.LZMAError) as error:
        raise DatasetError(f"{path} is damaged: {error}; fetch it again") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DatasetError(f"{path} is not UTF-8 text: {error.reason} (byte 0x{byte:02x})") from error
    except OSError as error:
        if error.errno is None:  # bz2 and gzip report damaged data as an OSError without a number
            raise DatasetError(f"{path} is damaged: {error}; fetch it again") from error
        raise explain_os_error("read", path, error) from error


def _iter_dump_articles(path: Path) -> Iterator[str]:
    """Yield the markup of every article: pages of namespace 0 that are no redirects."""
    with _reading(path) as stream:
        pages = articles = 0
        try:
            # Not gensim's extract_pages: it keeps an empty element of every page to the end of the dump.
            events = ElementTree.iterparse(stream, events=("start", "end"))
            _, root = next(events)
            namespace = root.tag.partition("}")[0] + "}"
            if not namespace.startswith("{" + _MEDIAWIKI_NAMESPACE):
                raise DatasetError(f"{path} is XML but no MediaWiki dump: its root element is <{root.tag}>")
            for event, element in events:
                if event != "end" or element.tag != namespace + "page":
                    continue
                pages += 1
                markup = element.findtext(f"{namespace}revision/{namespace}text") or ""
                in_articles = element.findtext(namespace + "ns") == _ARTICLE_NAMESPACE
                if in_articles and element.find(namespace + "redirect") is None and markup.strip():
                    articles += 1
                    yield markup
                root.clear()
        except ElementTree.ParseError as error:
            if error.position == (1, 0):
                raise DatasetError(f"{path} is empty or no XML: {error.msg}") from error
            raise DatasetError(
                f"{path} is cut off or damaged after {pages} pages: {error.msg}; fetch it again"
            ) from error
        if articles == 0:
            raise DatasetError(f"{path} holds no article: {pages} pages, none of them an article")


def _iter_jsonl(path: Path, key: str) -> Iterator[str]:
    with _reading(path) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:
                raise DatasetError(f"line {number} of {path} is not JSON: {error.msg}") from error
            if not isinstance(record, dict) or key not in record:
                found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
                raise DatasetError(
                    f"line {number} of {path} has no key {key!r} (found: {found or 'nothing'}); "
                    "name it with --json-keys"
                )
            if not isinstance(record[key], str):
                kind = type(record[key]).__name__
                raise DatasetError(f"line {number} of {path}: {key!r} is of type {kind}, expected a string")
            yield record[key]


def _iter_parquet(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise missing_package(f"reading {path}", "pyarrow", "pyarrow") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
        if column not in table.schema_arrow.names:
            found = ", ".join(table.schema_arrow.names)
            raise DatasetError(f"{path} has no column {column!r} (found: {found}); name it with --json-keys")
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            for value in batch.column(0).to_pylist():
                if value is not None and not isinstance(value, str):
                    kind = type(value).__name__
                    raise DatasetError(f"{path}: column {column!r} holds {kind}, expected strings")
                yield value or ""
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"cannot read {path}: {str(error).splitlines()[0]}") from error


def _iter_text(path: Path) -> Iterator[str]:
    with _reading(path) as stream:
        text = io.TextIOWrapper(cast(Any, stream), encoding="utf-8-sig")
        lines: list[str] = []
        size = 0
        for line in text:
            lines.append(line)
            size += len(line)
            if size >= _TEXT_DOCUMENT_CHARACTERS:
                yield "".join(lines)
                lines, size = [], 0
        if lines:
            yield "".join(lines)


def _map_in_order(function: Callable[[str], str], items: Iterator[str], workers: int) -> Iterator[str]:
    """Apply a function in other processes, keeping the order and never more than a few items in memory."""
    if workers <= 1:
        yield from map(function, items)
        return
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # spawn: the tokenizer's threads may be running already, and a fork would copy their locks.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    waiting: deque[Future[str]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= workers * _WORKER_BACKLOG:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DatasetError(
            "a worker process died, for want of memory perhaps: use fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
