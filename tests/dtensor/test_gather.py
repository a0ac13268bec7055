"""`gather_tensor_parallel_logits`: values, gradient, and one collective."""

from __future__ import annotations

from collections.abc import Callable

import mesh_checks
import pytest
import torch
from mesh_cases import FOUR, TWO, Case


def test_dtensors(run_ranks: Callable, no_failures: Callable) -> None:
    cases = [
        Case(layout, shape, "none", dtype, direct=True)
        for layout in FOUR
        for shape in ((9, 17), (3, 2, 3), (5, 16))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    no_failures(run_ranks(4, mesh_checks.gather_cases, cases))
    no_failures(run_ranks(2, mesh_checks.gather_cases, [Case(TWO[0], (4, 7), "none", direct=True)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("sizes", "described"),
    [([3, 3, 3, 0], True), ([1, 1, 1, 0], True), ([5, 5, 5, 5], False), ([4, 0, 2, 7], False)],
    ids=str,
)
def test_plain_shards(
    run_ranks: Callable, no_failures: Callable, sizes: list[int], described: bool, dtype: torch.dtype
) -> None:
    """Of a described vocabulary with one collective, of any sizes with two."""
    no_failures(run_ranks(4, mesh_checks.gather_plain, sizes, described, dtype))


def test_an_unsplit_vocabulary_is_returned() -> None:
    from megatron_ce_adaptor import gather_tensor_parallel_logits

    logits = torch.randn(2, 5)
    assert gather_tensor_parallel_logits(logits) is logits
    assert gather_tensor_parallel_logits(logits, None, 5) is logits
