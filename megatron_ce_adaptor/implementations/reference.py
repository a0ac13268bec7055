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

from megatron_ce_adaptor.implementations.class_weights import ClassWeights
from megatron_ce_adaptor.implementations.dtypes import accumulation_dtype
from megatron_ce_adaptor.implementations.memo import Memo
from megatron_ce_adaptor.implementations.rows import matrices_of

NAME = "reference"
READS_ADDRESSES = False

# Elements after the [K, N] statistics in a payload: the number of columns as (high, low) parts of 2^16.
HEADER = 4

# Bytes of fp32 scratch for a block of rows: small enough for the cache, large enough that the operations' own
# cost does not count.
_BLOCK_BYTES = 1024 * 1024
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


class _Scratch:
    """Memory for the largest block of rows so far, in the accumulation dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rows: Tensor | None = None

    def rows_like(self, x: Tensor) -> Tensor:
        """[r, C], uninitialised, for a block x [r, C]."""
        if self._rows is None or self._rows.shape[0] < x.shape[0]:
            self._rows = torch.empty(x.shape, dtype=self._dtype, device=x.device)
        return self._rows[: x.shape[0]]


def _local_targets(target: Tensor, first_column: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of the target in this shard, clamped; whether this shard holds it), both [N]."""
    shifted = target.to(torch.int64) - first_column
    here = (shifted >= 0) & (shifted < columns)
    return torch.where(here, shifted, 0), here


