"""How many tokens a chunk of output layer and loss has when ``MCE_LOSS_CHUNK_TOKENS`` is ``auto``."""

from __future__ import annotations

from typing import NamedTuple

BASE = 4096
"""From here on a chunk more costs little: it reads and writes the weight's gradient once, and three matrix
products of 4096 tokens take some thirty times as long (see docs/loss_without_logits.md)."""

LEAST = 256
"""Below, the matrix products wait for the weight's memory."""


class Choice(NamedTuple):
    """tokens of a chunk, and why in words."""

    tokens: int
    reason: str


def choose_chunk_tokens(
    tokens: int, hidden: int, columns: int, element_size: int, free_bytes: int | None
) -> Choice:
    """
    1. Logits that are no larger than the hidden states are not cut.
    2. Else a chunk is BASE tokens, doubled while its logits take at most a quarter of what the gradients of
       the hidden states and of the weight take in any case,
    3. and halved, not below LEAST, while its logits take more than an eighth of the free memory.

    Args:
        tokens: of a call, on all ranks of the tensor-parallel group together.
        hidden: hidden size. columns: of the vocabulary on this rank.
        element_size: bytes of a logit.
        free_bytes: of the device's memory at the time of the loss, the least of any rank of the group; None
            where nobody knows.
    """
    row = columns * element_size
    if columns <= hidden:
        return Choice(
            max(1, tokens), f"{columns} columns are no more than hidden size {hidden}: all tokens at once"
        )
    gradients = (tokens + columns) * hidden * element_size
    size, reason = BASE, f"{BASE} tokens, from where on a further chunk costs little"
    while size < tokens and 2 * size * row <= gradients / 4:
        size *= 2
        reason = f"logits of {size} tokens take at most a quarter of the gradients' {_gib(gradients)}"
    if free_bytes is not None:
        while size > LEAST and min(size, tokens) * row > free_bytes / 8:
            size //= 2
            reason = f"logits of {size} tokens take at most an eighth of the free {_gib(free_bytes)}"
        if min(size, tokens) * row > free_bytes / 8:
            reason = f"{LEAST} tokens are the least, though only {_gib(free_bytes)} are free"
    if size >= tokens:
        return Choice(max(1, tokens), f"{tokens} tokens fit into one chunk")
    return Choice(size, reason)


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
