"""This package's `loss_parallel` beside PyTorch's own, where that one is right. Imported on the ranks."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from mesh_cases import FOUR, Case, MeshLayout, cut, example, label_placements, logits_placements, mesh_of
from mesh_checks import Checks, Outcome
from tolerances import ROUNDINGS, unit_roundoff
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel as pytorchs_loss_parallel

from megatron_ce_adaptor import loss_parallel


def run_in(context: AbstractContextManager[object], case: Case) -> tuple[DTensor, DTensor]:
    """(loss, logits with their gradient), all inside the context, as PyTorch's needs it."""
    dense, mesh = example(case), mesh_of(case.layout)
    logits = cut(dense.logits, mesh, logits_placements(case)).requires_grad_()
    labels = cut(dense.labels, mesh, label_placements(case))
    with context:
        loss = F.cross_entropy(logits, labels, dense.weight, reduction=case.reduction)
        loss.backward(cut(dense.upstream.to(loss.dtype), mesh, [Replicate()] * mesh.ndim))
    return loss, logits


def compare(rank: int, layouts: list[MeshLayout], reductions: list[str]) -> Outcome:
    """Equal losses, placements and gradients. Left out is what PyTorch gets wrong: class weights with
    ignored labels, empty shards, label smoothing (docs/loss_parallel.md)."""
    checks = Checks()
    shapes = ((9, 17), (4, 16), (3, 10, 5))
    for layout, shape, reduction, dtype, extra in itertools.product(
        layouts, shapes, reductions, (torch.float64, torch.float32), ("", "weighted", "ignored")
    ):
        mask = "some" if extra == "ignored" else "none"
        case = Case(layout, shape, reduction, dtype, weighted=extra == "weighted", ignored=mask)
        (ours, our_logits), (theirs, their_logits) = (
            run_in(context, case) for context in (loss_parallel(), pytorchs_loss_parallel())
        )
        allowed = 2 * ROUNDINGS * unit_roundoff(dtype) * example(case).scale
        checks.that(
            ours.placements == theirs.placements, f"{case}: placements {ours.placements}, {theirs.placements}"
        )
        checks.that(ours.shape == theirs.shape, f"{case}: shapes {ours.shape}, {theirs.shape}")
        checks.close(ours.to_local(), theirs.to_local(), allowed, f"{case}: loss")
        gradients = our_logits.grad, their_logits.grad
        assert isinstance(gradients[0], DTensor) and isinstance(gradients[1], DTensor)
        # of uneven shards PyTorch's may come back replicated: compared by value
        wanted = gradients[1].redistribute(our_logits.device_mesh, our_logits.placements)
        checks.close(gradients[0].to_local(), wanted.to_local(), allowed, f"{case}: gradient")
    return checks.outcome


ONE_DIMENSION = [FOUR[0]]
SEVERAL_DIMENSIONS = [FOUR[1], FOUR[2], FOUR[3], FOUR[4]]
