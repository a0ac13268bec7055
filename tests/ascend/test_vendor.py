"""The vendor route computes what the reference does, with PyTorch's operators (here the CPU's)."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_ce_adaptor.implementations import reference, vendor
from megatron_ce_adaptor.implementations.class_weights import ClassWeights

OPTIONS = list(itertools.product((0.0, 0.1), (0.0, 0.01), (False, True), (False, True)))


@pytest.mark.parametrize("leading", [(12,), (3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_equals_the_reference(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    """All options, ignored rows that hold NaN, labels that are no class, a transposed layout."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(*leading, 57, generator=generator) * 3).to(dtype)
    if len(leading) == 2:
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    target = torch.randint(0, 57, (12,), generator=generator)
    target[0], target[3], target[4] = -100, -1, 57
    logits[(0,) * len(leading)] = torch.nan
    grad_loss = torch.randn(12, generator=generator)
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-6}
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    class_weight = torch.rand(57, generator=generator) + 0.5
    for label_smoothing, z_loss_weight, statistics, weighted in OPTIONS:
        weights = ClassWeights.of(class_weight, target, 0, 57, accumulation) if weighted else None
        options = {
            "total_columns": 57,
            "ignore_index": -100,
            "label_smoothing": label_smoothing,
            "z_loss_weight": z_loss_weight,
            "weights": weights,
        }
        results = []
        for module in (vendor, reference):
            loss, saved, stats = module.forward(logits, target, statistics=statistics, **options)
            gradient = torch.full_like(logits, torch.nan)
            module.gradient(logits, target, saved, grad_loss, gradient, first_column=0, **options)
            results.append((loss, stats, gradient))
        (loss, stats, gradient), (expected, expected_stats, expected_gradient) = results
        assert loss.dtype == accumulation
        torch.testing.assert_close(loss, expected, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(gradient, expected_gradient, **tolerance)
        assert not gradient[(0,) * len(leading)].any()
        if statistics:
            torch.testing.assert_close(stats[:, 1:], expected_stats[:, 1:], rtol=2e-5, atol=2e-6)
