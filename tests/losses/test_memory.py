"""What the chunked loss holds at its highest point: a chunk of logits, and the gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss

TOKENS, HIDDEN, VOCAB = 512, 32, 2000
LOGITS = TOKENS * VOCAB * 4
GRADIENTS = (TOKENS + VOCAB) * HIDDEN * 4
# per-token numbers, and the reference implementation's scratch of a megabyte a tensor
REST = 2.6 * 2**20


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that is allocated within the call, beyond what was there before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        call()
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peak_of(chunks: int, *, train: bool = True) -> int:
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    criterion = ChunkedLossWrapper(CrossEntropyLoss(bare=True), num_chunks=chunks).set_lm_head(head)

    def step() -> None:
        with torch.set_grad_enabled(train):
            loss = criterion(hidden, labels, TOKENS)
        if train:
            loss.backward()

    step()
    hidden.grad = head.weight.grad = None
    return peak_bytes(step)


@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_peak_is_a_chunk_of_logits_and_the_gradients(chunks):
    peak = peak_of(chunks)
    assert LOGITS / chunks + GRADIENTS <= peak <= LOGITS / chunks + GRADIENTS + REST


def test_evaluation_holds_no_gradients():
    peak = peak_of(16, train=False)
    assert LOGITS / 16 <= peak <= LOGITS / 16 + REST
    assert peak < peak_of(16) - 0.9 * GRADIENTS
