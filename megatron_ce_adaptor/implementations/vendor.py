"""Cross entropy by PyTorch's own operators (log_softmax, nll_loss, softmax), which torch_npu maps to the
vendor's kernels: the NPU's route for small unsplit vocabularies, where the launch of a Triton kernel costs
more than it saves.

It holds fp32 logits of the call while it runs, as PyTorch's cross entropy does. The loss of a token is
log_softmax at its label, in fp32: for a confident token it loses the digits that the kernels keep. Everything
else is as `reference` states it.

Shapes: N rows (tokens), C columns.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from megatron_ce_adaptor.implementations.class_weights import ClassWeights
from megatron_ce_adaptor.implementations.dtypes import accumulation_dtype
from megatron_ce_adaptor.implementations.memo import Memo

NAME = "vendor"
READS_ADDRESSES = False
HEADER = 4


def row_statistics(*_: object, **__: object) -> NoReturn:
    """A split vocabulary is none of this implementation's: `choose` gives it to the kernels."""
    raise RuntimeError(
        "the vendor's operators cannot compute a vocabulary split over ranks; set MCE_IMPLEMENTATION=triton."
    )


merge = row_statistics


def forward(
    logits: Tensor,
    target: Tensor,
    *,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
    weights: ClassWeights | None,
    memo: Memo | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.forward`. Saved is [3, N] too, of which only the second row, log-sum-exp, is used."""
    n, columns = target.numel(), logits.shape[-1]
    acc = accumulation_dtype(logits)
    log_p = torch.log_softmax(logits, -1, dtype=acc).reshape(n, columns)
    live = target != ignore_index
    known = (target >= 0) & (target < total_columns)
    # nll_loss reads wherever a label points: what is no class is looked up as 0 and replaced.
    labels = torch.where(known, target, 0).to(torch.int64)
    nll = nll_loss(log_p, labels, reduction="none")
    # as on Megatron's native path: loss = lse - max
    nll = torch.where(known, nll, -log_p.amax(-1))
    loss = nll if weights is None else nll * weights.rows[:-1]
    if label_smoothing > 0:
        of_classes = log_p if weights is None else log_p * weights.columns
        loss = (1 - label_smoothing) * loss - label_smoothing / total_columns * of_classes.sum(-1)
    saved = torch.zeros(3, n, dtype=acc, device=logits.device)
    if z_loss_weight or statistics:
        saved[1] = torch.logsumexp(logits.to(acc), -1).reshape(n)
        loss = loss + z_loss_weight * saved[1] * saved[1]
    loss = torch.where(live, loss, 0.0)
    if not statistics:
        return loss, saved, None
    shown = known & live
    p = log_p.exp()
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
    correct = shown & (nll <= -log_p.amax(-1))
    return loss, saved, torch.stack([saved[1], torch.where(shown, -nll, 0.0), entropy, correct.to(acc)])


def gradient(
    logits: Tensor,
    target: Tensor,
    saved: Tensor,
    grad_loss: Tensor,
    out: Tensor,
    *,
    first_column: int,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    weights: ClassWeights | None,
    memo: Memo | None = None,
) -> None:
    """See `reference.gradient`."""
    n, columns = target.numel(), logits.shape[-1]
    if n == 0 or columns == 0:
        return
    acc = saved.dtype
    live = target != ignore_index
    scale = torch.where(live, grad_loss.to(acc), 0.0)[:, None]
    known = (target >= 0) & (target < total_columns)
    labels = torch.where(known, target, 0).to(torch.int64)[:, None]
    own: float | Tensor = 1.0 - label_smoothing
    mean: float | Tensor = 1.0
    if weights is not None:
        own = own * weights.rows[:-1, None]
        mean = weights.rows[-1] / total_columns
    shared = label_smoothing * mean + 2 * z_loss_weight * saved[1][:, None]
    grad = torch.softmax(logits, -1, dtype=acc).reshape(n, columns)
    grad.mul_(scale * (own + shared))
    if label_smoothing > 0:
        per_class = scale * (label_smoothing / total_columns)
        grad.sub_(per_class if weights is None else per_class * weights.columns)
    grad.scatter_add_(1, labels, torch.where(known[:, None], -scale * own, 0.0))
    grad.masked_fill_(~live[:, None], 0.0)  # the row may hold NaN
    out.copy_(grad.view(out.shape))
