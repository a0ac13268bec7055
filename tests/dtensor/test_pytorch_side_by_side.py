"""Equal to PyTorch's own `loss_parallel` where that one is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import pytorch_side_by_side as side_by_side
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_one_dimension(run_ranks: Callable, no_failures: Callable) -> None:
    reductions = ["none", "sum", "mean"]
    no_failures(run_ranks(4, side_by_side.compare, side_by_side.ONE_DIMENSION, reductions))


@pytest.mark.skipif(
    VERSION < (2, 13), reason="PyTorch's loss_parallel has meshes of one dimension before 2.13"
)
def test_several_dimensions(run_ranks: Callable, no_failures: Callable) -> None:
    no_failures(run_ranks(4, side_by_side.compare, side_by_side.SEVERAL_DIMENSIONS, ["none", "sum"]))
