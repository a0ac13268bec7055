"""Megatron's .bin/.idx: written whole or not at all, and checked before a run trusts them."""

import struct
import sys

import numpy as np
import pytest

from megatron_ce_adaptor.longrun.indexed_dataset import (
    DatasetError,
    DatasetSummary,
    check_indexed_dataset,
    write_indexed_dataset,
)

DOCUMENTS = [[5, 6, 7], [], [8, 0], [9]]
STORED = [[5, 6, 7, 0], [8, 0], [9, 0]]


@pytest.fixture
def prefix(tmp_path):
    pytest.importorskip("megatron.core.datasets.indexed_dataset")
    path = tmp_path / "data.v1" / "enwiki_text_document"
    write_indexed_dataset(path, DOCUMENTS, eod_id=0, vocab_size=100)
    return path


def sibling(prefix, suffix):
    return prefix.with_name(prefix.name + suffix)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_megatron_reads_what_was_written(tmp_path, vocab_size, dtype):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = [*DOCUMENTS, [vocab_size - 1]]
    summary = write_indexed_dataset(tmp_path / "x", documents, eod_id=0, vocab_size=vocab_size)
    dataset = megatron.IndexedDataset(str(tmp_path / "x"))
    assert [list(map(int, dataset[i])) for i in range(len(dataset))] == [*STORED, [vocab_size - 1, 0]]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert summary == DatasetSummary(documents=4, tokens=10, dtype=dtype)
    assert summary == check_indexed_dataset(tmp_path / "x", vocab_size)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_check_needs_no_megatron(prefix, monkeypatch):
    for name in (
        "megatron",
        "megatron.core",
        "megatron.core.datasets",
        "megatron.core.datasets.indexed_dataset",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    assert check_indexed_dataset(prefix).tokens == 8
    with pytest.raises(DatasetError, match="needs the package megatron-core"):
        write_indexed_dataset(prefix, DOCUMENTS, eod_id=0, vocab_size=100)


def header(sequences, entries, code=8, version=1, magic=b"MMIDIDX\x00\x00"):
    return struct.pack("<9sQBQQ", magic, version, code, sequences, entries)


def index(lengths, pointers, documents, **fields):
    return (
        header(len(lengths), len(documents), **fields)
        + np.array(lengths, np.int32).tobytes()
        + np.array(pointers, np.int64).tobytes()
        + np.array(documents, np.int64).tobytes()
    )


GOOD = ([4, 2, 2], [0, 8, 12], [0, 1, 2, 3])
BAD_INDEX = {
    "empty": (b"", "truncated: 0 bytes"),
    "cut header": (header(3, 4)[:20], "truncated: 20 bytes"),
    "cut body": (index(*GOOD)[:-1], r"truncated: \d+ bytes, 3 sequences and 4 document entries need"),
    "absurd count": (header(2**60, 2**60), "truncated"),
    "foreign": (b"PK\x03\x04" + bytes(100), "no Megatron index: it does not begin with MMIDIDX"),
    "old format": (b"TNTIDX\x00\x00" + bytes(100), "no Megatron index"),
    "version": (index(*GOOD, version=2), "version 2 of the format, expected 1"),
    "dtype": (index(*GOOD, code=9), "unknown dtype code 9"),
    "float": (index(*GOOD, code=7), "float32 values, token ids are integers"),
    "wider dtype": (
        index([4, 2, 2], [0, 16, 24], [0, 1, 2, 3], code=4),
        r"\.bin is truncated: it has 16 bytes",
    ),
    "trailing": (index(*GOOD) + b"12345", r"has \d+ bytes, its header tells of"),
    "multimodal": (index(*GOOD) + b"123", "multimodal index cannot train text"),
    "no sequence": (index([], [], [0, 0]), "holds no sequence"),
    "no documents": (index([4, 2, 2], [0, 8, 12], [0]), "document index of 1 entries"),
    "no token": (index([0, 0, 0], [0, 0, 0], [0, 1, 2, 3]), "not the one of this index"),
    "negative": (index([4, -2, 2], [0, 8, 12], [0, 1, 2, 3]), "sequence 1 has a negative length"),
    "offsets": (index([4, 2, 2], [0, 8, 10], [0, 1, 2, 3]), "offsets of its sequences"),
    "first offset": (index([4, 2, 2], [2, 8, 12], [0, 1, 2, 3]), "offsets of its sequences"),
    "document end": (
        index([4, 2, 2], [0, 8, 12], [0, 1, 2, 4]),
        "document index does not run from 0 to its 3",
    ),
    "document order": (index([4, 2, 2], [0, 8, 12], [0, 2, 1, 3]), "document index does not run"),
    "document start": (index([4, 2, 2], [0, 8, 12], [1, 1, 2, 3]), "document index does not run"),
}


def test_the_hand_made_index_is_megatrons(prefix):
    assert sibling(prefix, ".idx").read_bytes() == index(*GOOD)


@pytest.mark.parametrize("name", BAD_INDEX)
def test_bad_index_is_one_sentence(prefix, name):
    content, sentence = BAD_INDEX[name]
    sibling(prefix, ".idx").write_bytes(content)
    with pytest.raises(DatasetError, match=sentence) as caught:
        check_indexed_dataset(prefix)
    assert "\n" not in str(caught.value)


def test_missing_files(prefix):
    with pytest.raises(DatasetError, match=r"none\.bin and .*none\.idx not found"):
        check_indexed_dataset(prefix.parent / "none")
    with pytest.raises(DatasetError, match=r"did you mean .*enwiki_text_document\?"):
        check_indexed_dataset(prefix.parent / "enwiki")
    with pytest.raises(DatasetError, match="give the prefix without"):
        check_indexed_dataset(sibling(prefix, ".bin"))
    sibling(prefix, ".bin").unlink()
    with pytest.raises(DatasetError, match=r"enwiki_text_document\.bin not found"):
        check_indexed_dataset(prefix)


@pytest.mark.parametrize(("change", "state"), [(-2, "truncated"), (2, "not the one of this index")])
def test_bin_of_another_size(prefix, change, state):
    data = sibling(prefix, ".bin").read_bytes()
    sibling(prefix, ".bin").write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(
        DatasetError, match=f"{state}: it has {16 + change} bytes, .* 8 uint16 tokens = 16 bytes"
    ):
        check_indexed_dataset(prefix)


def test_empty_documents_only(tmp_path):
    (tmp_path / "x.idx").write_bytes(index([0], [0], [0, 1]))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(DatasetError, match="holds no token"):
        check_indexed_dataset(tmp_path / "x", 10)


def test_token_ids_of_another_vocabulary(prefix, monkeypatch):
    assert check_indexed_dataset(prefix, 10).documents == 3
    monkeypatch.setattr("megatron_ce_adaptor.longrun.indexed_dataset._SCAN_TOKENS", 3)
    with pytest.raises(DatasetError, match="token 6 is 9, outside the vocabulary of 9"):
        check_indexed_dataset(prefix, 9)


def test_negative_token_id(tmp_path):
    (tmp_path / "x.idx").write_bytes(index([2], [0], [0, 1], code=4))
    (tmp_path / "x.bin").write_bytes(np.array([3, -1], np.int32).tobytes())
    with pytest.raises(DatasetError, match="token 1 is -1"):
        check_indexed_dataset(tmp_path / "x", 10)


@pytest.mark.parametrize(
    ("documents", "eod", "sentence"),
    [
        ([[1], [100]], 0, r"document 1 has the token id 100, outside \[0, 100\)"),
        ([[1], [-1]], 0, "token id -1"),
        ([[1]], 100, "end-of-document id 100 is outside the vocabulary of 100"),
        ([], 0, "no document to write"),
        ([[]], 0, "no document to write"),
    ],
)
def test_refused_documents_leave_the_old_pair(prefix, documents, eod, sentence):
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    with pytest.raises(DatasetError, match=sentence):
        write_indexed_dataset(prefix, documents, eod_id=eod, vocab_size=100)
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


def test_interrupted_documents_leave_nothing(tmp_path):
    def documents():
        yield [1, 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_indexed_dataset(tmp_path / "x", documents(), eod_id=0, vocab_size=100)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"cannot write .*x\.bin: "):
        write_indexed_dataset(tmp_path / "file" / "x", DOCUMENTS, eod_id=0, vocab_size=100)


@pytest.mark.parametrize("limit", [4096, 200_000 + 100])
def test_a_full_disk_leaves_nothing(tmp_path, limit):
    """A limit on a file's size fails a write as a full disk does: in the .bin, or in the .idx behind it."""
    resource = pytest.importorskip("resource")
    pytest.importorskip("megatron.core.datasets.indexed_dataset")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(DatasetError, match=r"cannot write .*x\.bin: File too large"):
            write_indexed_dataset(tmp_path / "x", [[0]] * 100_000, eod_id=0, vocab_size=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert list(tmp_path.iterdir()) == []
