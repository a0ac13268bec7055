"""The command ``megatron-ce prepare-data``: text in, Megatron's ``.bin/.idx`` and a tokenizer folder out."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any

from megatron_ce_adaptor.longrun.data_errors import DatasetError, explain_os_error, missing_package
from megatron_ce_adaptor.longrun.indexed_dataset import (
    check_indexed_dataset,
    with_suffix,
    write_indexed_dataset,
)
from megatron_ce_adaptor.longrun.text_sources import (
    bundled_enwiki_slice,
    file_sha256,
    iter_documents,
    source_sha256,
)
from megatron_ce_adaptor.longrun.tokenizer import (
    TOKENIZER_FILES,
    TokenizerFolder,
    tokenizer_sha256,
    train_tokenizer,
)

DEFAULT_PREFIX = "data/enwiki/enwiki"
DEFAULT_VOCAB_SIZE = 4000
DEFAULT_TOKENIZER_DOCUMENTS = 100_000
_FORMAT = 1  # of the .json beside the data; raised when the same inputs would give other data
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 64, 2**20
_REQUIRED = (
    ("tokenizers", "tokenizers", "longrun"),
    ("transformers", "transformers", "longrun"),
    ("tqdm", "tqdm", "longrun"),
    ("megatron.core", "megatron-core", "megatron"),
)
_RECORD_KEYS = {"request", "documents", "tokens", "dtype", "vocabulary", "tokenizer", "files"}
_PACKAGES = ("gensim", "tokenizers", "transformers", "megatron-core", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prepare-data`` to a parser."""
    parser.description = (
        "Turn text into Megatron's PREFIX_text_document.bin/.idx and a HuggingFace tokenizer folder. "
        "Without --input the 106-article slice of enwiki that gensim carries is used."
    )
    parser.add_argument(
        "--input",
        action="append",
        type=Path,
        metavar="PATH",
        help="Wikipedia dump (*.xml, *.xml.bz2), *.jsonl, *.parquet, *.txt, folder of *.txt; repeatable",
    )
    parser.add_argument(
        "--output-prefix",
        default=DEFAULT_PREFIX,
        metavar="PREFIX",
        help="results are PREFIX_<key>_document.bin, .idx and .json (default: %(default)s)",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="JSONL key or parquet column that holds the text; it also names the results (default: text)",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="existing HuggingFace tokenizer folder"
    )
    choice.add_argument(
        "--vocab-size",
        type=_positive,
        metavar="N",
        help=f"train a byte-level BPE of N ids on the input (default: {DEFAULT_VOCAB_SIZE})",
    )
    parser.add_argument(
        "--tokenizer-out",
        type=Path,
        metavar="FOLDER",
        help="where the trained one goes (default: PREFIX_tokenizer)",
    )
    parser.add_argument(
        "--tokenizer-documents",
        type=_positive,
        default=DEFAULT_TOKENIZER_DOCUMENTS,
        metavar="N",
        help="train it on the first N documents (default: %(default)s)",
    )
    parser.add_argument("--limit-documents", type=_positive, metavar="N", help="stop after N documents")
    parser.add_argument(
        "--workers",
        type=_positive,
        default=1,
        metavar="N",
        help="processes for wiki markup (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace data made with other inputs or options")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status: 0, or 2 after one sentence on stderr."""
    try:
        prepare_data(args)
    except DatasetError as error:
        sentence = str(error)
    except OSError as error:  # looking at the paths may fail already, in a folder without permission
        sentence = f"{error.filename or args.output_prefix}: {error.strerror or error}"
    else:
        return 0
    print(f"megatron-ce prepare-data: {sentence}", file=sys.stderr)
    return 2


def prepare_data(args: argparse.Namespace) -> Path:
    """Prepare the data, or reuse them if they were made from the same inputs with the same options.

    Args:
        args: the namespace of :func:`add_arguments`.

    Returns:
        The data path for Megatron's ``--data-path``: the prefix of the ``.bin/.idx``.

    Raises:
        DatasetError: inputs, options or output folder cannot be used; nothing that looks finished is left.
    """
    if len(args.json_keys) != 1:
        raise DatasetError(
            f"--json-keys takes one key a call, got {' '.join(args.json_keys)}: call once for each"
        )
    if args.tokenizer is not None and args.tokenizer_out is not None:
        raise DatasetError(
            "--tokenizer-out is the place of a trained tokenizer: leave it out together with --tokenizer"
        )
    if os.fspath(args.output_prefix).endswith(("/", os.sep)):
        raise DatasetError(
            f"--output-prefix {args.output_prefix} is a folder: add the beginning of a file name"
        )
    _require_packages()
    key = args.json_keys[0]
    data = Path(f"{args.output_prefix}_{key}_document")
    tokenizer_folder = args.tokenizer or args.tokenizer_out or Path(f"{args.output_prefix}_tokenizer")
    sources = args.input or [bundled_enwiki_slice()]
    request, names = _describe_request(args, sources, key)

    record = _read_record(data)
    if record is not None and not args.force and _reusable(record, request, data, tokenizer_folder):
        print(f"reusing {data}: made before from the same inputs with the same options")
        _print_summary(record, data, tokenizer_folder)
        return data
    _refuse_to_overwrite(args, data, tokenizer_folder)

    staging = _make_staging_folder(data)
    try:
        documents: Iterable[str] = chain.from_iterable(
            iter_documents(path, key, args.workers) for path in sources
        )
        documents = islice(documents, args.limit_documents)
        trained = staging / "tokenizer"
        if args.tokenizer is None:
            spool = staging / "documents.jsonl"
            train_tokenizer(
                _spooling(islice(documents, args.tokenizer_documents), spool), trained, request["vocab_size"]
            )
            documents = chain(_read_spool(spool), documents)
        tokenizer = TokenizerFolder(args.tokenizer or trained)
        summary = write_indexed_dataset(
            staging / "data",
            _encode(tokenizer, documents, args.limit_documents),
            tokenizer.eod_id,
            tokenizer.vocab_size,
        )
        record = {
            "request": request,
            "sources": names,
            "documents": summary.documents,
            "tokens": summary.tokens,
            "dtype": summary.dtype,
            "vocabulary": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "tokenizer": _describe_tokenizer(tokenizer_folder, args.tokenizer or trained),
            "files": {
                suffix: file_sha256(with_suffix(staging / "data", suffix)) for suffix in (".bin", ".idx")
            },
            "versions": _versions(),
        }
        _publish(record, staging, data, None if args.tokenizer else tokenizer_folder)
    except OSError as error:
        raise explain_os_error("write", data, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _print_summary(record, data, tokenizer_folder)
    return data


def _require_packages() -> None:
    """Miss a package now, not after an hour of reading."""
    for module, package, extra in _REQUIRED:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # the parent of a dotted name is missing
            found = None
        if found is None:
            raise missing_package("prepare-data", package, f"'megatron-ce-adaptor[{extra}]'")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _describe_request(
    args: argparse.Namespace, sources: list[Path], key: str
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return what decides the result (compared by a later call) and the sources by name (for the reader)."""
    for path in sources:
        if not path.exists():
            raise DatasetError(f"the input {path} does not exist")
    names = [{"name": path.resolve().name, "sha256": source_sha256(path)} for path in sources]
    request: dict[str, Any] = {
        "format": _FORMAT,
        "inputs": [entry["sha256"] for entry in names],
        "json_key": key,
        "limit_documents": args.limit_documents,
    }
    if args.tokenizer is not None:
        if not args.tokenizer.is_dir():
            raise DatasetError(f"the tokenizer folder {args.tokenizer} does not exist or is no folder")
        request["tokenizer"] = tokenizer_sha256(args.tokenizer)
    else:
        request["vocab_size"] = args.vocab_size or DEFAULT_VOCAB_SIZE
        request["tokenizer_documents"] = args.tokenizer_documents
    return request, names


