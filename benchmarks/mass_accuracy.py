"""Runs accuracy cases against dense fp64 on the same device."""

from __future__ import annotations

import math
from typing import Any

import torch
from mass_cases import AccuracyCase
from torch import Tensor

IGNORE = -100
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def make_logits(case: AccuracyCase, device: torch.device, generator: torch.Generator) -> Tensor:
    """[N, V] or three-dimensional, with the case's strides; elements around it are NaN."""
    shape: tuple[int, ...] = (case.rows, case.columns)
    if case.layout != "nv":
        middle = 3 if case.rows % 3 == 0 else 1
        shape = (case.rows // middle, middle, case.columns)
        if case.layout == "bsv":
            shape = (middle, case.rows // middle, case.columns)
    dtype = _DTYPES[case.dtype]
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * case.scale
    if case.strides == "contiguous":
        memory = torch.empty(shape, dtype=dtype, device=device)
    elif case.strides == "transposed":
        memory = torch.empty(shape[1], shape[0], shape[2], dtype=dtype, device=device).transpose(0, 1)
    elif case.strides == "shifted":
        flat = torch.full((math.prod(shape) + 3,), math.nan, dtype=dtype, device=device)
        memory = flat[3:].view(shape)
    else:
        more = 64 if case.strides == "padded" else 3
        wide = torch.full((*shape[:-1], case.columns + more), math.nan, dtype=dtype, device=device)
        memory = wide[..., : case.columns]
    memory.copy_(values)
    return memory


def run_case(case: AccuracyCase, device: torch.device) -> dict[str, Any] | None:
    """None if the results are right, else what is wrong."""
    from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy

    generator = torch.Generator().manual_seed(case.number)
    memory = make_logits(case, device, generator)
    n = case.rows
    labels = torch.randint(0, case.columns, (n,), generator=generator)
    if case.ignored == "some":
        labels[torch.rand(n, generator=generator) < 0.3] = IGNORE
    elif case.ignored == "all":
        labels[:] = IGNORE
    labels = labels.to(device, getattr(torch, case.target_dtype)).view(memory.shape[:-1])
    before = memory.clone()
    leaf = memory.requires_grad_()
    logits = _Same.apply(leaf)
    loss = parallel_cross_entropy(
        logits, labels, case.label_smoothing, case.reduce_loss, overwrite_input=case.overwrite_input
    )
    assert isinstance(loss, Tensor)  # no statistics were asked for
    if not torch.equal(memory.detach(), before):
        return _failure(case, "forward changed the logits")
    upstream = torch.randn(loss.shape, generator=generator, dtype=torch.float64).to(device, loss.dtype)
    if case.reduce_loss:
        upstream = upstream.abs() + 0.5
    (gradient,) = torch.autograd.grad(loss, logits, upstream)
    return _compare(case, before, labels, loss.detach(), gradient, upstream)


class _Same(torch.autograd.Function):
    """The same tensor as the result of an operation, which overwrite_input asks for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _failure(case: AccuracyCase, what: str) -> dict[str, Any]:
    return {"case": case.number, "what": what, "options": case.text}


def _compare(
    case: AccuracyCase, logits: Tensor, labels: Tensor, loss: Tensor, gradient: Tensor, upstream: Tensor
) -> dict[str, Any] | None:
    if loss.shape != (torch.Size() if case.reduce_loss else logits.shape[:-1]):
        return _failure(case, f"loss has shape {tuple(loss.shape)}")
    if gradient.shape != logits.shape or gradient.dtype != logits.dtype:
        return _failure(case, f"gradient is {tuple(gradient.shape)} {gradient.dtype}")
    x = logits.double().reshape(case.rows, case.columns)
    y = labels.reshape(-1).long()
    kept = y != IGNORE
    column = torch.where(kept, y, 0)[:, None]
    eps = case.label_smoothing / case.columns
    log_p = x.log_softmax(1)
    row_loss = -(1 - case.label_smoothing) * log_p.gather(1, column)[:, 0] - eps * log_p.sum(1)
    row_loss = torch.where(kept, row_loss, 0.0)
    divisor = max(1, int(kept.sum())) if case.reduce_loss else 1
    weight = torch.where(kept, upstream.double().expand_as(labels).reshape(-1) / divisor, 0.0)[:, None]
    p = log_p.exp()
    one_hot = torch.zeros_like(p).scatter(1, column, 1 - case.label_smoothing)
    exact = weight * (p - eps - one_hot)

    # Rounding: of the accumulation, relative to the numbers that go in; of the result, half a unit of its
    # dtype.
    unit = torch.finfo(torch.float64 if case.dtype == "fp64" else torch.float32).eps
    size = x.abs().amax(1)
    loss_limit = unit * (8 + 4 * size + row_loss.abs() + math.log(case.columns + 1))
    exact_loss: Tensor = row_loss
    if case.reduce_loss:
        exact_loss = row_loss.sum() / divisor
        loss_limit = (loss_limit * kept).sum() / divisor + unit * 4 * exact_loss.abs()
    loss_error = (loss.double().reshape(exact_loss.shape) - exact_loss).abs()
    if not bool((loss_error <= loss_limit).all()):  # NaN fails, too
        return _failure(case, f"loss off by {float(loss_error.max()):.3g}")
    info = torch.finfo(logits.dtype)
    target_part = one_hot * p.gather(1, column).clamp(max=1)
    accumulated = unit * (8 + 4 * size)[:, None] * weight.abs() * (p + eps + target_part)
    # the target's gradient, analytic, is relative to itself; beside fp64 the reference errs, too
    accumulated = accumulated + unit * 8 * exact.abs() + weight.abs() * torch.finfo(torch.float64).eps * 16
    limit = accumulated + 0.5 * info.eps * exact.abs() * 1.01 + info.smallest_normal * info.eps
    error = (gradient.double().reshape(exact.shape) - exact).abs()
    if not bool((error <= limit).all()):
        worst = float((error / limit).nan_to_num(math.inf).max())
        return _failure(case, f"gradient off by {float(error.max()):.3g}, {worst:.3g} times the limit")
    ignored = gradient.reshape(case.rows, -1)[~kept]
    if bool((ignored != 0).any()):
        return _failure(case, "an ignored row has a gradient")
    return None
