"""Row statistics, their merge and the gradient, in MindSpore operators.

The formulas are those of the PyTorch reference (`megatron_ce_adaptor.implementations.reference`), written for
this backend: blocks of rows, everything in the accumulation dtype (fp64 for fp64 logits, else fp32), the
target's column left out of the sum of exponentials and joined in closed form.

Shapes: N rows (tokens), C columns (this shard's vocabulary), W ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Tensor, mint, ops

from megatron_ce_adaptor.mindspore import runtime
from megatron_ce_adaptor.mindspore.runtime import NEG_INF, concatenated


class ClassWeights(NamedTuple):
    """Class weights of one call, in the accumulation dtype.

    Attributes:
        columns: [C], of this shard's classes.
        rows: [N], of each row's label, 1 where it is no class.
        total: 0-d, the sum over all classes.
    """

    columns: Tensor
    rows: Tensor
    total: Tensor


class Terms(NamedTuple):
    """What a loss is made of besides logits and labels.

    Attributes:
        first_column: the vocabulary's column that the shard begins with.
        total_columns: V.
        ignore_index, label_smoothing, z_loss_weight: as for `parallel_cross_entropy`.
        weights: class weights or None.
        statistics: whether they are asked for.
    """

    first_column: int
    total_columns: int
    ignore_index: int
    label_smoothing: float
    z_loss_weight: float
    weights: ClassWeights | None
    statistics: bool

    @property
    def kinds(self) -> int:
        """Numbers a row that travel between the ranks."""
        return 3 + (self.label_smoothing > 0) + self.statistics


class Merged(NamedTuple):
    """loss [N]; saved: maximum, log of the sum of exp about it, gradient at the target, each [N]; statistics:
    log-sum-exp, target log-probability, entropy, correct, each [N], or None."""

    loss: Tensor
    saved: tuple[Tensor, Tensor, Tensor]
    statistics: tuple[Tensor, Tensor, Tensor, Tensor] | None


def local_targets(labels: Tensor, first_column: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of the target in this shard, 0 if it is elsewhere; whether this shard holds it), both [N]."""
    shifted = labels.astype(ms.int64) - first_column
    here = ops.logical_and(shifted >= 0, shifted < columns)
    return ops.where(here, shifted, ops.zeros_like(shifted)), here


def row_statistics(logits: Tensor, labels: Tensor, terms: Terms) -> Tensor:
    """One pass over the logits [N, C].

    Returns:
        [kinds * N]: a maximum of the shard's columns; the sum of exp(x - maximum) over all of them but the
        target's; the target's logit (-inf if another shard owns it); with smoothing the sum of the (weighted)
        logits; with statistics the sum of exp(x - maximum) * (x - maximum) without the target's.
    """
    n, columns = logits.shape
    acc = runtime.accumulation_dtype(logits)
    zeros = mint.zeros((n,), dtype=acc)
    if columns == 0:
        nothing = zeros + NEG_INF
        return mint.cat([nothing, zeros, nothing, *([zeros] * (terms.kinds - 3))])
    local, here = local_targets(labels, terms.first_column, columns)
    found: list[list[Tensor]] = [[] for _ in range(terms.kinds)]
    step = runtime.rows_of_a_block(columns, runtime.is_on_cpu(logits))
    for x, column, holds in runtime.blocks(step, logits, local, here):
        of_block = _block_statistics(x.astype(acc), column, holds, terms)
        for collected, kind in zip(found, of_block, strict=True):
            collected.append(kind)
    return concatenated([piece for kind in found for piece in kind])


def _block_statistics(x: Tensor, local: Tensor, here: Tensor, terms: Terms) -> list[Tensor]:
    peak = ops.amax(x, -1)
    # an all -inf row: any finite reference gives the right exp, 0
    values = x - ops.where(peak == NEG_INF, ops.zeros_like(peak), peak).unsqueeze(1)
    index, holds = local.unsqueeze(1), here.unsqueeze(1)
    left_out = ops.where(holds, NEG_INF, mint.gather(values, 1, index))
    values = mint.scatter(values, 1, index, left_out)
    exponentials = mint.exp(values)
    result = [
        peak,
        mint.sum(exponentials, -1),
        ops.where(here, mint.gather(x, 1, index).reshape(-1), NEG_INF),
    ]
    if terms.label_smoothing > 0:
        weighted = x if terms.weights is None else x * terms.weights.columns
        result.append(mint.sum(weighted, -1))
    if terms.statistics:
        terms_of_entropy = ops.where(exponentials == 0, 0.0, exponentials * values)
        result.append(mint.sum(terms_of_entropy, -1))
    return result


