"""Megatron's token files: ``PREFIX.bin`` (token ids) and ``PREFIX.idx`` (where each document begins)."""

from __future__ import annotations

import logging
import os
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ce_adaptor.longrun.data_errors import DatasetError, explain_os_error, missing_package

__all__ = ["DatasetError", "DatasetSummary", "check_indexed_dataset", "write_indexed_dataset"]

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
# Megatron's codes; 6 and 7 are float64 and float32, which cannot be token ids.
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_UINT16_VOCABULARY = 65500  # Megatron's own limit for two bytes a token
_SCAN_TOKENS = 2**24
_SAMPLED_PARTS = 16


@dataclass(frozen=True)
class DatasetSummary:
    """What a pair of token files holds.

    Attributes:
        documents: documents in the index.
        tokens: tokens in the ``.bin``, end-of-document tokens included.
        dtype: numpy's name of the type of one token.
    """

    documents: int
    tokens: int
    dtype: str


def with_suffix(prefix: str | os.PathLike[str], suffix: str) -> Path:
    """Return the path of the ``.bin`` or ``.idx`` of a prefix (which may itself contain dots)."""
    return Path(os.fspath(prefix) + suffix)


def write_indexed_dataset(
    prefix: str | os.PathLike[str], documents: Iterable[Sequence[int]], eod_id: int, vocab_size: int
) -> DatasetSummary:
    """Write tokenised documents with Megatron's own builder, one sequence a document, EOD appended.

    The files are written under temporary names and renamed when both are whole, so a failure leaves the old
    pair, or nothing.

    Args:
        prefix: path without ``.bin``/``.idx``; its folder is created.
        documents: token ids of each document; documents without tokens are skipped.
        eod_id: appended unless the document ends with it already.
        vocab_size: ids must be below it; below 65,500 two bytes a token are used, else four.

    Raises:
        DatasetError: no document at all, an id outside the vocabulary, megatron-core is not installed, or the
            files cannot be written.
    """
    if not 0 <= eod_id < vocab_size:
        raise DatasetError(f"the end-of-document id {eod_id} is outside the vocabulary of {vocab_size}")
    try:
        with _quiet_import():
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    except ModuleNotFoundError as error:
        raise missing_package(
            "writing .bin/.idx files", "megatron-core", "'megatron-ce-adaptor[megatron]'"
        ) from error

    bin_path, idx_path = with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx")
    unfinished_bin = with_suffix(prefix, f".bin.{os.getpid()}.tmp")
    unfinished_idx = with_suffix(prefix, f".idx.{os.getpid()}.tmp")
    builder = None
    count = tokens = 0
    try:
        bin_path.parent.mkdir(parents=True, exist_ok=True)
        dtype = DType.optimal_dtype(vocab_size)
        builder = IndexedDatasetBuilder(str(unfinished_bin), dtype=dtype)
        for document in documents:
            ids = np.asarray(document, dtype=np.int64)
            if ids.size == 0:
                continue
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= vocab_size:
                outside = low if low < 0 else high
                raise DatasetError(f"document {count} has the token id {outside}, outside [0, {vocab_size})")
            if ids[-1] != eod_id:
                ids = np.append(ids, eod_id)
            builder.add_document(ids, [ids.size])
            count += 1
            tokens += ids.size
        if count == 0:
            raise DatasetError(f"there is no document to write to {bin_path}")
        builder.finalize(str(unfinished_idx))
        # The index last: without it Megatron and check_indexed_dataset refuse the pair.
        idx_path.unlink(missing_ok=True)
        unfinished_bin.replace(bin_path)
        unfinished_idx.replace(idx_path)
    except OSError as error:
        raise explain_os_error("write", bin_path, error) from error
    finally:
        if builder is not None:
            with suppress(OSError):  # the disk may be full: closing flushes
                builder.data_file.close()
        for path in (unfinished_bin, unfinished_idx):
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return DatasetSummary(count, tokens, np.dtype(dtype).name)


