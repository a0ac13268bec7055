"""What each rank of a tensor-parallel test runs. Imported on the ranks by name; `test_tensor_parallel.py`
calls it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from poison import poisoned_empty
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy


@dataclass
class Call:
    """One call of the operation on vocabulary shards: the same on every rank, each takes its columns."""

    logits: torch.Tensor  # the full vocabulary
    target: torch.Tensor
    upstream: torch.Tensor | None = None  # ones if None
    options: dict[str, Any] = field(default_factory=dict)
    sizes: list[int] | None = None  # columns of each shard; equal if None
    device: str = "cpu"


@dataclass
class Result:
    loss: torch.Tensor
    gradient: torch.Tensor  # of this rank's columns
    statistics: dict[str, torch.Tensor] | None
    forward_collectives: dict[str, int]
    backward_collectives: dict[str, int]


class CollectiveCounter(TorchDispatchMode):
    """Counts the communication operators that are called inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def run(rank: int, call: Call, group: Any = "world") -> Result:
    """Forward and backward of this rank's shard, in `group`."""
    group = dist.group.WORLD if group == "world" else group
    place, size = (group.rank(), group.size()) if group is not None else (0, 1)
    sizes = call.sizes or [call.logits.shape[-1] // size] * size
    begin = sum(sizes[:place])
    shard = call.logits[..., begin : begin + sizes[place]].to(call.device, copy=True).requires_grad_()
    target = call.target.to(call.device)
    with poisoned_empty():
        with CollectiveCounter() as forward:
            result = parallel_cross_entropy(shard * 1, target, dist_process_group=group, **call.options)
        loss, statistics = result if call.options.get("return_statistics") else (result, None)
        upstream = torch.ones_like(loss) if call.upstream is None else call.upstream.to(call.device)
        with CollectiveCounter() as backward:
            (gradient,) = torch.autograd.grad(loss, shard, upstream)
    return Result(
        loss.detach().cpu(),
        gradient.cpu(),
        None if statistics is None else {k: v.cpu() for k, v in statistics._asdict().items()},
        dict(forward.calls),
        dict(backward.calls),
    )


def run_compiled(rank: int, call: Call) -> tuple[bool, bool]:
    """Whether loss and gradient under torch.compile(fullgraph=True) are bitwise those of eager."""
    columns = call.logits.shape[-1] // dist.get_world_size()
    shard = (
        call.logits[..., rank * columns : (rank + 1) * columns].to(call.device, copy=True).requires_grad_()
    )
    target = call.target.to(call.device)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return parallel_cross_entropy(logits * 1, target, dist_process_group=dist.group.WORLD, **call.options)

    results = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        loss = function(shard)
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), shard)[0]))
    (eager, compiled) = results
    return torch.equal(eager[0], compiled[0]), torch.equal(eager[1], compiled[1])


def run_all(rank: int, calls: list[Call]) -> list[Result]:
    return [run(rank, call) for call in calls]


_subgroups: dict[tuple[tuple[int, ...], ...], Any] = {}


def run_in_subgroup(rank: int, call: Call, members: list[list[int]]) -> Result:
    """As `run`, in the group of `members` that this rank is in."""
    key = tuple(map(tuple, members))
    if key not in _subgroups:
        _subgroups[key] = dist.new_subgroups_by_enumeration(members)[0]
    return run(rank, call, _subgroups[key])


def run_without_group(rank: int, call: Call) -> Result:
    """As `run` with `dist_process_group=None`: the whole vocabulary is here, though processes are grouped."""
    return run(rank, call, None)


def run_outside_of_group(rank: int, call: Call) -> str:
    """Every rank passes the group of rank 0; what happened, in words."""
    group = dist.new_group([0])
    try:
        parallel_cross_entropy(
            call.logits.to(call.device), call.target.to(call.device), dist_process_group=group
        )
    except ValueError as error:
        return f"ValueError: {error}"
    return "returned"


def run_expecting_errors(rank: int, calls: list[Call]) -> list[str]:
    """What each of the calls did in one fresh group: "returned", "returned NaN", or the error's type and
    text.

    Then all ranks meet once more.
    """
    outcomes = []
    group = dist.new_group()
    for call in calls:
        try:
            loss = run(rank, call, group).loss
            outcomes.append("returned NaN" if loss.isnan().all() else "returned")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return outcomes


# --- what the tests of the harness itself run ---------------------------------------------------------------


def rank_and_sum(rank: int, value: float) -> tuple[int, float]:
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    return rank, float(total)


def print_and_hang(rank: int) -> None:
    print(f"rank {rank} is here")
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def raise_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def die_on_rank_0(rank: int) -> None:
    if rank == 0:
        import os

        os._exit(3)
    dist.barrier()