def _describe_tokenizer(name: Path, folder: Path) -> dict[str, str]:
    return {"name": name.resolve().name, "sha256": tokenizer_sha256(folder)}


def _read_record(data: Path) -> dict[str, Any] | None:
    path = with_suffix(data, ".json")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.keys() >= _RECORD_KEYS else {}


def _reusable(record: dict[str, Any], request: dict[str, Any], data: Path, tokenizer_folder: Path) -> bool:
    """Return True if the data are whole and answer the request; raise with the reason otherwise."""
    retry = "give --force to rebuild, or another --output-prefix"
    made = record.get("request")
    if not isinstance(made, dict):
        raise DatasetError(f"{with_suffix(data, '.json')} is damaged or not from this command: {retry}")
    for option in sorted(made.keys() | request.keys()):
        if made.get(option) != request.get(option):
            name = option.replace("_", "-")
            raise DatasetError(
                f"{data} was made with other options ({name}: then {_short(made.get(option))}, "
                f"now {_short(request.get(option))}): {retry}"
            )
    try:
        summary = check_indexed_dataset(data)
    except DatasetError as error:
        raise DatasetError(f"{error} ({retry})") from error
    counts = (record["documents"], record["tokens"])
    hashes = {suffix: file_sha256(with_suffix(data, suffix)) for suffix in (".bin", ".idx")}
    if counts != (summary.documents, summary.tokens) or record["files"] != hashes:
        raise DatasetError(f"{data}.bin or .idx was changed since it was made: {retry}")
    if record["tokenizer"] != _describe_tokenizer(tokenizer_folder, tokenizer_folder):
        raise DatasetError(
            f"the tokenizer folder {tokenizer_folder} is not the one {data} was made with: {retry}"
        )
    return True


