"""How close a result must be to the fp64 reference, and why. The only place with numbers of this kind.

An implementation computes in fp32 (in fp64 for fp64 logits) and rounds the gradient to the logits' dtype
once:

- *Computation.* Every element is a sum of a few terms, each off by a handful of roundings: the blocked sum
  over the vocabulary (a tree of about 10 levels within a block and up to about 30 blocks one after the
  other, each with one rescaling), the argument of an exponential (its absolute error is its size times the
  unit roundoff, hence the factor `1 + |argument|` in the reference's scales), exp and log themselves (2
  units each on a GPU). `ROUNDINGS` bounds their number; the scales that it multiplies are computed by the
  oracle, element by element.
- *Storage.* One rounding to nearest: a relative error of at most half an epsilon (bf16 2^-8, fp16 2^-11,
  fp32 2^-24), or half the smallest subnormal. Values below the smallest normal fp32 number may be flushed
  to zero on a GPU. Triton's interpreter (TRITON_INTERPRET=1) cuts bf16 off instead of rounding it: 2^-7
  there, in that run only.

- *The reference.* It is computed in fp64, in another order: `REFERENCE_ROUNDINGS` of fp64, which matter
  for fp64 logits only, and where a gradient at the target is smaller than 1e-10.

A gradient that was rounded two or three times, or that went through a bf16 softmax, exceeds this by far.
"""

from __future__ import annotations

import os

import torch
from oracle import Reference
from torch import Tensor

ROUNDINGS = 32
REFERENCE_ROUNDINGS = 16

STATISTICS = ("log_sum_exp", "entropy", "target_log_prob", "correct")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the loss and of everything computed on the way, for logits of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def storage_error(dtype: torch.dtype) -> float:
    """The relative error of storing a value as `dtype`."""
    truncated = dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"
    return unit_roundoff(dtype) * (2.0 if truncated else 1.0)


def underflow(dtype: torch.dtype) -> float:
    """The absolute error where values of `dtype` leave the range of normal numbers."""
    info = torch.finfo(dtype)
    if dtype == torch.float16:
        return info.smallest_normal * info.eps / 2
    return info.smallest_normal


def assert_within(actual: Tensor, expected: Tensor, allowed: Tensor, what: str) -> None:
    """Elementwise |actual - expected| <= allowed; equal infinities and NaN at the same places count as
    equal."""
    actual = actual.detach().double().cpu()
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    wrong = ~(same | ((actual - expected).abs() <= allowed))
    if not wrong.any():
        return
    position = tuple(int(i) for i in wrong.nonzero()[0])
    excess = torch.where(wrong, (actual - expected).abs() / allowed.clamp(min=1e-300), 0.0)
    got, wanted, bound = (float(t[position]) for t in (actual, expected, allowed))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are off; the first is at {position}: got "
        f"{got:.9g}, expected {wanted:.9g} within {bound:.3g}; worst ratio of error to allowed "
        f"{float(excess.nan_to_num(torch.inf).max()):.3g}"
    )


def assert_loss_close(loss: Tensor, reference: Reference, dtype: torch.dtype) -> None:
    """`loss` of logits of `dtype` equals the reference's, and has the dtype and the shape it must have."""
    assert loss.dtype == compute_dtype(dtype), f"loss has dtype {loss.dtype} for {dtype} logits"
    allowed = ROUNDINGS * unit_roundoff(compute_dtype(dtype)) * (1.0 + reference.loss_scale)
    assert_within(loss, reference.loss, allowed, "loss")


def assert_gradient_close(gradient: Tensor, reference: Reference, dtype: torch.dtype) -> None:
    """`gradient` equals the reference's after one rounding to `dtype`, the logits' dtype."""
    assert gradient.dtype == dtype, f"gradient has dtype {gradient.dtype} for {dtype} logits"
    computed = ROUNDINGS * unit_roundoff(compute_dtype(dtype)) * reference.gradient_scale
    stored = storage_error(dtype) * (reference.gradient.abs() + computed) + underflow(dtype)
    # a gradient of exactly zero (an ignored row) must be exactly zero
    of_reference = REFERENCE_ROUNDINGS * unit_roundoff(torch.float64) * reference.seed_scale
    allowed = torch.where(reference.seed_scale == 0, 0.0, computed + stored + of_reference)
    assert_within(gradient, reference.gradient, allowed, "gradient")


def assert_statistics_close(statistics: object, reference: Reference, dtype: torch.dtype) -> None:
    """The fields of `statistics` equal the reference's: target values on every row, the others where not
    ignored."""
    lse = reference.log_sum_exp
    size = 1.0 + lse.abs()
    allowed = {
        "log_sum_exp": size,
        # lse - sum(p * x): a difference of terms as large as the logits
        "entropy": size + reference.entropy.abs(),
        "target_log_prob": 1.0 + reference.target_log_prob.abs(),
    }
    for name in STATISTICS:
        value = getattr(statistics, name)
        expected = getattr(reference, name)
        assert tuple(value.shape) == tuple(expected.shape), f"{name}: shape {tuple(value.shape)}"
        assert not value.requires_grad, f"{name} requires a gradient"
        if name == "correct":
            assert value.dtype == torch.bool
            assert torch.equal(value.cpu(), expected), f"correct: {value}, expected {expected}"
            continue
        assert value.dtype == compute_dtype(dtype), f"{name} has dtype {value.dtype} for {dtype} logits"
        rows = torch.ones_like(reference.kept) if name == "target_log_prob" else reference.kept
        bound = ROUNDINGS * unit_roundoff(compute_dtype(dtype)) * allowed[name]
        assert_within(value.detach().cpu()[rows], expected[rows], bound[rows], name)
