"""GPTModel's output layer and loss in chunks of tokens: one real Megatron-Core model on 2 processes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import gpt_programs as programs
from test_real_megatron import UNPACKED, wheel
from tp_harness import RankPool

pytestmark = pytest.mark.slow
QUIET = {"PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with contextlib.closing(RankPool(2)) as pool:
        yield pool


def test_losses_and_gradients_equal_the_unchunked_ones(ranks: RankPool) -> None:
    for rank, (line, chunked) in enumerate(ranks.run(programs.equal_with_and_without, environment=QUIET)):
        assert line.startswith(f"[rank {rank}] cross entropy: te ")
        assert ", native 0 calls, implementation reference" in line
        assert line.endswith(f", te {chunked} calls in chunks of at most {programs.TOKENS} tokens")


def test_hooks_fire_once_and_main_grad_is_added_to(ranks: RankPool) -> None:
    ranks.run(programs.data_parallel, environment=QUIET)


def test_many_chunks_are_as_exact_in_bf16(ranks: RankPool) -> None:
    ranks.run(programs.in_bf16, environment=QUIET)


def test_any_upstream_gradient(ranks: RankPool) -> None:
    # HAZARDS 2
    ranks.run(programs.any_upstream, environment=QUIET)


def test_no_logits_and_hidden_states_exchanged_once(ranks: RankPool) -> None:
    for found in ranks.run(programs.logits_and_collectives, environment=QUIET):
        rows, whole = found["whole"]
        assert rows == programs.TOKENS
        chunks, micro_batches = -(-programs.TOKENS // 5), 2
        rows, forward = found["forward"]
        assert rows == 5
        # a gather of hidden states less, a gather of statistics for each chunk in place of one
        more = {"allgather_base": micro_batches * (chunks - 2), "allreduce": micro_batches}
        assert forward == {kind: whole.get(kind, 0) + more.get(kind, 0) for kind in forward}
        rows, backward = found["backward"]
        assert rows == 5
        more = {"allgather_base": micro_batches * (chunks - 1)}
        assert backward == {kind: whole.get(kind, 0) + more.get(kind, 0) for kind in backward}


def test_without_gradients_and_without_labels(ranks: RankPool) -> None:
    ranks.run(programs.without_gradients, environment=QUIET)


def test_what_cannot_be_chunked_is_refused_in_training(ranks: RankPool) -> None:
    first, second = ranks.run(programs.refused, environment=QUIET)
    assert first == second
    *refusals, negative, words, whole, auto, native = first
    for text, why in zip(
        refusals,
        (
            *("gathers the logits", "the output processor", "has hooks", "may compute something else"),
            *("is not Megatron's but one of gpt_programs", "FSDP"),
        ),
        strict=True,
    ):
        assert text.startswith("RuntimeError: MCE_LOSS_CHUNK_TOKENS is set, but "), text
        assert why in text
    assert negative.startswith("ValueError: MCE_LOSS_CHUNK_TOKENS is '-4', expected a number of tokens")
    assert words.startswith("ValueError: MCE_LOSS_CHUNK_TOKENS is 'many', expected a number of tokens")
    assert "this model computes the logits of the whole sequence" in whole
    assert auto == native == "accepted"


@pytest.mark.parametrize("version", UNPACKED)
def test_other_versions(version: str) -> None:
    folder = str(wheel(version))
    with contextlib.closing(RankPool(2)) as pool:
        assert pool.run(programs.version_in, folder, environment=QUIET)[0].partition("+")[0] == version
        pool.run(programs.equal_with_and_without, environment=QUIET)
        pool.run(programs.data_parallel, environment=QUIET)
