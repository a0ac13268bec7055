"""Row statistics, merge and gradient in plain PyTorch: the CPU's route, and what the kernels are tested
against.

It walks the logits in blocks of rows small enough to stay in cache, so that each pass over the logits reads
memory once. It runs on any device that PyTorch knows; formulas and the exclusion of the target's column are
the kernels'.

Shapes: N rows (tokens), C columns (this shard's vocabulary), W ranks, K statistics a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_ce_adaptor.implementations.rows import matrices_of

NAME = "reference"

# Elements after the [K, N] statistics in a payload: the number of columns as (high, low) parts of 2^16.
HEADER = 4

# Bytes of scratch a block of rows may take: measured on two cores with 1 MiB of L2 each, 256 KiB to 1 MiB are
# alike.
_BLOCK_BYTES = 512 * 1024
_NEG_INF = float("-inf")


def _blocks(
    tensors: tuple[Tensor, ...], *per_row: Tensor
) -> Iterator[tuple[tuple[Tensor, ...], list[Tensor]]]:
    """Blocks of rows: the [r, C] views of tensors of the logits' shape, and the same rows of each [..., N]
    tensor.
    """
    for matrices, row_numbers in matrices_of(*tensors):
        chosen = [t[..., row_numbers] for t in per_row]
        n, columns = matrices[0].shape
        step = max(1, _BLOCK_BYTES // (max(columns, 1) * 4))
        for r in range(0, n, step):
            yield tuple(m[r : r + step] for m in matrices), [t[..., r : r + step] for t in chosen]


def _local_targets(target: Tensor, first_column: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of the target in this shard, clamped; whether this shard holds it), both [r]."""
    shifted = target.to(torch.int64) - first_column
    here = (shifted >= 0) & (shifted < columns)
    return torch.where(here, shifted, 0), here


