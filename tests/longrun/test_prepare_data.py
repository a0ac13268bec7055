"""The command prepare-data: from the bundled slice to Megatron's files, reuse, refusals, and failures."""

import argparse
import bz2
import json
import shutil

import pytest

from megatron_ce_adaptor.longrun import prepare_data
from megatron_ce_adaptor.longrun.indexed_dataset import check_indexed_dataset
from megatron_ce_adaptor.longrun.text_sources import bundled_enwiki_slice, iter_documents
from megatron_ce_adaptor.longrun.tokenizer import TokenizerFolder, tokenizer_sha256

pytest.importorskip("megatron.core")
SENTENCE = "The quick brown fox jumps over the lazy dog, number {}, and runs away."


def run(*argv):
    parser = argparse.ArgumentParser()
    prepare_data.add_arguments(parser)
    return prepare_data.run(parser.parse_args([str(arg) for arg in argv]))


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made_from_slice(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slice")
    assert run("--output-prefix", folder / "enwiki", "--vocab-size", 2000) == 0
    return folder


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    lines = [json.dumps({"text": SENTENCE.format(i)}) for i in range(20)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    assert run("--input", folder / "in.jsonl", "--output-prefix", folder / "out/x", "--vocab-size", 280) == 0
    return folder


@pytest.fixture
def made(made_once, tmp_path):
    """A folder with in.jsonl and the finished data out/x_text_document, to be changed at will."""
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def options(folder):
    return ["--input", folder / "in.jsonl", "--output-prefix", folder / "out/x", "--vocab-size", 280]


def test_slice_round_trip_through_megatron(made_from_slice):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    dataset = megatron.IndexedDataset(str(made_from_slice / "enwiki_text_document"))
    tokenizer = TokenizerFolder(made_from_slice / "enwiki_tokenizer")
    texts = list(iter_documents(bundled_enwiki_slice()))
    assert len(dataset) == len(texts) == 106
    for number, text in enumerate(texts):
        ids = dataset[number]
        assert ids[-1] == tokenizer.eod_id and tokenizer.eod_id not in ids[:-1]
        assert tokenizer.decode(ids.tolist()) == text


def test_slice_record(made_from_slice):
    text = (made_from_slice / "enwiki_text_document.json").read_text()
    record = json.loads(text)
    summary = check_indexed_dataset(made_from_slice / "enwiki_text_document", vocab_size=2000)
    assert (record["documents"], record["tokens"]) == (106, summary.tokens)
    assert record["vocabulary"] == 2000
    assert record["tokenizer"]["sha256"] == tokenizer_sha256(made_from_slice / "enwiki_tokenizer")
    assert record["sources"][0]["name"] == bundled_enwiki_slice().name
    assert len(record["sources"][0]["sha256"]) == 64
    assert record["versions"].keys() >= {"python", "tokenizers", "megatron-core"}
    assert "/" not in text
    assert sorted(path.name for path in made_from_slice.iterdir()) == [
        "enwiki_text_document.bin",
        "enwiki_text_document.idx",
        "enwiki_text_document.json",
        "enwiki_tokenizer",
    ]


def test_second_call_reuses(made, capsys):
    before = {path: path.stat().st_mtime_ns for path in (made / "out").rglob("*")}
    assert run(*options(made)) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("reusing ")
        and "20 documents" in out
        and "--tokenizer-type HuggingFaceTokenizer" in out
    )
    assert {path: path.stat().st_mtime_ns for path in (made / "out").rglob("*")} == before


def test_same_input_gives_the_same_files(made):
    again = made / "again"
    assert run("--input", made / "in.jsonl", "--output-prefix", again / "x", "--vocab-size", 280) == 0
    assert contents(again) == contents(made / "out")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (["--vocab-size", 281], "vocab-size: then 280, now 281"),
        (["--limit-documents", 3], "limit-documents: then None, now 3"),
        (["--tokenizer-documents", 3], "tokenizer-documents: then 100000, now 3"),
    ],
)
def test_other_options_are_refused_without_force(made, capsys, extra, reason):
    before = contents(made)
    assert run(*options(made), *extra) == 2
    error = capsys.readouterr().err
    assert reason in error and "--force" in error and error.count("\n") == 1
    assert contents(made) == before


