"""`loss_parallel_cross_entropy`: the direct API on plain shards and on HyperParallel's DTensors, and its
reductions."""

from __future__ import annotations

import math
from typing import Any

from mindspore import Tensor, mint, ops

from megatron_ce_adaptor.mindspore import runtime
from megatron_ce_adaptor.mindspore.cross_entropy import (
    CrossEntropyStatistics,
    check_dtypes,
    check_options,
    cross_entropy,
    labels_are_checked,
    refuse_overwriting,
    weight_of_labels,
)
from megatron_ce_adaptor.mindspore.layout import (
    LogitsLayout,
    is_dtensor,
    local_class_weight,
    local_labels,
    logits_layout,
)
from megatron_ce_adaptor.mindspore.vocab_shard import VocabShard, class_weight_error

__all__ = ["loss_parallel_cross_entropy"]

REDUCTIONS = ("none", "sum", "mean")


def loss_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: Any = None,
    global_vocab_size: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    reduction: str = "none",
    return_statistics: bool = False,
    *,
    overwrite_input: bool = False,
) -> Tensor | tuple[Tensor, CrossEntropyStatistics]:
    """Cross entropy of logits whose classes, the last dimension, are split over tensor-parallel ranks.

    Per token, with p = softmax over the whole vocabulary of V classes and weights w (1 without `weight`),
    (1 - ls) * w[y] * -log p[y] + ls / V * sum over c of w[c] * -log p[c] + z_loss_weight * lse^2. Ignored
    tokens have loss and gradient 0. Computed in fp32 (fp64 for fp64 logits), whatever the logits' dtype.

    *Plain tensors*: `logits` [..., C] are this rank's columns. With `global_vocab_size` they are its chunk
    (ceil(V / W) columns, the last ranks fewer or none); without, all ranks hold equally many. "sum" and
    "mean" are over this call's tokens.

    *DTensors* (HyperParallel's, see `layout`): exactly one mesh dimension shards the last dimension; the
    others shard or replicate the batch. The result is a plain tensor, as HyperParallel's own loss is: "none"
    of this rank's tokens; "sum" over this rank's tokens; "mean" this rank's sum divided by the whole batch's
    count (or weight), so that the ranks' numbers added up over the mesh dimensions that shard the batch are
    the dense mean. On a mesh whose batch is not sharded it is the dense mean itself.

    Collectives: one all_gather over the TP group in forward, none in backward; "mean" with a sharded batch
    also gathers two numbers over each mesh dimension that shards it.

    Args:
        logits: [..., C] (or [C]), fp16, bf16, fp32 or fp64, any strides; never written.
        labels: class ids of the whole vocabulary, int64 or int32, of the logits' shape without the classes.
        tp_group: of plain logits, the name of the group their vocabulary is split over, None for an unsplit
            one; of DTensors, nothing or the TP mesh dimension's group.
        global_vocab_size: V, where the shards are uneven.
        weight: class weights [V], floating, of the whole vocabulary on every rank. No gradient flows into
            them.
        ignore_index: label of tokens that do not count.
        label_smoothing: in [0, 1).
        z_loss_weight: weight of lse^2, lse = log sum exp.
        reduction: "none", "sum", or "mean": divided by the number of tokens that are not ignored, with
            `weight` by the sum of their weights; 0 if there are none (PyTorch: NaN).
        return_statistics: with "none", return (loss, CrossEntropyStatistics) of the loss's shape.
        overwrite_input: must be False.

    Returns:
        The loss, fp32 (fp64 for fp64 logits), 0-d for "sum" and "mean", or (loss, statistics).

    Raises:
        TypeError: logits or labels of an unsupported dtype.
        ValueError: shapes, placements, group, vocabulary or weight sizes that do not fit; an empty batch with
            "mean"; a label that is no class (see `parallel_cross_entropy` for when that is checked).
        NotImplementedError: overwrite_input=True.
    """
    refuse_overwriting(overwrite_input)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}.")
    if return_statistics and reduction != "none":
        raise ValueError(
            f"return_statistics=True with reduction={reduction!r}: statistics are per token, pass "
            "reduction='none'."
        )
    check_options(ignore_index, label_smoothing, z_loss_weight)
    layout = None
    if is_dtensor(logits):
        layout = logits_layout(logits, -1, tp_group, global_vocab_size)
        shard = layout.shard
        labels = local_labels(labels, layout)
        logits = logits._local_tensor  # type: ignore[attr-defined, unused-ignore]
        check_dtypes(logits, labels, "logits", "labels")
        weight, shard = local_class_weight(weight, shard)
    else:
        shard = _plain_shard(logits, labels, tp_group, global_vocab_size, weight)
    return reduced_cross_entropy(
        logits,
        labels,
        shard,
        layout,
        weight,
        ignore_index,
        label_smoothing,
        z_loss_weight,
        reduction,
        return_statistics,
    )


