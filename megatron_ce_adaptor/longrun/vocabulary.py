"""How many ids a tokenizer has, read from its files alone: no tokenizer library, no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def folder_vocabulary(folder: Path) -> int | None:
    """One more than the largest id of a HuggingFace tokenizer folder; None where its files do not tell.

    Raises:
        ValueError: a file is damaged; the message is one sentence.
    """
    if (path := folder / "tokenizer.json").is_file():
        content = _json(path)
        model = content.get("model") if isinstance(content, dict) else None
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(vocabulary, dict | list) or not vocabulary:
            raise ValueError(
                f"{path} has no vocabulary: it is no tokenizer.json of HuggingFace's tokenizers."
            )
        # A list (Unigram) gives ids by position, a mapping says them.
        ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else list(vocabulary.values())
        ids += [token["id"] for token in content.get("added_tokens") or []]
        return max(ids) + 1
    if (path := folder / "vocab.json").is_file():
        return file_vocabulary(path)
    return None


def file_vocabulary(path: Path) -> int:
    """The same for GPT-2's ``vocab.json``, a mapping of tokens to ids. Raises ValueError, one sentence."""
    content = _json(path)
    if not isinstance(content, dict) or not all(isinstance(i, int) for i in content.values()) or not content:
        raise ValueError(f"{path} is no vocabulary: expected a JSON mapping of tokens to ids.")
    return int(max(content.values())) + 1


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}.") from error
