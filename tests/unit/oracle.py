"""Dense fp64 cross entropy in plain PyTorch: what every implementation is compared with.

Written out by hand so that it shares neither code nor formulas with the package; `test_oracle.py` compares
it with `torch.nn.functional.cross_entropy` wherever PyTorch defines the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Results in fp64, shaped like the logits' leading dimensions (`gradient`: like the logits).

    `loss_scale` and `gradient_scale` hold the sum of the absolute values of the terms that make up each
    element: the amount that a relative rounding error in every step of the computation is relative to (see
    `tolerances.py`). `seed_scale` is the absolute upstream gradient of each row; the reference's own error
    is relative to it, because its `p - 1` at the target is a difference.
    """

    loss: Tensor
    gradient: Tensor
    log_sum_exp: Tensor
    entropy: Tensor
    target_log_prob: Tensor
    correct: Tensor
    kept: Tensor
    loss_scale: Tensor
    gradient_scale: Tensor
    seed_scale: Tensor


def dense_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    upstream: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_idx: int = -100,
    reduce_loss: bool = False,
    z_loss_weight: float = 0.0,
) -> Reference:
    """Cross entropy of `logits` (`[..., V]`, any dtype and strides) against `target` (as many elements as
    rows).

    `upstream` is the gradient of the (per-row or reduced) loss; ones when it is not given. A row whose
    target is `ignore_idx` has loss 0 and gradient 0 whatever its logits hold. `reduce_loss` divides the
    sum by the number of rows that are not ignored, or by 1 when there are none.
    """
    leading, vocab = logits.shape[:-1], logits.shape[-1]
    x = logits.detach().double().cpu().reshape(-1, vocab).clone().requires_grad_()
    labels = target.detach().cpu().reshape(-1).long()
    kept = labels != ignore_idx
    eps = label_smoothing / vocab

    rows = x[kept]
    column = labels[kept][:, None]
    row_max = rows.detach().amax(dim=-1, keepdim=True) if rows.shape[0] else rows.new_zeros(0, 1)
    shift = torch.where(row_max == -torch.inf, 0.0, row_max)
    log_sum = (rows - shift).exp().sum(dim=-1, keepdim=True).log()
    log_prob = rows - shift - log_sum
    row_loss = -(1.0 - label_smoothing) * log_prob.gather(1, column)[:, 0]
    if label_smoothing:
        row_loss = row_loss - eps * log_prob.sum(dim=-1)
    lse = (shift + log_sum)[:, 0]
    if z_loss_weight:
        row_loss = row_loss + z_loss_weight * lse.square()

    loss = torch.zeros(labels.shape, dtype=torch.float64).masked_scatter(kept, row_loss)
    divisor = max(1, int(kept.sum())) if reduce_loss else 1
    result = loss.sum() / divisor if reduce_loss else loss
    seed = (
        torch.ones_like(result)
        if upstream is None
        else upstream.detach().double().cpu().reshape(result.shape)
    )
    (gradient,) = torch.autograd.grad(result, x, seed)

    with torch.no_grad():
        row_seed = (seed.expand(labels.shape) if reduce_loss else seed)[kept].abs()[:, None] / divisor
        scales = _scales(rows, column, shift, log_sum, label_smoothing, z_loss_weight)
        loss_scale = torch.zeros(labels.shape, dtype=torch.float64).masked_scatter(kept, scales[0])
        gradient_scale = torch.zeros_like(x)
        gradient_scale[kept] = scales[1] * row_seed
        seed_scale = torch.zeros_like(x[:, :1])
        seed_scale[kept] = row_seed
        if reduce_loss:
            loss_scale = loss_scale.sum() / divisor
        statistics = _statistics(x.detach(), labels, kept)

    return Reference(
        loss=result.detach().reshape(() if reduce_loss else leading),
        gradient=gradient.reshape(logits.shape),
        kept=kept.reshape(leading),
        loss_scale=loss_scale.reshape(() if reduce_loss else leading),
        gradient_scale=gradient_scale.reshape(logits.shape),
        seed_scale=seed_scale.reshape(*leading, 1),
        **{name: value.reshape(leading) for name, value in statistics.items()},
    )


def _statistics(x: Tensor, labels: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Row statistics; an ignored row has target_log_prob 0 and correct False."""
    lse = x.logsumexp(dim=-1) if x.shape[0] else x.new_zeros(0)
    log_prob = x - lse[:, None]
    prob = log_prob.exp()
    entropy = -torch.where(prob > 0, prob * log_prob, torch.where(prob == 0, 0.0, prob)).sum(dim=-1)
    column = torch.where(kept, labels, 0)[:, None]
    best = x.amax(dim=-1) if x.shape[0] else x.new_zeros(0)
    return {
        "log_sum_exp": lse,
        "entropy": entropy,
        "target_log_prob": torch.where(kept, log_prob.gather(1, column)[:, 0], 0.0),
        "correct": kept & (x.gather(1, column)[:, 0] >= best),
    }


def _scales(
    rows: Tensor, column: Tensor, shift: Tensor, log_sum: Tensor, label_smoothing: float, z_loss_weight: float
) -> tuple[Tensor, Tensor]:
    vocab = rows.shape[-1]
    finite = torch.where(rows.isfinite(), rows, 0.0)
    size = shift.abs() + log_sum.abs()  # what the log-sum-exp is added up from
    target_term = (finite.gather(1, column) - shift).abs() + log_sum.abs()
    loss = (1.0 - label_smoothing) * target_term
    if label_smoothing:
        loss = loss + label_smoothing * (size + finite.abs().mean(dim=-1, keepdim=True))
    if z_loss_weight:
        loss = loss + 2.0 * z_loss_weight * size.square()

    # exp(x) turns an absolute error of its argument into a relative error of the probability
    arguments = rows - shift - log_sum
    prob = arguments.exp()
    factor = 1.0 + 2.0 * z_loss_weight * size
    gradient = torch.where(prob > 0, prob * (1.0 + arguments.abs()), 0.0) * factor + label_smoothing / vocab
    others = (prob.sum(dim=-1, keepdim=True) - prob.gather(1, column)).clamp(min=0.0)
    if vocab > 1:
        masked = arguments.scatter(1, column, -torch.inf)
        others = masked.exp().sum(dim=-1, keepdim=True)
    log_others = torch.where(others > 0, others.log().abs(), 0.0)
    z_term = 2.0 * z_loss_weight * size * prob.gather(1, column)
    at_target = (
        others * (1.0 + log_others + torch.tensor(float(vocab)).log()) + label_smoothing + z_term * 2.0
    )
    return loss[:, 0], gradient.scatter(1, column, at_target)