def test_other_inputs_are_refused_without_force(made, capsys):
    with open(made / "in.jsonl", "a") as stream:
        stream.write("\n" + json.dumps({"text": "One more."}))
    assert run(*options(made)) == 2
    assert "made with other options (inputs: then" in capsys.readouterr().err
    assert run(*options(made), "--force") == 0
    assert check_indexed_dataset(made / "out/x_text_document").documents == 21
    assert run(*options(made)) == 0


def test_force_rebuilds_and_drops_megatrons_sample_indices(made):
    indices = made / "out/x_text_document/cache/GPTDataset_indices"
    indices.mkdir(parents=True)
    (indices / "0-GPTDataset-train-document_index.npy").write_bytes(b"of the old data")
    assert run(*options(made), "--limit-documents", 5, "--vocab-size", 270, "--force") == 0
    assert check_indexed_dataset(made / "out/x_text_document", vocab_size=270).documents == 5
    assert TokenizerFolder(made / "out/x_tokenizer").vocab_size == 270
    assert not indices.exists()


def damage_bin(folder):
    path = folder / "out/x_text_document.bin"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def remove_idx(folder):
    (folder / "out/x_text_document.idx").unlink()


def change_tokenizer(folder):
    (folder / "out/x_tokenizer/tokenizer_config.json").write_text("{}")


def damage_record(folder):
    (folder / "out/x_text_document.json").write_text('{"request": 1')


def strip_record(folder):
    path = folder / "out/x_text_document.json"
    path.write_text(json.dumps({"request": json.loads(path.read_text())["request"]}))


def remove_record(folder):
    (folder / "out/x_text_document.json").unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damage_bin, "was changed since it was made"),
        (remove_idx, "x_text_document.idx not found"),
        (change_tokenizer, "is not the one"),
        (damage_record, "is damaged or not from this command"),
        (strip_record, "is damaged or not from this command"),
        (remove_record, "exists and was not finished by this command"),
    ],
)
def test_changed_data_are_neither_reused_nor_overwritten(made, capsys, change, reason):
    change(made)
    before = contents(made)
    assert run(*options(made)) == 2
    error = capsys.readouterr().err
    assert reason in error and "--force" in error and error.count("\n") == 1
    assert contents(made) == before
    assert run(*options(made), "--force") == 0
    assert run(*options(made)) == 0


def test_existing_tokenizer(made, tmp_path):
    argv = [
        "--input",
        made / "in.jsonl",
        "--output-prefix",
        tmp_path / "with/x",
        "--tokenizer",
        made / "out/x_tokenizer",
    ]
    assert run(*argv) == 0
    assert sorted(path.name for path in (tmp_path / "with").iterdir()) == [
        f"x_text_document.{suffix}" for suffix in ("bin", "idx", "json")
    ]
    old, new = made / "out/x_text_document.bin", tmp_path / "with/x_text_document.bin"
    assert new.read_bytes() == old.read_bytes()
    assert run(*argv) == 0


def test_a_tokenizer_folder_with_other_files_is_never_replaced(made, capsys):
    (made / "mine").mkdir()
    (made / "mine/model.safetensors").write_text("precious")
    argv = ["--input", made / "in.jsonl", "--output-prefix", made / "new/x", "--tokenizer-out", made / "mine"]
    assert run(*argv, "--vocab-size", 280) == 2
    assert "exists: use it with --tokenizer" in capsys.readouterr().err
    assert run(*argv, "--vocab-size", 280, "--force") == 2
    assert "holds more than a tokenizer of this command (model.safetensors)" in capsys.readouterr().err
    assert [path.name for path in (made / "mine").iterdir()] == ["model.safetensors"]