# On the CPU MindSpore's log1p, expm1 and fp32 log lose all digits where the result is small. W. Kahan's forms
# in fp64 keep them, of numbers of which there are few, one a row. On devices: their own operators.


def _log(x: Tensor) -> Tensor:
    """log x."""
    return mint.log(x.astype(ms.float64)).astype(x.dtype) if runtime.is_on_cpu(x) else mint.log(x)


def _log1p(x: Tensor) -> Tensor:
    """log(1 + x) of x >= 0."""
    if not runtime.is_on_cpu(x):
        return mint.log1p(x)
    wide = x.astype(ms.float64)
    u = wide + 1
    return ops.where(u == 1, wide, mint.log(u) * (wide / (u - 1))).astype(x.dtype)


def _expm1(x: Tensor) -> Tensor:
    """exp(x) - 1."""
    if not runtime.is_on_cpu(x):
        return mint.expm1(x)
    wide = x.astype(ms.float64)
    u = mint.exp(wide)
    exact = (u - 1) * (wide / mint.log(u))
    return ops.where(u == 1, wide, ops.where(u == 0, -1.0, exact)).astype(x.dtype)


def merge(gathered: list[Tensor], labels: Tensor, terms: Terms, agree: Tensor | None = None) -> Merged:
    """Joins the shards' statistics in rank order, so that all ranks get the same bits.

    Args:
        gathered: [kinds * N] of each rank.
        labels: [N].
        agree: 0-d bool; where false, all results become NaN.
    """
    n, acc = labels.shape[0], gathered[0].dtype
    smoothing, z = terms.label_smoothing, terms.z_loss_weight
    tables = [mint.split(piece, n) for piece in gathered]
    labels = labels.astype(ms.int64)
    live = labels != terms.ignore_index
    known = ops.logical_and(labels >= 0, labels < terms.total_columns)

    peak = tables[0][0]
    for table in tables[1:]:
        peak = ops.maximum(peak, table[0])
    reference = ops.where(peak == NEG_INF, 0.0, peak)
    total, sum_x, weighted = ops.zeros_like(peak), ops.zeros_like(peak), ops.zeros_like(peak)
    x_target = total + NEG_INF
    for table in tables:
        shift = table[0] - reference
        scale = mint.exp(shift)
        total = total + table[1] * scale
        x_target = ops.where(table[2] == NEG_INF, x_target, table[2])
        if smoothing > 0:
            sum_x = sum_x + table[3]
        if terms.statistics:
            part = (table[-1] + table[1] * shift) * scale
            weighted = weighted + ops.where(table[1] == 0, 0.0, part)
    peak = ops.where(mint.isnan(total), total, peak)  # the CPU's maxima overlook NaN

    log_total = _log(total)
    d = (peak - x_target) + log_total
    nll = mint.clamp(d, min=0) + _log1p(mint.exp(-mint.abs(d)))
    nll = ops.where(mint.isnan(d), d, nll)
    nll = ops.where(x_target == float("inf"), float("nan"), nll)  # as dense softmax: inf - inf
    # A label that is no class counts as the row's maximum, as on Megatron's native path: loss = lse - max.
    nll = ops.where(known, nll, log_total + (peak - peak))

    joint_peak = ops.where(known, ops.where(mint.isnan(peak), peak, ops.maximum(peak, x_target)), peak)
    e_target = ops.where(known, mint.exp(x_target - joint_peak), 0.0)
    rescale = mint.exp(peak - joint_peak)
    joint_total = ops.where(known, total * rescale + e_target, total)
    log_joint = _log(joint_total)
    lse = joint_peak + log_joint
    loss = nll if terms.weights is None else terms.weights.rows * nll
    if smoothing > 0:
        classes: Any = terms.total_columns if terms.weights is None else terms.weights.total
        others = (classes * lse - sum_x) / terms.total_columns
        loss = loss * runtime.number(1 - smoothing, acc) + others * runtime.number(smoothing, acc)
    if z:
        loss = loss + lse * lse * runtime.number(z, acc)
    loss = _where_live(live, agree, loss)
    saved = [_where_live(live, agree, value) for value in (joint_peak, log_joint, _expm1(-nll))]
    stats = None
    if terms.statistics:
        of_target = ops.where(e_target == 0, 0.0, e_target * (x_target - joint_peak))
        of_others = ops.where(total == 0, 0.0, (weighted + total * (peak - joint_peak)) * rescale)
        entropy = log_joint - (of_others + of_target) / joint_total
        shown = ops.logical_and(known, live)
        correct = ops.logical_and(shown, x_target >= peak)
        stats = lse, ops.where(shown, -nll, 0.0), entropy, correct
    return Merged(loss, (saved[0], saved[1], saved[2]), stats)


