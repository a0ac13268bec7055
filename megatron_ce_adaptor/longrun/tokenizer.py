"""HuggingFace tokenizer folders: train a byte-level BPE into one, or load one that exists."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ce_adaptor.longrun.data_errors import DatasetError, explain_os_error, missing_package

END_OF_TEXT = "<|endoftext|>"
# A padding token of its own: Megatron masks the loss at padding, so it must never be the end-of-text token.
PADDING = "<|padding|>"
SPECIAL_TOKENS = (END_OF_TEXT, PADDING)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Whatever decides how a folder tokenizes; weights and documentation beside it do not count.
_IDENTITY_FILES = (
    *TOKENIZER_FILES,
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


def train_tokenizer(texts: Iterable[str], folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE and write it as a HuggingFace tokenizer folder.

    The same texts in the same order give the same files, byte for byte.

    Args:
        texts: training documents, consumed once.
        folder: created; must not exist yet. It holds ``tokenizer.json`` and ``tokenizer_config.json``.
        vocab_size: ids in the vocabulary, the 256 bytes and two special tokens included.

    Raises:
        DatasetError: the vocabulary is below 258, the texts are too few for it, the folder exists or cannot
            be written, or ``tokenizers`` is not installed.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DatasetError(
            f"a vocabulary of {vocab_size} is too small: a byte-level BPE needs at least {MIN_VOCAB_SIZE} ids"
        )
    if folder.exists():
        raise DatasetError(f"the tokenizer folder {folder} exists already")
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise missing_package(
            "training a tokenizer", "tokenizers", "'megatron-ce-adaptor[longrun]'"
        ) from error

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocab_size:
        raise DatasetError(
            f"the text only yields a vocabulary of {reached}, {vocab_size} were asked for: "
            f"give more text or --vocab-size {reached} or less"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise explain_os_error("write the tokenizer folder", folder, error) from error
    try:
        (unfinished / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
        (unfinished / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
        unfinished.chmod(0o755)  # mkdtemp's is private
        unfinished.rename(folder)
    except OSError as error:
        raise explain_os_error("write the tokenizer folder", folder, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class TokenizerFolder:
    """A local HuggingFace tokenizer, used as Megatron's ``HuggingFaceTokenizer`` uses it.

    Attributes:
        vocab_size: ids as Megatron counts them, added tokens included, before its padding to a multiple.
        eod_id: the id appended to every document: the end-of-sequence token, or else the separator.
    """

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer; never from the network.

        Raises:
            DatasetError: the folder is missing, holds no tokenizer that transformers can load, or its
                tokenizer has neither an end-of-sequence nor a separator token; or transformers is missing.
        """
        if not folder.is_dir():
            raise DatasetError(f"the tokenizer folder {folder} does not exist or is no folder")
        if not any((folder / name).is_file() for name in _IDENTITY_FILES):
            raise DatasetError(f"the folder {folder} holds no tokenizer (no tokenizer.json or the like)")
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            raise missing_package(
                "a HuggingFace tokenizer", "transformers", "'megatron-ce-adaptor[longrun]'"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises what its many loaders raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DatasetError(f"transformers cannot load the tokenizer folder {folder}: {reason}") from error
        eod = self._tokenizer.eos_token_id
        if eod is None:
            eod = self._tokenizer.sep_token_id
        if eod is None:
            raise DatasetError(
                f"the tokenizer in {folder} has no end-of-sequence token: "
                "name one as eos_token in tokenizer_config.json"
            )
        self.eod_id = int(eod)
        self.vocab_size = len(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, with the tokenizer's own template (BOS, if it adds one), without EOD.

        A special token's name within a text is text: it never becomes the end of a document.
        """
        encoded = self._tokenizer(
            list(texts), split_special_tokens=True, return_attention_mask=False, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def tokenizer_sha256(folder: Path) -> str:
    """Return one sha256 over the names and contents of the files that decide how the folder tokenizes."""
    digest = hashlib.sha256()
    for name in sorted(_IDENTITY_FILES):
        path = folder / name
        if path.is_file():
            try:
                digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
            except OSError as error:
                raise explain_os_error("read", path, error) from error
    return digest.hexdigest()
