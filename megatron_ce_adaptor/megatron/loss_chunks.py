"""The settings of the loss without logits, and the flag that our pretrain entry takes for them.

``MCE_LOSS_CHUNK_TOKENS=4096`` (or ``--loss-chunk-tokens 4096``) computes output layer and loss in chunks of
so many tokens, ``auto`` lets a rule choose (:mod:`.chunk_rule`), unset or 0 leaves Megatron's own path.
``MCE_LOSS_CHUNK_GRADIENTS`` says when the gradients are computed: ``forward`` or ``backward``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron_ce_adaptor.settings import setting

TOKENS = "MCE_LOSS_CHUNK_TOKENS"
GRADIENTS = "MCE_LOSS_CHUNK_GRADIENTS"
FLAG = "--loss-chunk-tokens"
AUTO = "auto"
DEFAULT_GRADIENTS = "forward"


def chunk_setting() -> int | str | None:
    """Tokens of a chunk, ``"auto"``, or None if output layer and loss are not to be chunked.

    Raises:
        ValueError: anything else.
    """
    return _parse(setting(TOKENS), TOKENS)


def gradients_setting() -> str:
    """``"forward"`` or ``"backward"``.

    Raises:
        ValueError: anything else.
    """
    value = setting(GRADIENTS) or DEFAULT_GRADIENTS
    if value not in ("forward", "backward"):
        raise ValueError(
            f"{GRADIENTS} is {value!r}, expected forward (gradients are computed with the losses where the "
            "loss mask is known) or backward (logits are computed once more; less memory)."
        )
    return value


@functools.cache
def _parse(text: str, name: str) -> int | str | None:
    if text == AUTO:
        return AUTO
    if text and not (text.isascii() and text.isdecimal()):
        raise ValueError(
            f"{name} is {text!r}, expected a number of tokens such as 4096, auto, or 0 for a loss that is "
            "not cut into chunks."
        )
    return int(text or "0") or None


def without_flag(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Megatron's arguments without ours, and its value (of the last one, as argparse would have it).

    Raises:
        ValueError: the flag has no value, or none that can be used.
    """
    kept: list[str] = []
    value = None
    words = iter(argv)
    for word in words:
        name, equals, given = word.partition("=")
        if name != FLAG:
            kept.append(word)
            continue
        following = given if equals else next(words, None)
        if not following or (not equals and following.startswith("--")):
            raise ValueError(f"{FLAG} has no value, expected a number of tokens such as 4096, or auto.")
        value = following
        _parse(value, FLAG)
    return kept, value