def _where_live(live: Tensor, agree: Tensor | None, value: Tensor) -> Tensor:
    value = ops.where(live, value, 0.0)
    return value if agree is None else ops.where(agree, value, float("nan"))


def gradient(
    logits: Tensor, labels: Tensor, saved: tuple[Tensor, Tensor, Tensor], grad_loss: Tensor, terms: Terms
) -> Tensor:
    """d sum(grad_loss * loss) / d logits [N, C], in the logits' dtype; no collective.

    grad_loss * (p * (b + a) - eps), at the target grad_loss * (expm1(-nll) * b + p * a - eps), where
    b = 1 - label_smoothing, eps = label_smoothing / V and a = label_smoothing + 2 * z_loss_weight * lse;
    class weights multiply b (the label's), eps (the column's) and the first term of a (their mean). Rounded
    once. Rows with an ignored label get exact zeros whatever their logits hold.
    """
    n, columns = logits.shape
    peak, log_total, grad_target = saved
    acc = peak.dtype
    if columns == 0:
        return mint.zeros((n, 0), dtype=logits.dtype)
    live = labels != terms.ignore_index
    scale = ops.where(live, grad_loss.astype(acc), 0.0)
    smoothing = runtime.number(terms.label_smoothing, acc)
    own: Any = runtime.number(1.0 - terms.label_smoothing, acc)
    shared: Any = (peak + log_total) * runtime.number(2 * terms.z_loss_weight, acc) + smoothing
    per_class = scale * runtime.number(terms.label_smoothing / terms.total_columns, acc)
    at_label = per_class
    if terms.weights is not None:
        own = terms.weights.rows * own
        shared = shared + (terms.weights.total / terms.total_columns - 1.0) * smoothing
        at_label = per_class * terms.weights.rows
    factor = scale * (own + shared) * mint.exp(-log_total)
    exact = scale * (grad_target * own + (1 + grad_target) * shared) - at_label
    exact = ops.where(live, exact, 0.0)
    local, here = local_targets(labels, terms.first_column, columns)

    def block(x: Tensor, *of_rows: Tensor) -> Tensor:
        alive, top, times, less, at_row, column, holds = (kind.unsqueeze(1) for kind in of_rows)
        values = mint.exp(x.astype(acc) - top) * times
        if terms.label_smoothing > 0:
            values = values - (less if terms.weights is None else less * terms.weights.columns)
        values = ops.where(alive, values, 0.0)
        at_target = ops.where(holds, at_row, mint.gather(values, 1, column))
        return mint.scatter(values, 1, column, at_target).astype(logits.dtype)

    step = runtime.rows_of_a_block(columns, runtime.is_on_cpu(logits))
    blocks = runtime.blocks(step, logits, live, peak, factor, per_class, exact, local, here)
    if len(blocks) == 1:
        return block(*blocks[0])
    out = mint.empty((n, columns), dtype=logits.dtype)
    for index, tensors in enumerate(blocks):
        out[index * step : (index + 1) * step] = block(*tensors)
    return out
