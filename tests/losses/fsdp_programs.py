"""ChunkedLossWrapper over lm_heads that fully_shard has sharded, on the ranks of a test."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from dense import Problem, assert_close, assert_number
from rank_programs import UPSTREAM, Counts, counted, linear, remember
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss


class Model(nn.Module):
    """Embedding-like layer, norm and output layer; forward stops before the output layer."""

    def __init__(self, p: Problem) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        with torch.no_grad():
            self.first.weight.copy_(torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6))
            self.first.bias.fill_(0.1)
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.lm_head = linear(p.weight, p.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def _dense_step(p: Problem, upstream: float, steps: int = 1) -> tuple[float, dict[str, Tensor]]:
    model = Model(p)
    total = 0.0
    for _ in range(steps):
        loss, _ = CrossEntropyLoss()(model.lm_head(model(p.hidden)), p.labels, p.valid)
        (loss * upstream).backward()
        total = float(loss.detach())
    return total, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def reshard_settings(head: Any) -> Any:
    """What set_reshard_after_forward sets, None for a module without FSDP."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(head, FSDPModule):
        return None
    state = head._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return state._auto_reshard_after_forward, [group.post_forward_mesh_info for group in groups]


def fsdp(rank: int) -> dict[str, tuple[Counts, Counts]]:
    """Sharded parameters on data-parallel ranks: gradients of the global batch, collectives of one step."""
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    p = Problem.make((2 * world, 7), 6, 13)
    # FSDP averages over the ranks
    dense_loss, dense = _dense_step(p, UPSTREAM / world)
    rows = slice(2 * rank, 2 * rank + 2)
    counts = {}

    def arrange(kind: str) -> Model:
        model = Model(p)
        if kind == "head":
            fully_shard(model.lm_head, mesh=mesh)
        elif kind == "grouped":
            fully_shard([model.norm, model.lm_head], mesh=mesh)
        if kind == "root only":
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
        else:
            fully_shard(model, mesh=mesh)
        return model

    for kind in ("head", "grouped", "root only"):
        model = arrange(kind)
        head: Any = model.lm_head
        settings = functools.partial(reshard_settings, head)
        before = settings()
        call = ChunkedLossWrapper(CrossEntropyLoss(), num_chunks=4).set_lm_head(head)
        for step in range(2):
            hidden = model(p.hidden[rows])
            loss, forward, backward = counted(remember(call, {}, hidden, p.labels[rows], p.valid))
            assert settings() == before
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert_number(total, dense_loss, f"{kind} {step}: loss")
            for name, parameter in model.named_parameters():
                assert_close(parameter.grad.full_tensor(), dense[name], f"{kind} {step}: {name}")
                parameter.grad = None
            counts[kind] = (forward, backward)
        _after_an_exception(kind, model, call, p, rows, dense, settings, before)
        _without_sync(model, call, p, rows, dense)
        with torch.no_grad():
            total = call(model(p.hidden[rows]), p.labels[rows], p.valid)[0]
        assert settings() == before
        dist.all_reduce(total)
        assert_number(total, dense_loss, f"{kind}: evaluation")
    return counts


def _after_an_exception(
    kind: str,
    model: Model,
    call: Any,
    p: Problem,
    rows: slice,
    dense: dict[str, Tensor],
    settings: Any,
    before: Any,
) -> None:
    """An exception in a chunk leaves the flags as they were, and the next step is right."""
    bad = p.labels[rows].clone()
    bad[-1, -1] = 999
    try:
        call(model(p.hidden[rows]), bad, p.valid)
    except ValueError as error:
        assert "999" in str(error)
    else:
        raise AssertionError("a label that is no class was accepted")
    assert settings() == before
    if kind == "head":  # in newer torch, a group stays gathered until all of its modules have run again
        assert isinstance(model.lm_head.weight, DTensor), "still gathered"
    (call(model(p.hidden[rows]), p.labels[rows], p.valid)[0] * UPSTREAM).backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad.full_tensor(), dense[name], f"after an exception: {name}")
        parameter.grad = None


def _without_sync(model: Any, call: Any, p: Problem, rows: slice, dense: dict[str, Tensor]) -> None:
    """The first of two micro-batches without gradient synchronisation."""
    for i in range(2):
        model.set_requires_gradient_sync(i == 1)
        hidden = model(p.hidden[rows])
        _, _, backward = counted(remember(call, {}, hidden, p.labels[rows], p.valid))
        assert i == 1 or "reduce_scatter" not in backward, backward
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad.full_tensor(), 2 * dense[name], f"two micro-batches: {name}")
        parameter.grad = None


def fsdp_mixed_precision(rank: int) -> None:
    """bf16 parameters and outputs, fp32 masters: the loss stays fp32, the gradients are close."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    p = Problem.make((2 * world, 7), 6, 13)
    dense_loss, dense = _dense_step(p, 1 / world)
    model = Model(p).float()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
    )
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    rows = slice(2 * rank, 2 * rank + 2)
    call = ChunkedLossWrapper(CrossEntropyLoss(), num_chunks=4, accumulation_dtype=torch.float32)
    loss, _ = call.set_lm_head(model.lm_head)(model(p.hidden[rows].float()), p.labels[rows], p.valid)
    assert loss.dtype == torch.float32
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total)
    assert_number(total, dense_loss, "loss", 1e-2)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert_close(parameter.grad.full_tensor(), dense[name], name, 3e-2)


def fsdp_and_tp(rank: int) -> tuple[Counts, Counts]:
    """FSDP2 over a tensor-parallel head on a 2 x 2 mesh."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh.get_local_rank("dp")
    p = Problem.make((4, 8), 6, 10)
    dense_loss, dense = _dense_step(p, UPSTREAM / 2)
    model = Model(p)
    parallelize_module(
        model.lm_head,
        mesh["tp"],
        ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False),
    )
    fully_shard(model.lm_head, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    call = ChunkedLossWrapper(CrossEntropyLoss(), num_chunks=3).set_lm_head(model.lm_head)
    rows = slice(2 * dp, 2 * dp + 2)
    for _ in range(2):
        hidden = model(p.hidden[rows])
        loss, forward, backward = counted(remember(call, {}, hidden, p.labels[rows], p.valid))
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        assert_number(total, dense_loss, "loss")
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad.full_tensor(), dense[name], name)
            parameter.grad = None
    return forward, backward
