"""Loss, gradient, placements and collectives of every reduction on every kind of mesh, against dense fp64."""

from __future__ import annotations

from collections.abc import Callable

import mesh_checks
import pytest
import torch
from mesh_cases import FOUR, TWO, Case, MeshLayout, crossed, sampled

CP_TP = MeshLayout((2, 2), ("seq", "tp"))


@pytest.mark.parametrize("layout", FOUR[:4], ids=str)
def test_every_reduction_size_weight_smoothing_and_mask(
    run_ranks: Callable, no_failures: Callable, layout: MeshLayout
) -> None:
    """HAZARDS 17, 24, 25, 26, 28: on 4 ranks, fp64."""
    no_failures(run_ranks(4, mesh_checks.run_cases, list(crossed([layout]))))


def test_more_meshes(run_ranks: Callable, no_failures: Callable) -> None:
    """A batch that is replicated or split twice, a mesh whose ranks are not in order, fp32, and all tokens
    ignored (HAZARDS 13)."""
    no_failures(run_ranks(4, mesh_checks.run_cases, sampled(60, FOUR[4:])))
    no_failures(run_ranks(4, mesh_checks.run_cases, sampled(60, FOUR, dtype=torch.float32)))


def test_two_ranks(run_ranks: Callable, no_failures: Callable) -> None:
    """Also a mesh dimension of one rank that holds all classes."""
    no_failures(run_ranks(2, mesh_checks.run_cases, sampled(100, TWO)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_class_dimension_and_direct_api(
    run_ranks: Callable, no_failures: Callable, dtype: torch.dtype
) -> None:
    """[C], [N, C, d], [N, C, d1, d2] as PyTorch has them; [..., C] with z-loss in the direct API."""
    options = {"weighted": True, "label_smoothing": 0.1, "dtype": dtype}
    cases = [Case(FOUR[0], (17,), reduction, **options) for reduction in ("none", "sum", "mean")]
    for layout in (FOUR[1], CP_TP, FOUR[4], MeshLayout((2, 2), ("tp", "seq"))):
        for reduction in ("none", "sum", "mean"):
            shared = {**options, "ignored": "some"}
            cases += [Case(layout, shape, reduction, **shared) for shape in ((3, 9, 5), (2, 10, 3, 2))]
            cases += [
                Case(layout, shape, reduction, direct=True, z_loss_weight=1e-2, **shared)
                for shape in ((3, 5, 9), (2, 3, 2, 10), (5, 11))
            ]
    no_failures(run_ranks(4, mesh_checks.run_cases, cases))


def test_classes_on_every_rank_when_not_strict(run_ranks: Callable, no_failures: Callable) -> None:
    """HAZARDS 24: PyTorch's own weighted mean of a sharded batch is not relied on."""
    layouts = (MeshLayout((4,), ("batch",)), MeshLayout((2, 2), ("batch", "copy")))
    no_failures(run_ranks(4, mesh_checks.run_cases, sampled(40, layouts, strict=False)))


def test_statistics_and_bf16(run_ranks: Callable, no_failures: Callable) -> None:
    case = Case(FOUR[1], (5, 3, 13), "none", torch.bfloat16, ignored="some", direct=True)
    no_failures(run_ranks(4, mesh_checks.statistics_and_bf16, case))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_upstream_gradients_of_any_placements(
    run_ranks: Callable, no_failures: Callable, reduction: str
) -> None:
    for layout in (FOUR[1], FOUR[2], FOUR[0]):
        case = Case(layout, (9, 17), reduction, weighted=True, label_smoothing=0.1, ignored="some")
        no_failures(run_ranks(4, mesh_checks.replicated_upstream, case))


def test_overwritten_logits(run_ranks: Callable, no_failures: Callable) -> None:
    no_failures(run_ranks(4, mesh_checks.overwritten, Case(FOUR[1], (9, 17), "sum", direct=True)))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(("classes", "described"), [(9, True), (3, True), (13, True), (16, False)])
def test_plain_shards_with_a_group(
    run_ranks: Callable, no_failures: Callable, classes: int, described: bool, reduction: str
) -> None:
    """HAZARDS 20, 25."""
    shape = (2, 3) if classes % 2 else (5,)
    no_failures(run_ranks(4, mesh_checks.plain_shards, classes, shape, reduction, described))