def row_statistics(
    logits: Tensor,
    target: Tensor,
    *,
    first_column: int,
    ignore_index: int,
    smooth: bool,
    statistics: bool,
    weights: ClassWeights | None,
    memo: Memo | None = None,
) -> Tensor:
    """One pass over the logits.

    Args:
        logits: [N, C] or [A, B, C], any strides.
        target: [N] integer class ids of the whole vocabulary.

    Returns:
        [K * N + HEADER] in the accumulation dtype (fp64 for fp64 logits, else fp32). The K rows are: a
        maximum of this shard's columns, and the sum of exp(x - maximum) over all of them but the target's;
        the target's logit (-inf if another shard owns it); the sum of the (weighted) logits if `smooth`;
        the sum of exp(x - maximum) * (x - maximum) without the target's if `statistics`. Then the shard's
        number of columns. (Here the maximum is over the target's column too, in the kernels it is not:
        `merge` serves both.)
    """
    acc = accumulation_dtype(logits)
    n, columns = target.numel(), logits.shape[-1]
    k = 3 + smooth + statistics
    payload = torch.empty(k * n + HEADER, dtype=acc, device=logits.device)
    for place, value in enumerate((columns // 65536, columns % 65536, 0, 0)):
        payload[k * n + place].fill_(value)  # no copy from the host
    table = payload[: k * n].view(k, n)
    if columns == 0:
        table.zero_()
        table[0].fill_(_NEG_INF)
        table[2].fill_(_NEG_INF)
        return payload
    # What is done once a row is done for all rows at once; the loop holds what is done for every logit.
    local, here = _local_targets(target, first_column, columns)
    at_target = logits.gather(-1, local.view(*logits.shape[:-1], 1)).flatten().to(acc)
    table[2] = torch.where(here, at_target, _NEG_INF)
    lowest = torch.finfo(acc).min
    scratch = _Scratch(acc)
    for (x,), (column, holds, result) in _blocks((logits,), local, here, table):
        values = scratch.rows_like(x)
        if x.dtype != acc:
            x = values.copy_(x)
        peak = x.amax(1)
        result[0] = peak
        if smooth:
            result[3] = x.sum(1) if weights is None else x @ weights.columns
        # an all -inf row: any finite reference gives the right exp, 0
        torch.sub(x, peak.clamp(min=lowest)[:, None], out=values)
        index = column[:, None]
        values.scatter_(1, index, torch.where(holds[:, None], _NEG_INF, values.gather(1, index)))
        if statistics:
            distance = values.clone()
            values.exp_()
            result[-1] = torch.where(values == 0, 0.0, values * distance).sum(1)
        else:
            values.exp_()
        result[1] = values.sum(1)
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
    weights: ClassWeights | None,
    memo: Memo | None = None,
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
    loss = nll if weights is None else weights.rows[:-1] * nll
    if label_smoothing > 0:
        all_classes = total_columns if weights is None else weights.rows[-1]
        others = (all_classes * lse - sum_x) / total_columns
        loss = (1 - label_smoothing) * loss + label_smoothing * others
    if z_loss_weight:
        loss = loss + z_loss_weight * lse * lse
    zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
    loss = torch.where(live, loss, zero)
    saved = torch.where(live, torch.stack([joint_peak, log_joint, torch.expm1(-nll)]), zero)
    if equal_shards and world > 1:
        # The host check raises where it can look; where it cannot, the numbers must at least be unusable
        # everywhere.
        agree = (gathered[:, k * n :] == gathered[0, k * n :]).all()
        loss = torch.where(agree, loss, float("nan"))
        saved = torch.where(agree, saved, float("nan"))
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
    weights: ClassWeights | None,
    memo: Memo | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`row_statistics` and `merge` for an unsplit vocabulary; returns what `merge` returns."""
    plain = not (label_smoothing or z_loss_weight or statistics or weights is not None)
    if plain and logits.shape[-1] == total_columns and _are_all_classes(target, total_columns, ignore_index):
        return *_plain_forward(logits, target), None
    payload = row_statistics(
        logits,
        target,
        first_column=0,
        ignore_index=ignore_index,
        smooth=label_smoothing > 0,
        statistics=statistics,
        weights=weights,
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
        weights=weights,
    )


def _are_all_classes(target: Tensor, total_columns: int, ignore_index: int) -> bool:
    """Whether every label is a class and none is ignored. False where looking would wait for a device."""
    if type(target) is not Tensor or not target.is_cpu:
        return False
    low, high = map(int, target.aminmax())
    return low >= 0 and high < total_columns and not low <= ignore_index <= high


def _plain_forward(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and saved of `merge` where every label is a class and nothing is added to the loss: a third of the
    operations, which are what small logits' time goes into.
    """
    acc = accumulation_dtype(logits)
    labels = target.to(torch.int64)
    x_target = logits.gather(-1, labels.view(*logits.shape[:-1], 1)).flatten().to(acc)
    saved = torch.empty(3, target.numel(), dtype=acc, device=logits.device)
    peak, log_total, grad_target = saved
    others = torch.empty_like(x_target)  # sum of exp(x - peak) without the target's
    scratch = _Scratch(acc)
    for (x,), (column, top, total) in _blocks((logits,), labels, peak, others):
        values = scratch.rows_like(x)
        if x.dtype != acc:
            x = values.copy_(x)
        torch.amax(x, 1, out=top)
        torch.sub(x, _finite(top)[:, None], out=values)
        values.scatter_(1, column[:, None], _NEG_INF).exp_()
        torch.sum(values, 1, out=total)
    below = _finite(peak) - x_target
    loss = torch.logaddexp(below + others.log(), torch.zeros((), dtype=acc))
    torch.log(others.add_(below.neg_().exp_()), out=log_total)
    torch.expm1(loss.neg(), out=grad_target)
    return loss, saved


def _finite(peak: Tensor) -> Tensor:
    """A reference for exp(x - peak) that gives 0 for a row of -inf only."""
    return peak.clamp(min=torch.finfo(peak.dtype).min)


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
    """Writes d loss / d logits into `out`, of the logits' shape and dtype; `out` may be the logits
    themselves.

    grad = grad_loss * (p * (b + a) - eps), at the target grad_loss * (expm1(-nll) * b + p * a - eps), where
    b = 1 - label_smoothing is the target's own share, eps = label_smoothing / total_columns that of a class,
    and a = label_smoothing + 2 * z_loss_weight * lse; class weights multiply b (the label's), eps (the
    column's) and the first term of a (their mean). Computed in the accumulation dtype and rounded once. Rows
    with an ignored label get exact zeros whatever their logits hold.
    """
    acc = saved.dtype
    columns = logits.shape[-1]
    if columns == 0:
        return
    plain = not (label_smoothing or z_loss_weight or weights is not None)
    if plain and columns == total_columns and _are_all_classes(target, total_columns, ignore_index):
        _plain_gradient(logits, target, saved, grad_loss.to(acc), out)
        return
    # As in `row_statistics`: what is done once a row is done for all rows at once.
    live = target != ignore_index
    scale = torch.where(live, grad_loss.to(acc), 0.0)
    peak, log_total, grad_target = saved[0], saved[1], saved[2]
    own: float | Tensor = 1.0 - label_smoothing
    shared: float | Tensor = label_smoothing + 2 * z_loss_weight * (peak + log_total)
    per_class = scale * (label_smoothing / total_columns)
    at_label = per_class
    if weights is not None:
        mean = weights.rows[-1] / total_columns
        own = own * weights.rows[:-1]
        shared = shared + label_smoothing * (mean - 1.0)
        at_label = per_class * weights.rows[:-1]
    factor = scale * (own + shared) * torch.exp(-log_total)
    must_clear = logits.device.type != "cpu" or not bool(live.all())
    scratch = _Scratch(acc)
    for (x, grad), (alive, top, times, less) in _blocks((logits, out), live, peak, factor, per_class):
        if grad.dtype == acc:
            values = grad
        else:
            values = scratch.rows_like(x)
        # a mixed-dtype sub would convert element by element, several times slower than a copy
        torch.sub(x if x.dtype == acc else values.copy_(x), top[:, None], out=values)
        values.exp_()
        values.mul_(times[:, None])
        if label_smoothing > 0:
            less = less[:, None]
            values.sub_(less if weights is None else less * weights.columns)
        if must_clear:
            values.masked_fill_(~alive[:, None], 0.0)
        if values is not grad:
            grad.copy_(values)
    local, here = _local_targets(target, first_column, columns)
    exact = scale * (grad_target * own + (1 + grad_target) * shared) - at_label
    leading = logits.shape[:-1]
    exact = torch.where(live, exact, 0.0).to(out.dtype).view(leading)
    places = (*_row_indices(out), local.view(leading))
    out.index_put_(places, torch.where(here.view(leading), exact, out[places]))


def _plain_gradient(logits: Tensor, target: Tensor, saved: Tensor, scale: Tensor, out: Tensor) -> None:
    """`gradient` after `_plain_forward`."""
    peak, log_total, grad_target = saved
    factor = scale * torch.exp(-log_total)
    scratch = _Scratch(scale.dtype)
    for (x, grad), (top, times) in _blocks((logits, out), peak, factor):
        if grad.dtype == scale.dtype:
            values = grad
        else:
            values = scratch.rows_like(x)
            x = values.copy_(x)
        torch.sub(x, top[:, None], out=values)
        values.exp_().mul_(times[:, None])
        if values is not grad:
            grad.copy_(values)
    leading = out.shape[:-1]
    places = (*_row_indices(out), target.to(torch.int64).view(leading))
    out.index_put_(places, (scale * grad_target).to(out.dtype).view(leading))


def _row_indices(logits: Tensor) -> tuple[Tensor, ...]:
    """Indices of every row of [N, C] or [A, B, C], shaped to broadcast to the leading dimensions: for
    index_put_, as scatter_ converts a whole bf16 tensor to fp32 and back on the CPU.
    """
    sizes = logits.shape[:-1]
    return tuple(
        torch.arange(size, device=logits.device).view([-1 if d == k else 1 for k in range(len(sizes))])
        for d, size in enumerate(sizes)
    )
