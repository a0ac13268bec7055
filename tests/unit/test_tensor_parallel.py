"""Vocabulary shards on 2 and 4 ranks against the dense fp64 reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tp_cases
from conftest import Device
from oracle import dense_cross_entropy
from tolerances import assert_gradient_close, assert_loss_close, assert_statistics_close, compute_dtype
from tp_cases import Call, Result
from tp_harness import RankPool

Pools = Callable[[int], RankPool]

HANG_S = 60.0
"""Far more than a call takes on a busy machine, and well below the time limit of the test run."""


def environment(device: Device) -> dict[str, str]:
    return {
        "MCE_IMPLEMENTATION": device.implementation,
        "MCE_CHECK_LABELS": "1" if device.type == "cpu" else "0",
    }


def example(
    *leading: int, vocab: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*leading, vocab, generator=generator) * scale).to(dtype)
    return logits, torch.randint(0, vocab, leading, generator=generator)


def assert_equal_to_dense(results: list[Result], call: Call) -> None:
    """Every rank has the reference's loss, bit for bit the same one, its columns of the gradient, the
    statistics."""
    options = {k: v for k, v in call.options.items() if k not in ("return_statistics", "overwrite_input")}
    reference = dense_cross_entropy(call.logits, call.target, upstream=call.upstream, **options)
    dtype = call.logits.dtype
    for result in results:
        assert_loss_close(result.loss, reference, dtype)
        assert torch.equal(result.loss, results[0].loss), "the loss differs between ranks"
        if result.statistics is not None:
            assert_statistics_close(SimpleNamespace(**result.statistics), reference, dtype)
            for name, value in result.statistics.items():
                assert torch.equal(value, results[0].statistics[name]), f"{name} differs between ranks"
    gradient = torch.cat([result.gradient for result in results], dim=-1)
    assert_gradient_close(gradient, reference, dtype)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_equals_dense(device: Device, rank_pools: Pools, world_size: int, dtype: torch.dtype) -> None:
    """HAZARDS 9: smoothing and logits x1 and x1000, ignored targets, both reductions, z-loss, all with
    statistics."""
    calls = []
    combinations = list(itertools.product((0.0, 0.1), (1.0, 1000.0), (False, True)))
    leading = (3, 4)
    if device.name == "interpreter":  # every two together, not every three, and few rows: it is slow
        combinations = [(0.0, 1.0, False), (0.0, 1000.0, True), (0.1, 1.0, True), (0.1, 1000.0, False)]
        leading = (2, 3)
    for label_smoothing, scale, reduce_loss in combinations:
        logits, target = example(*leading, vocab=world_size * 33, dtype=dtype, scale=scale)
        target[1, 2] = -100
        upstream = torch.randn(() if reduce_loss else leading, generator=torch.Generator().manual_seed(5))
        options = {"label_smoothing": label_smoothing, "reduce_loss": reduce_loss}
        calls.append(Call(logits, target, upstream.to(compute_dtype(dtype)), options, device=device.type))
    logits, target = example(5, vocab=world_size * 33, dtype=dtype, scale=3.0)
    target[3] = 7
    for options in (
        {"z_loss_weight": 0.01, "label_smoothing": 0.2, "return_statistics": True, "ignore_idx": 7},
        {"return_statistics": True, "overwrite_input": True},
    ):
        calls.append(
            Call(logits, target, torch.randn(5).to(compute_dtype(dtype)), options, device=device.type)
        )
    results = rank_pools(world_size).run(tp_cases.run_all, calls, environment=environment(device))
    for index, call in enumerate(calls):
        assert_equal_to_dense([result[index] for result in results], call)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_larger_vocabulary(device: Device, rank_pools: Pools, world_size: int) -> None:
    """Several blocks of columns on every rank."""
    logits, target = example(2, vocab=world_size * 9001, dtype=torch.bfloat16, scale=4.0)
    call = Call(logits, target, torch.tensor([0.0, 1.5]), {"label_smoothing": 0.1}, device=device.type)
    assert_equal_to_dense(
        rank_pools(world_size).run(tp_cases.run, call, environment=environment(device)), call
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_targets_at_the_ends_of_every_shard(device: Device, rank_pools: Pools, world_size: int) -> None:
    columns = 10
    target = torch.tensor([[i * columns, i * columns + columns - 1] for i in range(world_size)]).flatten()
    logits, _ = example(len(target), vocab=world_size * columns)
    call = Call(logits, target, options={"return_statistics": True}, device=device.type)
    assert_equal_to_dense(
        rank_pools(world_size).run(tp_cases.run, call, environment=environment(device)), call
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_column_a_rank(device: Device, rank_pools: Pools, world_size: int) -> None:
    logits, target = example(6, vocab=world_size)
    call = Call(
        logits, target, options={"label_smoothing": 0.1, "return_statistics": True}, device=device.type
    )
    assert_equal_to_dense(
        rank_pools(world_size).run(tp_cases.run, call, environment=environment(device)), call
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_shard_of_minus_infinity(device: Device, rank_pools: Pools, dtype: torch.dtype) -> None:
    """HAZARDS 11: finite as dense; each of two shards in turn, all but one column, and the target's own
    shard."""
    logits, _ = example(5, vocab=40, dtype=dtype)
    logits[0, :20] = -torch.inf
    logits[1, 20:] = -torch.inf
    logits[2, :39] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, :20] = -torch.inf  # with the target in it: loss inf, gradient finite
    target = torch.tensor([25, 3, 39, 0, 7])
    call = Call(logits, target, torch.randn(5), {"return_statistics": True}, device=device.type)
    call_without_last = Call(
        logits[:4], target[:4], torch.randn(4), {"return_statistics": True}, device=device.type
    )
    results = rank_pools(2).run(tp_cases.run_all, [call_without_last], environment=environment(device))
    assert_equal_to_dense([result[0] for result in results], call_without_last)
    call.options = {}
    results = rank_pools(2).run(tp_cases.run, call, environment=environment(device))
    assert_equal_to_dense(results, call)
    assert results[0].loss.isfinite().tolist() == [True] * 4 + [False]
    assert all(result.gradient.isfinite().all() for result in results)


def test_nan_on_one_rank_stays_in_its_row_on_all_ranks(device: Device, rank_pools: Pools) -> None:
    logits, target = example(4, vocab=20)
    logits[2, 3] = torch.nan
    call = Call(logits, target, device=device.type)
    for result in rank_pools(2).run(tp_cases.run, call, environment=environment(device)):
        assert result.loss.isnan().tolist() == [False, False, True, False]
        assert result.gradient.isnan().any(-1).tolist() == [False, False, True, False]


def test_all_targets_ignored(device: Device, rank_pools: Pools) -> None:
    """HAZARDS 13 and 28: exact zeros on every rank, over logits of NaN."""
    call = Call(
        torch.full((3, 20), torch.nan),
        torch.full((3,), -100),
        options={"reduce_loss": True},
        device=device.type,
    )
    for result in rank_pools(2).run(tp_cases.run, call, environment=environment(device)):
        assert result.loss.item() == 0.0
        assert not result.gradient.ne(0).any()


def test_equal_logits_of_1e8(device: Device, rank_pools: Pools) -> None:
    call = Call(torch.full((2, 80), 1e8), torch.tensor([0, 79]), device=device.type)
    assert_equal_to_dense(rank_pools(4).run(tp_cases.run, call, environment=environment(device)), call)


def test_no_rows(device: Device, rank_pools: Pools) -> None:
    call = Call(torch.zeros(0, 3, 20), torch.zeros(0, 3, dtype=torch.int64), device=device.type)
    for result in rank_pools(2).run(tp_cases.run, call, environment=environment(device)):
        assert result.loss.shape == (0, 3)
        assert result.gradient.shape == (0, 3, 10)


# --- collectives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_collective_forward_and_none_backward(device: Device, rank_pools: Pools, world_size: int) -> None:
    logits, target = example(3, 4, vocab=world_size * 8)
    calls = [
        Call(logits, target, options=options, device=device.type)
        for options in (
            {},
            {"label_smoothing": 0.1, "reduce_loss": True, "z_loss_weight": 0.1, "return_statistics": True},
        )
    ]
    for results in rank_pools(world_size).run(tp_cases.run_all, calls, environment=environment(device)):
        for result in results:
            assert sum(result.forward_collectives.values()) == 1, result.forward_collectives
            assert "allgather" in next(iter(result.forward_collectives))
            assert result.backward_collectives == {}


def test_a_group_that_is_part_of_the_world(device: Device, rank_pools: Pools) -> None:
    """Ranks of the group, not of the world, say who holds which columns; members need not be neighbours."""
    logits, target = example(6, vocab=50)
    call = Call(logits, target, options={"label_smoothing": 0.1}, device=device.type)
    for members in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        results = rank_pools(4).run(tp_cases.run_in_subgroup, call, members, environment=environment(device))
        for pair in members:
            assert_equal_to_dense([results[rank] for rank in pair], call)


def test_a_group_of_one_rank_needs_no_collective(device: Device, rank_pools: Pools) -> None:
    logits, target = example(6, vocab=50)
    call = Call(logits, target, options={"label_smoothing": 0.1}, device=device.type)
    alone = rank_pools(2).run(tp_cases.run_in_subgroup, call, [[0], [1]], environment=environment(device))
    without = rank_pools(2).run(tp_cases.run_without_group, call, environment=environment(device))
    for result in alone + without:
        assert_equal_to_dense([result], call)
        assert result.forward_collectives == {}


def test_a_rank_outside_of_the_group_is_told(device: Device, rank_pools: Pools) -> None:
    logits, target = example(3, vocab=8)
    call = Call(logits, target, device=device.type)
    outcomes = rank_pools(2).run(tp_cases.run_outside_of_group, call, environment=environment(device))
    assert outcomes[0] == "returned"
    assert outcomes[1].startswith("ValueError") and "dist_process_group" in outcomes[1]


def test_compiled_equals_eager(device: Device, rank_pools: Pools) -> None:
    logits, target = example(6, vocab=50)
    call = Call(logits, target, options={"label_smoothing": 0.1}, device=device.type)
    outcomes = rank_pools(2).run(tp_cases.run_compiled, call, environment=environment(device))
    assert outcomes == [(True, True), (True, True)]


# --- errors are the same on all ranks -----------------------------------------------------------------------


def uneven(rows: int, sizes: list[int], device: Device, **options: Any) -> Call:
    logits, target = example(rows, vocab=sum(sizes))
    target[0] = sum(sizes) - 1  # beyond the vocabulary as a rank with a small shard would reckon it
    target[-1] = 0
    return Call(logits, target, options=options, sizes=sizes, device=device.type)


@pytest.mark.parametrize("sizes", [[13, 11], [11, 13], [6, 6, 6, 5], [7, 6, 6, 6]], ids=str)
@pytest.mark.parametrize("check_labels", ["0", "1"])
def test_uneven_shards_raise_on_all_ranks(
    device: Device, rank_pools: Pools, sizes: list[int], check_labels: str
) -> None:
    """HAZARDS 10: the same ValueError on every rank, no hang, and the group works afterwards."""
    logits, target = example(4, vocab=len(sizes) * 8)
    good = Call(logits, target, device=device.type)
    calls = [uneven(4, sizes, device), uneven(4, sizes, device, label_smoothing=0.1, reduce_loss=True), good]
    outcomes = rank_pools(len(sizes)).run(
        tp_cases.run_expecting_errors,
        calls,
        environment={**environment(device), "MCE_CHECK_LABELS": check_labels},
        timeout_s=HANG_S,
    )
    for outcome in outcomes:
        assert outcome[0].startswith("ValueError") and outcome[1].startswith("ValueError"), outcome
        assert all(str(size) in outcome[0] for size in sizes), outcome[0]
        assert outcome[2] == "returned"
    assert len({outcome[0] for outcome in outcomes}) == 1, outcomes


@pytest.mark.parametrize("same_on_rank_0", [True, False])
def test_shards_that_become_uneven_at_a_later_call(
    device: Device, rank_pools: Pools, same_on_rank_0: bool
) -> None:
    """Also when some rank has already passed with its size, or with the other one's.

    On a device the sizes are compared once a group, so later the losses are NaN: on all ranks, which go on
        together.
    """
    logits, target = example(4, vocab=24)
    even = Call(logits, target, device=device.type)
    larger = Call(*example(4, vocab=26), device=device.type)
    sizes = [12, 13] if same_on_rank_0 else [13, 12]
    calls = [even, larger, uneven(4, sizes, device), even, uneven(4, sizes, device)]
    outcomes = rank_pools(2).run(
        tp_cases.run_expecting_errors, calls, environment=environment(device), timeout_s=HANG_S
    )
    assert outcomes[0] == outcomes[1]
    refused = "ValueError" if device.type == "cpu" else "returned NaN"
    assert [text.split(":")[0] for text in outcomes[0]] == [
        "returned",
        "returned",
        refused,
        "returned",
        refused,
    ]


def test_a_label_out_of_range_raises_on_all_ranks(device: Device, rank_pools: Pools) -> None:
    """The range is the whole vocabulary's, not a shard's."""
    logits, target = example(4, vocab=24)
    target[1] = 23
    fine = Call(logits, target, device=device.type)
    bad = Call(logits, target.clone().index_fill_(0, torch.tensor([2]), 24), device=device.type)
    outcomes = rank_pools(2).run(
        tp_cases.run_expecting_errors,
        [fine, bad, fine],
        environment={**environment(device), "MCE_CHECK_LABELS": "1"},
        timeout_s=HANG_S,
    )
    assert outcomes[0] == outcomes[1]
    assert [text.split(":")[0] for text in outcomes[0]] == ["returned", "ValueError", "returned"]
    assert "24" in outcomes[0][1]


def test_unchecked_label_out_of_range_is_finite(device: Device, rank_pools: Pools) -> None:
    """HAZARDS 12 on shards: the loss is lse - max over the whole row, on every rank; the gradient the
    softmax."""
    logits, target = example(4, vocab=24)
    target[2], target[3] = -1, 24
    call = Call(logits, target, device=device.type)
    results = rank_pools(2).run(
        tp_cases.run, call, environment={**environment(device), "MCE_CHECK_LABELS": "0"}
    )
    stand_in = target.clone()
    stand_in[2:] = logits[2:].argmax(-1)
    reference = dense_cross_entropy(logits, stand_in)
    for result in results:
        assert_loss_close(result.loss, reference, torch.float32)
        assert torch.equal(result.loss, results[0].loss)
    gradient = torch.cat([result.gradient for result in results], dim=-1)
    torch.testing.assert_close(gradient[2:], logits[2:].softmax(-1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient[:2].double(), reference.gradient[:2], rtol=1e-5, atol=1e-7)


def test_bitwise_equal_over_repeats(device: Device, rank_pools: Pools) -> None:
    logits, target = example(8, vocab=400, scale=5.0)
    call = Call(logits, target, options={"label_smoothing": 0.1}, device=device.type)
    results = rank_pools(4).run(tp_cases.run_all, [call] * 4, environment=environment(device))
    for repeats in results:
        for repeat in repeats[1:]:
            assert torch.equal(repeat.loss, repeats[0].loss)
            assert torch.equal(repeat.gradient, repeats[0].gradient)