def row_statistics(
    logits: Tensor, target: Tensor, *, first_column: int, ignore_index: int, smooth: bool, statistics: bool
) -> Tensor:
    """One pass over the logits.

    Args:
        logits: [N, C] or [A, B, C], any strides.
        target: [N] integer class ids of the whole vocabulary.

    Returns:
        [K * N + HEADER] in the accumulation dtype (fp64 for fp64 logits, else fp32). The K rows are: maximum
        and sum of exp over this shard's columns without the target's; the target's logit (-inf if another
        shard owns it); the sum of the logits if `smooth`; the sum of exp(x - max) * (x - max) if
        `statistics`. Then the shard's column number.
    """
    acc = torch.float64 if logits.dtype == torch.float64 else torch.float32
    n, columns = target.numel(), logits.shape[-1]
    k = 3 + smooth + statistics
    payload = torch.empty(k * n + HEADER, dtype=acc, device=logits.device)
    payload[k * n :] = torch.tensor([columns // 65536, columns % 65536, 0, 0], dtype=acc)
    table = payload[: k * n].view(k, n)
    if columns == 0:
        table.zero_()
        table[0].fill_(_NEG_INF)
        table[2].fill_(_NEG_INF)
        return payload
    scratch: Tensor | None = None
    for (x,), (labels, result) in _blocks((logits,), target, table):
        if scratch is None or scratch.shape[0] < x.shape[0]:
            scratch = torch.empty(x.shape, dtype=acc, device=x.device)
        values = scratch[: x.shape[0]]
        values.copy_(x)
        local, here = _local_targets(labels, first_column, columns)
        at_target = values.gather(1, local[:, None])
        x_target = torch.where(here, at_target[:, 0], _NEG_INF)
        if smooth:
            result[3] = values.sum(1)
        values.scatter_(1, local[:, None], torch.where(here[:, None], _NEG_INF, at_target))
        peak = values.amax(1)
        reference = torch.where(peak == _NEG_INF, 0.0, peak)
        values.sub_(reference[:, None])
        if statistics:
            distance = values.clone()
            values.exp_()
            result[-1] = torch.where(values == 0, 0.0, values * distance).sum(1)
        else:
            values.exp_()
        result[0] = peak
        result[1] = values.sum(1)
        result[2] = x_target
    return payload


def merge(
    gathered: Tensor,
    target: Tensor,
    *,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
    equal_shards: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Joins W shards' statistics in rank order.

    Args:
        gathered: [W, K * N + HEADER] from `row_statistics`.

    Returns:
        loss [N]; saved [3, N] for backward: maximum, log of the sum of exp about it, gradient at the target;
        and statistics [4, N] (log-sum-exp, target log-probability, entropy, 1 where the target is the argmax)
        or None.
    """
    world, n = gathered.shape[0], target.numel()
    k = 3 + (label_smoothing > 0) + statistics
    table = gathered[:, : k * n].reshape(world, k, n)
    labels = target.to(torch.int64)
    live = labels != ignore_index
    known = (labels >= 0) & (labels < total_columns)

    peak = table[:, 0].amax(0)
    reference = torch.where(peak == _NEG_INF, 0.0, peak)
    total = torch.zeros_like(peak)
    sum_x = torch.zeros_like(peak)
    weighted = torch.zeros_like(peak)
    x_target = torch.full_like(peak, _NEG_INF)
    for w in range(world):
        shift = table[w, 0] - reference
        scale = shift.exp()
        total += table[w, 1] * scale
        x_target = torch.where(table[w, 2] == _NEG_INF, x_target, table[w, 2])
        if label_smoothing > 0:
            sum_x += table[w, 3]
        if statistics:
            weighted += torch.where(table[w, 1] == 0, 0.0, (table[w, -1] + table[w, 1] * shift) * scale)

    log_total = total.log()
    d = (peak - x_target) + log_total
    nll = d.clamp(min=0) + torch.log1p(torch.exp(-d.abs()))
    nll = torch.where(x_target == float("inf"), float("nan"), nll)  # as dense softmax: inf - inf
    # A label that is no class counts as the row's maximum, as on Megatron's native path: loss = lse - max.
    nll = torch.where(known, nll, log_total + (peak - peak))

    joint_peak = torch.where(known, torch.maximum(peak, x_target), peak)
    e_target = torch.where(known, torch.exp(x_target - joint_peak), 0.0)
    rescale = torch.exp(peak - joint_peak)
    joint_total = torch.where(known, total * rescale + e_target, total)
    log_joint = joint_total.log()
    lse = joint_peak + log_joint
    loss = nll
    if label_smoothing > 0:
        loss = (1 - label_smoothing) * nll + label_smoothing * (lse - sum_x / total_columns)
    if z_loss_weight:
        loss = loss + z_loss_weight * lse * lse
    if equal_shards and world > 1:
        # The host check raises where it can look; where it cannot, the numbers must at least be unusable
        # everywhere.
        agree = (gathered[:, k * n :] == gathered[0, k * n :]).all()
        loss = torch.where(agree, loss, float("nan"))
        joint_peak = torch.where(agree, joint_peak, float("nan"))
    zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
    loss = torch.where(live, loss, zero)
    saved = torch.where(live, torch.stack([joint_peak, log_joint, torch.expm1(-nll)]), zero)
    stats = None
    if statistics:
        d_target = torch.where(e_target == 0, zero, e_target * (x_target - joint_peak))
        others = torch.where(total == 0, zero, (weighted + total * (peak - joint_peak)) * rescale)
        entropy = log_joint - (others + d_target) / joint_total
        shown = known & live
        correct = (shown & (x_target >= peak)).to(loss.dtype)
        stats = torch.stack([lse, torch.where(shown, -nll, zero), entropy, correct])
    return loss, saved, stats


def forward(
    logits: Tensor,
    target: Tensor,
    *,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`row_statistics` and `merge` for an unsplit vocabulary; returns what `merge` returns."""
    payload = row_statistics(
        logits,
        target,
        first_column=0,
        ignore_index=ignore_index,
        smooth=label_smoothing > 0,
        statistics=statistics,
    )
    return merge(
        payload[None],
        target,
        total_columns=total_columns,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
        statistics=statistics,
        equal_shards=False,
    )


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
) -> None:
    """Writes d loss / d logits into `out`, of the logits' shape and dtype; `out` may be the logits
    themselves.

    grad = grad_loss * (p * a - eps), at the target grad_loss * (expm1(-nll) + p * (a - 1) + smoothing - eps),
    with a = 1 + 2 * z_loss_weight * lse and eps = label_smoothing / total_columns; computed in the
    accumulation dtype and rounded once. Rows with an ignored label get exact zeros whatever their logits
    hold.
    """
    acc = saved.dtype
    columns = logits.shape[-1]
    if columns == 0:
        return
    eps = label_smoothing / total_columns
    scratch: Tensor | None = None
    for (x, grad), (labels, kept, upstream) in _blocks((logits, out), target, saved, grad_loss):
        live = labels.to(torch.int64) != ignore_index
        scale = torch.where(live, upstream.to(acc), 0.0)
        peak, log_total, grad_target = kept[0], kept[1], kept[2]
        lse2z = 2 * z_loss_weight * (peak + log_total)
        local, here = _local_targets(labels, first_column, columns)
        if logits.dtype == acc:
            values = torch.sub(x, peak[:, None], out=grad)
        else:
            if scratch is None or scratch.shape[0] < x.shape[0]:
                scratch = torch.empty(x.shape, dtype=acc, device=x.device)
            values = scratch[: x.shape[0]]
            torch.sub(x, peak[:, None], out=values)
        values.exp_()
        values.mul_((scale * (1 + lse2z) * torch.exp(-log_total))[:, None])
        if label_smoothing > 0:
            values.sub_((scale * eps)[:, None])
        exact = scale * (grad_target + (1 + grad_target) * lse2z + (label_smoothing - eps))
        fallback = values.gather(1, local[:, None])
        values.scatter_(1, local[:, None], torch.where(here[:, None], exact[:, None], fallback))
        if logits.device.type != "cpu" or not bool(live.all()):
            values.masked_fill_(~live[:, None], 0.0)
        if values is not grad:
            grad.copy_(values)
