"""Callers that torch.compile has compiled; imported on the ranks by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_cases import Case, cut, example, label_placements, logits_placements, mesh_of
from mesh_checks import Checks, Outcome, check_gradient, check_loss
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from megatron_ce_adaptor import gather_tensor_parallel_logits, loss_parallel, loss_parallel_cross_entropy


def compiled_callers(rank: int, case: Case) -> Outcome:
    """The context inside and around a compiled function, the direct API, and the gather of plain shards: once
    the DTensors' gradient was lost without a word."""
    checks = Checks()
    dense, mesh = example(case), mesh_of(case.layout)
    labels = cut(dense.labels, mesh, label_placements(case))

    def functional(logits: DTensor) -> Tensor:
        return F.cross_entropy(logits, labels, dense.weight)

    def inside(logits: DTensor) -> Tensor:
        with loss_parallel():
            return functional(logits)

    def direct(logits: DTensor) -> Tensor:
        return loss_parallel_cross_entropy(logits, labels, weight=dense.weight, reduction="mean")

    def around(logits: DTensor) -> Tensor:
        with loss_parallel():
            return _compiled(functional)(logits)

    for call in (_compiled(inside), _compiled(direct), around):
        logits = cut(dense.logits, mesh, logits_placements(case)).requires_grad_()
        loss = call(logits)
        loss.backward(cut(dense.upstream, mesh, [Replicate()] * mesh.ndim))
        check_loss(case, dense, loss, checks)
        check_gradient(case, dense, logits, checks)
    shard = torch.full((2, 3), rank, dtype=torch.float64, requires_grad=True)
    gathered = _compiled(lambda x: gather_tensor_parallel_logits(x, dist.group.WORLD, 12))(shard)
    (gathered * torch.arange(12)).sum().backward()
    checks.close(gathered, torch.arange(4).repeat_interleave(3).expand(2, 12), 0.0, "gathered")
    checks.close(shard.grad, (3 * rank + torch.arange(3)).expand(2, 3), 0.0, "gradient of the gathered")
    torch._dynamo.reset()
    return checks.outcome


def _compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(call, backend="aot_eager")
