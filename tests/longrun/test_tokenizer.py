"""Training a tokenizer folder, and using one as Megatron does."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from megatron_ce_adaptor.longrun.data_errors import DatasetError
from megatron_ce_adaptor.longrun.text_sources import bundled_enwiki_slice, iter_documents
from megatron_ce_adaptor.longrun.tokenizer import (
    END_OF_TEXT,
    TokenizerFolder,
    tokenizer_sha256,
    train_tokenizer,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 20,
    "Grüße aus Köln, 東京 und Αθήνα!\n\nNew paragraph.",
]
ODD_TEXT = "  two  spaces , a comma\n\n\ttab é 東京 🦊 don't \u200b end \n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer(TEXTS, path, 300)
    return path


def test_vocabulary_and_special_tokens(folder):
    tokenizer = TokenizerFolder(folder)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (300, 0)
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == END_OF_TEXT


def test_round_trip_of_any_text(folder):
    tokenizer = TokenizerFolder(folder)
    for ids, text in zip(tokenizer.encode([ODD_TEXT, *TEXTS]), [ODD_TEXT, *TEXTS], strict=True):
        assert tokenizer.decode(ids) == text
        assert max(ids) < 300


def test_the_name_of_a_special_token_in_a_text_is_text(folder):
    tokenizer = TokenizerFolder(folder)
    text = f"before {END_OF_TEXT} after"
    (ids,) = tokenizer.encode([text])
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text


def test_megatrons_tokenizer_agrees(folder):
    libraries = pytest.importorskip("megatron.core.tokenizers.text.libraries")
    ours, theirs = TokenizerFolder(folder), libraries.HuggingFaceTokenizer(str(folder))
    assert theirs.vocab_size == ours.vocab_size
    assert theirs.eod == ours.eod_id
    assert theirs.pad_id not in (None, theirs.eod)  # Megatron masks the loss at pad_id
    assert theirs.text_to_ids(TEXTS[1]) == ours.encode([TEXTS[1]])[0]


def test_training_is_deterministic_across_processes(tmp_path):
    texts = list(islice(iter_documents(bundled_enwiki_slice()), 4))
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    code = (
        "import json, sys; from pathlib import Path; from megatron_ce_adaptor.longrun.tokenizer import *;"
        "train_tokenizer(json.load(open(sys.argv[1])), Path(sys.argv[2]), 1500)"
    )
    for name, threads in (("one", "1"), ("two", "2")):
        env = {**os.environ, "PYTHONHASHSEED": threads, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", code, str(tmp_path / "texts.json"), str(tmp_path / name)]
        subprocess.run(command, env=env, check=True)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert tokenizer_sha256(tmp_path / "one") == tokenizer_sha256(tmp_path / "two")


def test_a_template_of_the_tokenizer_is_kept_but_no_second_eod(folder, tmp_path):
    """Llama-like tokenizers begin each text with BOS, as Megatron's preprocess_data.py keeps it."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|padding|> $A", special_tokens=[("<|padding|>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    with_bos = TokenizerFolder(tmp_path)
    assert with_bos.encode(["fox"])[0] == [1, *TokenizerFolder(folder).encode(["fox"])[0]]


@pytest.mark.parametrize(
    ("texts", "vocab_size", "sentence"),
    [
        (TEXTS, 257, "vocabulary of 257 is too small: .* at least 258"),
        (["abc abc"], 4000, r"only yields a vocabulary of \d+, 4000 were asked for: .*--vocab-size"),
    ],
)
def test_impossible_vocabulary(tmp_path, texts, vocab_size, sentence):
    with pytest.raises(DatasetError, match=sentence):
        train_tokenizer(texts, tmp_path / "t", vocab_size)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_texts_comes_through_training(tmp_path):
    def texts():
        yield TEXTS[0]
        raise DatasetError("line 2 is broken")

    with pytest.raises(DatasetError, match="line 2 is broken"):
        train_tokenizer(texts(), tmp_path / "t", 300)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(folder):
    before = tokenizer_sha256(folder)
    with pytest.raises(DatasetError, match="exists already"):
        train_tokenizer(["other text"], folder, 260)
    assert tokenizer_sha256(folder) == before


def test_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"cannot write the tokenizer folder .*/file/t: "):
        train_tokenizer(TEXTS, tmp_path / "file" / "t", 300)


def write_broken_json(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")


def write_weights_only(path: Path) -> None:
    (path / "model.safetensors").write_text("")


def write_without_eos(path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (write_broken_json, "transformers cannot load the tokenizer folder"),
        (write_weights_only, "holds no tokenizer"),
        (write_without_eos, "no end-of-sequence token"),
        (Path.rmdir, "does not exist or is no folder"),
    ],
)
def test_unusable_folder(tmp_path, prepare, sentence):
    path = tmp_path / "t"
    path.mkdir()
    prepare(path)
    with pytest.raises(DatasetError, match=sentence) as caught:
        TokenizerFolder(path)
    assert "\n" not in str(caught.value)


def test_sha256_is_of_the_tokenizer_alone(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert tokenizer_sha256(tmp_path) == tokenizer_sha256(folder)
    (tmp_path / "model.safetensors").write_text("weights")
    assert tokenizer_sha256(tmp_path) == tokenizer_sha256(folder)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_sha256(tmp_path) != tokenizer_sha256(folder)