def check_indexed_dataset(
    prefix: str | os.PathLike[str], vocab_size: int | None = None, *, sample: bool = False
) -> DatasetSummary:
    """Check that ``PREFIX.bin`` and ``PREFIX.idx`` are whole and belong together; needs no Megatron.

    Args:
        prefix: path without ``.bin``/``.idx``, as given to Megatron's ``--data-path``.
        vocab_size: when given, every token is read and must be in ``[0, vocab_size)``.
        sample: read at most 2^28 tokens of it, evenly spread: seconds also for a whole Wikipedia.

    Raises:
        DatasetError: a file is missing, truncated, foreign, or does not match the other; or a token id is
            outside the vocabulary. The sentence names the file and what was expected.
    """
    bin_path, idx_path = with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx")
    missing = [path for path in (bin_path, idx_path) if not path.is_file()]
    if missing:
        names = " and ".join(str(path) for path in missing)
        hint = ""
        if Path(os.fspath(prefix)).suffix in (".bin", ".idx"):
            hint = ": give the prefix without .bin or .idx"
        elif with_suffix(prefix, "_text_document.idx").is_file():
            hint = f": did you mean {os.fspath(prefix)}_text_document?"
        raise DatasetError(f"{names} not found{hint}")
    try:
        dtype, lengths, pointers, document_index = _read_index(idx_path)
        _check_index(idx_path, dtype, lengths, pointers, document_index)
        tokens = int(lengths.sum(dtype=np.int64))
        expected, actual = tokens * dtype.itemsize, bin_path.stat().st_size
        if actual != expected:
            state = "truncated" if actual < expected else "not the one of this index"
            raise DatasetError(
                f"{bin_path} is {state}: it has {actual} bytes, "
                f"the index tells of {tokens} {dtype.name} tokens = {expected} bytes"
            )
        if tokens == 0:
            raise DatasetError(f"{bin_path} holds no token: the dataset is empty")
        if vocab_size is not None:
            _check_token_ids(bin_path, dtype, vocab_size, _SAMPLED_PARTS if sample else None)
    except OSError as error:
        raise explain_os_error("read", error.filename or idx_path, error) from error
    return DatasetSummary(len(document_index) - 1, tokens, dtype.name)


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return dtype, sequence lengths [n], byte offsets [n] and document index [d] of a ``.idx``."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        head = stream.read(_HEADER.size)
    if not head.startswith(_MAGIC[: len(head)]):
        raise DatasetError(f"{path} is no Megatron index: it does not begin with MMIDIDX")
    if len(head) < _HEADER.size:
        raise DatasetError(f"{path} is truncated: {size} bytes, its header alone has {_HEADER.size}")
    _, version, code, sequences, entries = _HEADER.unpack(head)
    if version != _VERSION:
        raise DatasetError(f"{path} has version {version} of the format, expected {_VERSION}")
    if code not in _DTYPES:
        raise DatasetError(f"{path} has the unknown dtype code {code}, expected 1 to 8")
    dtype = np.dtype(_DTYPES[code])
    if dtype.kind == "f":
        raise DatasetError(f"{path} tells of {dtype.name} values, token ids are integers")
    expected = _HEADER.size + 12 * sequences + 8 * entries
    if size < expected:
        raise DatasetError(
            f"{path} is truncated: {size} bytes, "
            f"{sequences} sequences and {entries} document entries need {expected}"
        )
    if size > expected:
        multimodal = "; a multimodal index cannot train text" if size == expected + sequences else ""
        raise DatasetError(f"{path} has {size} bytes, its header tells of {expected}{multimodal}")
    if sequences == 0:
        raise DatasetError(f"{path} holds no sequence: the dataset is empty")

    def section(kind: type[np.generic], count: int, offset: int) -> np.ndarray:
        return np.memmap(path, dtype=kind, mode="r", offset=offset, shape=(count,))

    if entries < 2:
        raise DatasetError(f"{path} has a document index of {entries} entries, expected at least 2")
    pointers_at = _HEADER.size + 4 * sequences
    return (
        dtype,
        section(np.int32, sequences, _HEADER.size),
        section(np.int64, sequences, pointers_at),
        section(np.int64, entries, pointers_at + 8 * sequences),
    )


def _check_index(
    path: Path, dtype: np.dtype, lengths: np.ndarray, pointers: np.ndarray, document_index: np.ndarray
) -> None:
    if (lengths < 0).any():
        raise DatasetError(f"{path} is damaged: sequence {int(np.argmax(lengths < 0))} has a negative length")
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if pointers[0] != 0 or not np.array_equal(pointers[1:], ends[:-1]):
        raise DatasetError(
            f"{path} is damaged: the offsets of its sequences do not follow from their lengths"
        )
    if document_index[0] != 0 or document_index[-1] != len(lengths) or (np.diff(document_index) < 0).any():
        raise DatasetError(
            f"{path} is damaged: its document index does not run from 0 to its {len(lengths)} sequences"
        )


def _check_token_ids(path: Path, dtype: np.dtype, vocab_size: int, most_parts: int | None) -> None:
    tokens = np.memmap(path, dtype=dtype, mode="r")
    starts = range(0, len(tokens), _SCAN_TOKENS)
    step = max(1, -(-len(starts) // most_parts)) if most_parts else 1
    for start in starts[::step]:
        part = tokens[start : start + _SCAN_TOKENS]
        # Compared as Python integers: the vocabulary may exceed the dtype.
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab_size:
            at = int(part.argmin() if low < 0 else part.argmax())
            raise DatasetError(
                f"{path} was made with another tokenizer: token {start + at} is {int(part[at])}, "
                f"outside the vocabulary of {vocab_size}"
            )


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Silence Megatron's notes about absent accelerators and TransformerEngine: neither is needed here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
