"""Calls that do not fit, on the ranks of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dense import Problem
from fsdp_programs import Model
from rank_programs import chunk_of, linear
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss


def bad_calls(rank: int) -> dict[str, str]:
    """What each of many calls that do not fit said on this rank; all ranks meet after each."""
    world, group = dist.get_world_size(), dist.group.WORLD
    mesh = init_device_mesh("cpu", (world,))
    other = init_device_mesh("cpu", (1, world))
    p = Problem.make((2, 3), 6, 8, bias=False, ignored=0.0)
    nine = Problem.make((2, 3), 6, 9, bias=False, ignored=0.0)
    own = linear(chunk_of(p.weight, rank, world), None)
    uneven = linear(chunk_of(nine.weight, rank, world), None)
    split = CrossEntropyLoss(tp_group=group)
    too_large = p.labels.clone()
    too_large[1, 2] = 8

    def dtensor_head(placement: Any, on: DeviceMesh = mesh) -> nn.Linear:
        layer = linear(p.weight, None)
        layer.weight = nn.Parameter(distribute_tensor(p.weight, on, placement))
        return layer

    def chunked(
        head: nn.Module, loss_of: CrossEntropyLoss, hidden: Tensor, labels: Tensor, reduce: bool | None = None
    ) -> Any:
        call = ChunkedLossWrapper(loss_of, num_chunks=2, reduce_hidden_gradient=reduce).set_lm_head(head)
        return call(hidden, labels)

    def fsdp_leftover() -> Any:
        from torch.distributed.fsdp import fully_shard

        model = Model(p)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        return chunked(model.lm_head, CrossEntropyLoss(), model(p.hidden), p.labels)

    rows = DTensor.from_local(p.hidden, mesh, [Shard(0)], run_check=False)
    everywhere = DTensor.from_local(p.hidden, mesh, [Replicate()], run_check=False)
    plain, vocabulary = CrossEntropyLoss(), [Shard(0)]
    calls: dict[str, Callable[[], Any]] = {
        "no reduction named": lambda: chunked(own, split, p.hidden, p.labels),
        "uneven shards": lambda: chunked(uneven, split, p.hidden, p.labels, True),
        "wrong vocabulary": lambda: chunked(
            uneven, CrossEntropyLoss(tp_group=group, global_vocab_size=8), p.hidden, p.labels, True
        ),
        "wrong vocabulary with class weights": lambda: chunked(
            uneven,
            CrossEntropyLoss(tp_group=group, global_vocab_size=8, weight=torch.ones(8), label_smoothing=0.1),
            p.hidden,
            p.labels,
            True,
        ),
        "uneven shards with class weights": lambda: chunked(
            uneven, CrossEntropyLoss(tp_group=group, weight=torch.ones(10)), p.hidden, p.labels, True
        ),
        "class weight": lambda: chunked(
            own, CrossEntropyLoss(tp_group=group, weight=torch.ones(4)), p.hidden, p.labels, True
        ),
        "labels": lambda: chunked(own, split, p.hidden, torch.zeros(2, 4, dtype=torch.long), True),
        "label": lambda: chunked(own, split, p.hidden, too_large, True),
        "float labels": lambda: chunked(own, split, p.hidden, p.labels.float(), True),
        "plain labels": lambda: chunked(
            dtensor_head([Replicate()]), plain, rows, torch.zeros(2 * world, 3, dtype=torch.long)
        ),
        "plain hidden": lambda: chunked(dtensor_head(vocabulary), plain, p.hidden, p.labels),
        "plain head": lambda: chunked(own, plain, everywhere, p.labels),
        "two vocabulary dims": lambda: chunked(dtensor_head([Shard(1)]), plain, everywhere, p.labels),
        "other mesh": lambda: chunked(
            dtensor_head([Replicate(), Shard(0)], other), plain, everywhere, p.labels
        ),
        "empty batch": lambda: chunked(dtensor_head(vocabulary), plain, everywhere[:0], p.labels[:0]),
        "tp_group with DTensors": lambda: chunked(
            dtensor_head(vocabulary), CrossEntropyLoss(global_vocab_size=9), everywhere, p.labels
        ),
        "Partial logits": lambda: plain(
            DTensor.from_local(p.hidden, mesh, [Partial()], run_check=False), p.labels
        ),
        "sharded weight of FSDP": fsdp_leftover,
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "returned"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return found