def _plain_shard(
    logits: Any, labels: Any, group: Any, global_vocab_size: int | None, weight: Any
) -> VocabShard:
    check_dtypes(logits, labels, "logits", "labels")
    if is_dtensor(labels) or is_dtensor(weight):
        raise TypeError(
            "labels or weight are a DTensor and logits are a plain tensor: pass the logits as one too."
        )
    if logits.ndim == 0:
        raise ValueError("logits are a scalar, expected [..., C] with the classes last.")
    if tuple(labels.shape) != tuple(logits.shape[:-1]):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected {tuple(logits.shape[:-1])}: one for each row "
            f"of "
            f"the logits {tuple(logits.shape)}, classes last."
        )
    if global_vocab_size is None:
        shard = VocabShard.of_equal_shards(group, logits.shape[-1])
        if weight is not None:
            shard = shard.with_class_weight(weight)
    else:
        shard = VocabShard.of_chunks(group, logits.shape[-1], global_vocab_size)
    if weight is not None:
        class_weight_error(weight, shard.total_columns)
    return shard


def reduced_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    shard: VocabShard,
    layout: LogitsLayout | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    reduction: str,
    return_statistics: bool,
) -> Tensor | tuple[Tensor, CrossEntropyStatistics]:
    """The reduced loss of local logits [..., C] and labels [...]; arguments are checked by the caller."""
    if reduction == "mean" and math.prod(labels.shape) == 0 and layout is None:
        raise ValueError(f"the batch is empty: logits have shape {tuple(logits.shape)}, which has no mean.")
    # before the losses: should a label be no class, the ranks that see it raise only after this collective
    total = _total(logits, labels, shard, layout, weight, ignore_index) if reduction == "mean" else None
    result = cross_entropy(
        logits if logits.ndim > 1 else logits.reshape(1, -1),
        labels,
        shard,
        weight,
        ignore_index,
        label_smoothing,
        z_loss_weight,
        return_statistics,
    )
    if isinstance(result, tuple):
        loss, statistics = result
        shape = tuple(labels.shape)
        return loss.reshape(shape), CrossEntropyStatistics(*(kind.reshape(shape) for kind in statistics))
    if reduction == "none":
        return result.reshape(tuple(labels.shape))
    summed = runtime.total(result)
    return summed if total is None else summed / total


def _total(
    logits: Tensor,
    labels: Tensor,
    shard: VocabShard,
    layout: LogitsLayout | None,
    weight: Tensor | None,
    ignore_index: int,
) -> Tensor:
    """What a mean is divided by: the number of tokens that are not ignored, or the sum of their weights, over
    the whole batch; 1 where that is 0. 0-d, in the loss's dtype.
    """
    dtype = runtime.accumulation_dtype(logits)
    flat = labels.reshape(-1)
    kept = flat != ignore_index
    if weight is None:
        total = runtime.total(kept.astype(dtype))
    else:
        whole = ops.stop_gradient(weight).astype(dtype)
        total = runtime.total(ops.where(kept, weight_of_labels(whole, flat), 0.0))
    if layout is not None and layout.batch_groups:
        known = ops.logical_and(flat >= 0, flat < shard.total_columns)
        unknown = runtime.total(ops.logical_and(kept, ops.logical_not(known)).astype(dtype))
        sums = mint.cat([total.reshape(1), unknown.reshape(1)])
        own = sums[1]
        for group in layout.batch_groups:
            first, *others = runtime.all_gather(sums, group)
            for other in others:
                first = first + other
            sums = first
        _refuse_unknown_elsewhere(logits, sums[1], own)
        total = sums[0]
    return ops.where(total == 0, 1.0, total)


def _refuse_unknown_elsewhere(logits: Tensor, everywhere: Tensor, own: Tensor) -> None:
    """Raises where another rank's labels are no classes and will make it raise, as this one's own do."""
    if labels_are_checked(logits) and int(everywhere.asnumpy()) and not int(own.asnumpy()):
        raise ValueError(
            f"{int(everywhere.asnumpy())} labels on other ranks of the batch are neither a class nor "
            f"ignore_index; "
            "the ranks that hold them name the first one."
        )