def test_several_inputs_and_another_key(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": f"File {name}. " + SENTENCE}))
    inputs = ["--input", tmp_path / "b.jsonl", "--input", tmp_path / "a.jsonl", "--json-keys", "body"]
    assert run(*inputs, "--output-prefix", tmp_path / "out/x", "--vocab-size", 270) == 0
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    dataset = megatron.IndexedDataset(str(tmp_path / "out/x_body_document"))
    decode = TokenizerFolder(tmp_path / "out/x_tokenizer").decode
    assert [decode(dataset[i].tolist())[:7] for i in range(2)] == ["File b.", "File a."]


def test_training_on_the_first_documents_still_writes_all(made):
    argv = ["--input", made / "in.jsonl", "--output-prefix", made / "few/x", "--vocab-size", 270]
    assert run(*argv, "--tokenizer-documents", 2, "--limit-documents", 15) == 0
    assert check_indexed_dataset(made / "few/x_text_document").documents == 15


EMPTY_DUMP = b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"></mediawiki>'
FAILING = {
    "zero bytes": ("d.xml.bz2", b"", [], "is empty"),
    "no article": ("d.xml.bz2", bz2.compress(EMPTY_DUMP), [], "holds no article: 0 pages"),
    "corrupt": ("d.xml.bz2", b"BZh9 not really", [], "is damaged"),
    "truncated": ("d.xml.bz2", bz2.compress(EMPTY_DUMP * 9)[:-4], [], "is cut off"),
    "bad line late": ("d.jsonl", json.dumps({"text": SENTENCE * 9}).encode() + b"\n{", [], "line 2 of"),
    "missing": ("d.jsonl", None, [], "does not exist"),
    "too little text": ("d.jsonl", b'{"text": "abc"}', ["--vocab-size", 900], "only yields a vocabulary of"),
    "tiny vocabulary": ("d.jsonl", b'{"text": "abc"}', ["--vocab-size", 9], "at least 258"),
    "two keys": (
        "d.jsonl",
        b'{"text": "abc"}',
        ["--json-keys", "text", "title"],
        "one key a call, got text title",
    ),
    "no tokenizer": (
        "d.jsonl",
        b'{"text": "abc"}',
        ["--tokenizer", "nowhere"],
        "tokenizer folder nowhere does not",
    ),
    "tokenizer twice": (
        "d.jsonl",
        b'{"text": "abc"}',
        ["--tokenizer", "a", "--tokenizer-out", "b"],
        "leave it out together with --tokenizer",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_failure_is_one_sentence_and_leaves_nothing(tmp_path, capsys, name):
    file_name, content, extra, reason = FAILING[name]
    if content is not None:
        (tmp_path / file_name).write_bytes(content)
    assert run("--input", tmp_path / file_name, "--output-prefix", tmp_path / "out/x", *extra) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("megatron-ce prepare-data: ") and reason in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert contents(tmp_path / "out") == {}
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("limit", "lines", "what"),
    [(1000, 300, "out/x_text_document:"), (4000, 20, "the tokenizer folder"), (16_000, 150, "data.bin:")],
)
def test_full_disk(tmp_path, capsys, limit, lines, what):
    """A limit on a file's size fails a write as a full disk does: in the spool, the tokenizer or the .bin."""
    resource = pytest.importorskip("resource")
    (tmp_path / "in.txt").write_text("".join(SENTENCE.format(i) + "\n" for i in range(lines)))
    argv = ["--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "out/x", "--vocab-size", 258]
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        assert run(*argv) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    error = capsys.readouterr().err
    assert "cannot write" in error and what in error and "File too large" in error and error.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_failure_in_the_last_step_leaves_nothing_that_looks_finished(made, capsys, monkeypatch):
    real_move = prepare_data._move

    def move(source, target):
        if target.suffix == ".idx":
            raise OSError(28, "No space left on device")
        real_move(source, target)

    monkeypatch.setattr(prepare_data, "_move", move)
    assert run(*options(made), "--force") == 2
    assert "cannot write" in (error := capsys.readouterr().err) and "No space left on device" in error
    assert contents(made / "out") == {}


def test_unwritable_output(tmp_path, capsys):
    (tmp_path / "in.txt").write_text(SENTENCE)
    (tmp_path / "file").write_text("")
    assert run("--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "file/x") == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error and error.count("\n") == 1
    assert run("--input", tmp_path / "in.txt", "--output-prefix", f"{tmp_path}/") == 2
    assert "is a folder: add the beginning of a file name" in capsys.readouterr().err


def test_missing_package_is_named_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare_data, "_REQUIRED", (("megatron_nowhere.core", "megatron-core", "megatron"),))
    assert run("--output-prefix", tmp_path / "out/x") == 2
    assert "needs the package megatron-core" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [["--vocab-size", "0"], ["--limit-documents", "-3"], ["--workers", "two"]])
def test_numbers_are_checked_by_the_parser(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    assert caught.value.code == 2
    assert "expected a whole number above 0" in capsys.readouterr().err


def test_tokenizer_and_vocab_size_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        run("--tokenizer", "x", "--vocab-size", "300")
    assert "not allowed with" in capsys.readouterr().err
