"""Training runs whose output layer and loss are computed in chunks of tokens, against the same without."""

from __future__ import annotations

import re

import pytest
from training_runs import EIGHT_RANK_MOE, ENTRY, FORKED, TINY_GPT, Run, run_python

pytestmark = pytest.mark.slow

STEPS = 20
UNTIE = "--untie-embeddings-and-output-weights"
# 8 tokens a micro-batch on the last stage
MOE = [word for word in TINY_GPT if word != UNTIE] + [*EIGHT_RANK_MOE, "--mtp-num-layers", "1"]
DENSE = [
    *(*TINY_GPT, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    *("--global-batch-size", "2", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
]


def train(ranks: int, words: list[str], *more: str, **extra_environment: str) -> Run:
    run = run_python(
        *("-m", FORKED, "--standalone", "--nproc-per-node", str(ranks), "-m", ENTRY, *words, *more),
        *("--mock-data", "--train-iters", str(STEPS), "--cross-entropy-fusion-impl", "te"),
        **extra_environment,
    )
    assert run.status == 0, run.log[-4000:]
    assert len(run.losses) == STEPS
    return run


def mtp_losses(run: Run) -> list[float]:
    return [float(value) for value in re.findall(r"mtp_1 loss: (\S+)", run.log)]


def test_eight_ranks_tied_sequence_parallel_experts_and_multi_token_prediction() -> None:
    whole, chunked = train(8, MOE), train(8, MOE, "--loss-chunk-tokens", "3")
    assert len(set(whole.losses)) == STEPS
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    assert chunked.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)
    assert len(mtp_losses(whole)) == STEPS
    assert mtp_losses(chunked) == pytest.approx(mtp_losses(whole), rel=1e-6)
    calls = STEPS * 2 * 2  # micro-batches of a rank; two losses each
    in_chunks = f"reference, te {calls} calls in chunks of at most 3 tokens"
    assert chunked.calls == dict.fromkeys((4, 5, 6, 7), (calls, 0, in_chunks))
    assert whole.calls == dict.fromkeys((4, 5, 6, 7), (calls, 0, "reference"))


def test_four_ranks_untied_without_sequence_parallel() -> None:
    whole = train(4, DENSE)
    chunked = train(4, DENSE, MCE_LOSS_CHUNK_TOKENS="3", MCE_LOSS_CHUNK_GRADIENTS="backward")
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    assert chunked.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)
    in_chunks = f"reference, te {2 * STEPS} calls in chunks of at most 3 tokens"
    assert chunked.calls == dict.fromkeys((2, 3), (2 * STEPS, 0, in_chunks))
