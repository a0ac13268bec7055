"""The fp64 reference itself, against PyTorch where PyTorch defines the result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import dense_cross_entropy
from tolerances import assert_gradient_close, assert_loss_close


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("ignore_idx", [-100, 3])
@pytest.mark.parametrize("reduce_loss", [False, True])
def test_equals_pytorch(label_smoothing: float, ignore_idx: int, reduce_loss: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64) * 5
    target = torch.tensor([0, 3, 10, 3, 5, 3, 1])
    target[target == 3] = ignore_idx
    upstream = torch.randn((), generator=generator) if reduce_loss else torch.randn(7, generator=generator)
    ours = dense_cross_entropy(
        logits,
        target,
        upstream=upstream,
        label_smoothing=label_smoothing,
        ignore_idx=ignore_idx,
        reduce_loss=reduce_loss,
    )
    leaf = logits.clone().requires_grad_()
    theirs = F.cross_entropy(
        leaf,
        target,
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction="mean" if reduce_loss else "none",
    )
    theirs.backward(upstream.double())
    assert leaf.grad is not None
    torch.testing.assert_close(ours.loss, theirs.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours.gradient, leaf.grad, rtol=1e-13, atol=1e-14)


def test_infinite_logits_equal_pytorch() -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits[0, :5] = -torch.inf
    logits[1, 1:] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3, 2] = torch.nan
    target = torch.tensor([7, 0, 3, 0])
    ours = dense_cross_entropy(logits, target)
    leaf = logits.clone().requires_grad_()
    theirs = F.cross_entropy(leaf, target, reduction="none")
    theirs.sum().backward()
    torch.testing.assert_close(ours.loss, theirs.detach(), equal_nan=True)
    torch.testing.assert_close(ours.gradient, leaf.grad, equal_nan=True)


def test_all_targets_ignored_is_zero_where_pytorch_has_nan() -> None:
    ours = dense_cross_entropy(torch.full((3, 4), torch.nan), torch.full((3,), -100), reduce_loss=True)
    assert ours.loss.item() == 0.0
    assert torch.equal(ours.gradient, torch.zeros(3, 4, dtype=torch.float64))


def test_z_loss_and_its_gradient() -> None:
    logits = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    target = torch.tensor([1, -100, 2, 0, 7])
    ours = dense_cross_entropy(logits, target, z_loss_weight=0.3)
    leaf = logits.clone().requires_grad_()
    z_loss = 0.3 * leaf.logsumexp(-1).square() * (target != -100)
    total = F.cross_entropy(leaf, target, reduction="none") + z_loss
    total.sum().backward()
    torch.testing.assert_close(ours.loss, total.detach())
    torch.testing.assert_close(ours.gradient, leaf.grad)


def test_statistics() -> None:
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 3
    logits[4, :] = 1.0
    target = logits.argmax(-1)
    target[1] = (target[1] + 1) % 5
    target[2] = -100
    ours = dense_cross_entropy(logits, target)
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(ours.entropy, distribution.entropy())
    torch.testing.assert_close(ours.log_sum_exp, logits.logsumexp(-1))
    expected = distribution.log_prob(target.clamp(min=0))
    expected[2] = 0.0
    torch.testing.assert_close(ours.target_log_prob, expected)
    assert ours.correct.tolist() == [True, False, False, True, True, True]


def test_tolerances_reject_a_twice_rounded_gradient() -> None:
    """TransformerEngine <= 2.17's way: softmax in bf16, minus 1 in bf16, times the upstream gradient in
    bf16."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(8, 1000, generator=generator).bfloat16()
    target = torch.randint(0, 1000, (8,), generator=generator)
    logits[torch.arange(8), target] = 12.0
    upstream = torch.randn(8, generator=generator)
    reference = dense_cross_entropy(logits, target, upstream=upstream)
    assert_gradient_close(reference.gradient.bfloat16(), reference, torch.bfloat16)
    stepwise = logits.float().softmax(-1).bfloat16()
    stepwise[torch.arange(8), target] -= 1.0
    stepwise = stepwise * upstream[:, None].bfloat16()
    with pytest.raises(AssertionError, match="elements are off"):
        assert_gradient_close(stepwise, reference, torch.bfloat16)


def test_tolerances_reject_fp32_errors() -> None:
    """A loss taken as `lse - x_y` at 1e8, and a gradient whose smoothing is Megatron's instead of
    PyTorch's."""
    logits, target = torch.full((2, 100), 1e8), torch.tensor([0, 99])
    reference = dense_cross_entropy(logits, target)
    wrong = logits.logsumexp(-1) - logits.gather(1, target[:, None])[:, 0]
    with pytest.raises(AssertionError, match="loss"):
        assert_loss_close(wrong, reference, torch.float32)
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(5))
    ours = dense_cross_entropy(logits, target, label_smoothing=0.1)
    megatron = dense_cross_entropy(logits, target, label_smoothing=0.1 * 100 / 99)
    with pytest.raises(AssertionError, match="gradient"):
        assert_gradient_close(megatron.gradient.float(), ours, torch.float32)