def _short(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return " ".join(item[:12] if isinstance(item, str) else str(item) for item in values)


def _refuse_to_overwrite(args: argparse.Namespace, data: Path, tokenizer_folder: Path) -> None:
    targets = [with_suffix(data, suffix) for suffix in (".bin", ".idx", ".json")]
    for path in targets:
        if path.is_dir():
            raise DatasetError(f"cannot write {path}: a folder of that name is there")
        if path.exists() and not args.force:
            raise DatasetError(
                f"{path} exists and was not finished by this command: give --force to replace it, "
                "or another --output-prefix"
            )
    if args.tokenizer is not None or not tokenizer_folder.exists():
        return
    if not tokenizer_folder.is_dir():
        raise DatasetError(
            f"cannot write the tokenizer folder {tokenizer_folder}: a file of that name is there"
        )
    found = {path.name for path in tokenizer_folder.iterdir()}
    if found and not args.force:
        raise DatasetError(
            f"the tokenizer folder {tokenizer_folder} exists: use it with --tokenizer, "
            "give --force to replace it, or another --tokenizer-out"
        )
    if found - set(TOKENIZER_FILES):
        raise DatasetError(
            f"the folder {tokenizer_folder} holds more than a tokenizer of this command "
            f"({', '.join(sorted(found - set(TOKENIZER_FILES))[:3])}): name another --tokenizer-out"
        )


def _make_staging_folder(data: Path) -> Path:
    try:
        data.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".prepare-data-", dir=data.parent))
    except OSError as error:
        raise explain_os_error("write into the folder", data.parent, error) from error


def _spooling(documents: Iterable[str], spool: Path) -> Iterator[str]:
    """Pass documents through and keep them on disk: extracting them from a dump again would cost more."""
    with open(spool, "w", encoding="utf-8") as stream:
        for document in documents:
            stream.write(json.dumps(document) + "\n")
            yield document


def _read_spool(spool: Path) -> Iterator[str]:
    with open(spool, encoding="utf-8") as stream:
        yield from map(json.loads, stream)


def _encode(tokenizer: TokenizerFolder, documents: Iterable[str], limit: int | None) -> Iterator[list[int]]:
    from tqdm import tqdm

    # disable=None: no bar when stderr is not a terminal.
    with tqdm(total=limit, desc="tokenising", unit=" documents", disable=None, file=sys.stderr) as progress:
        batch: list[str] = []
        characters = 0
        for document in documents:
            batch.append(document)
            characters += len(document)
            if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
                yield from tokenizer.encode(batch)
                progress.update(len(batch))
                batch, characters = [], 0
        if batch:
            yield from tokenizer.encode(batch)
            progress.update(len(batch))


def _publish(record: dict[str, Any], staging: Path, data: Path, tokenizer_out: Path | None) -> None:
    """Move everything into place; the .json comes last and is what marks the data as finished."""
    unfinished = staging / "record.json"
    unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    moved: list[Path] = []
    try:
        with_suffix(data, ".json").unlink(missing_ok=True)
        _drop_megatron_cache(data)
        if tokenizer_out is not None:
            tokenizer_out.mkdir(parents=True, exist_ok=True)
            for name in TOKENIZER_FILES:
                moved.append(tokenizer_out / name)
                _move(staging / "tokenizer" / name, tokenizer_out / name)
        for suffix in (".bin", ".idx"):
            moved.append(with_suffix(data, suffix))
            _move(with_suffix(staging / "data", suffix), with_suffix(data, suffix))
        _move(unfinished, with_suffix(data, ".json"))
    except OSError:
        for path in moved:
            with suppress(OSError):
                path.unlink()
        raise


def _move(source: Path, target: Path) -> None:
    """Rename, also onto another file system (``--tokenizer-out``), never showing half a file."""
    try:
        source.replace(target)
    except OSError:
        beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            shutil.copyfile(source, beside)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


def _drop_megatron_cache(data: Path) -> None:
    """Remove the sample indices Megatron keeps for this data path: it never notices that the data changed."""
    for folder in (data / "cache").glob("*_indices"):
        shutil.rmtree(folder)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _print_summary(record: dict[str, Any], data: Path, tokenizer_folder: Path) -> None:
    print(
        f"{data}: {record['documents']:,} documents, {record['tokens']:,} tokens, "
        f"vocabulary {record['vocabulary']:,} ({record['dtype']})"
    )
    print(
        f"train with Megatron: --data-path {data} "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer_folder}"
    )
    print(f"or megatron-ce pretrain: export DATA_PATH={data} TOKENIZER_MODEL={tokenizer_folder}")
