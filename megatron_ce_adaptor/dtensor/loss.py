"""`loss_parallel_cross_entropy`: the direct API, and the reductions that are right on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ce_adaptor.cross_entropy import CrossEntropyStatistics, cross_entropy, overwrite_obstacle
from megatron_ce_adaptor.dtensor.chunked_shard import chunked_shard, fitted
from megatron_ce_adaptor.dtensor.layout import (
    LogitsLayout,
    check_class_weight,
    check_described,
    check_label_dtype,
    distributed,
    local_class_weight,
    local_labels,
    local_logits,
    logits_layout,
)
from megatron_ce_adaptor.implementations.class_weights import weight_of_labels
from megatron_ce_adaptor.implementations.dtypes import accumulation_dtype
from megatron_ce_adaptor.settings import switch
from megatron_ce_adaptor.vocab_shard import VocabShard

__all__ = ["LossTerms", "dtensor_cross_entropy", "loss_parallel_cross_entropy"]

REDUCTIONS = ("none", "sum", "mean")


@dataclass(frozen=True)
class LossTerms:
    """What the loss is made of, besides logits, labels and class weights."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    reduction: str = "none"
    return_statistics: bool = False
    overwrite_input: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {self.reduction!r}, expected one of {', '.join(REDUCTIONS)}.")
        if self.return_statistics and self.reduction != "none":
            raise ValueError(
                f"return_statistics=True with reduction={self.reduction!r}: statistics are per token, "
                "pass reduction='none'."
            )


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
    (1 - ls) * w[y] * -log p[y] + ls / V * sum over c of w[c] * -log p[c] + z_loss_weight * lse^2:
    `torch.nn.functional.cross_entropy`'s label smoothing and class weights, PaLM's z-loss. Ignored tokens
    have loss and gradient 0. Computed in fp32 (fp64 for fp64 logits), whatever the logits' dtype.

    *Plain tensors*: `logits` [..., C] are this rank's columns. With `global_vocab_size` they are its chunk
    as `torch.chunk` cuts them (ceil(V / W) columns, the last ranks fewer or none); without, all ranks hold
    equally many. "sum" and "mean" are over this call's tokens.

    *DTensors*: exactly one mesh dimension shards the last dimension, of any mesh (`logits_layout`); the
    others shard or replicate the batch. `labels` have the placements that follow (Replicate on TP, the
    logits' elsewhere), or are plain where the batch is not sharded. The result is a DTensor: "none" with the
    labels' placements; "sum" and "mean" 0-d, Replicate on TP, Partial where the batch is sharded and
    Replicate where it is not. "mean" is this rank's sum divided by the whole batch's count (or weight), so
    that `full_tensor()` is the dense mean. The logits' gradient has the logits' placements.

    Collectives: one all_gather over the TP group in forward, none in backward; "mean" with a sharded batch
    also all-reduces two numbers over each mesh dimension that shards it. No host synchronisation on devices
    (but for the check of the shards' sizes at a group's first call).

    Args:
        logits: [..., C] (or [C]), fp16, bf16, fp32 or fp64, any strides; never written by forward.
        labels: class ids of the whole vocabulary, int64 or int32, of the logits' shape without the classes.
        tp_group: of plain logits, the group their vocabulary is split over, None for an unsplit one; of
            DTensors, nothing or the TP mesh dimension's group.
        global_vocab_size: V; of DTensors, nothing or the logits' last size.
        weight: class weights [V], floating, of the whole vocabulary on every rank (a DTensor: replicated).
            No gradient flows into them.
        ignore_index: label of tokens that do not count.
        label_smoothing: in [0, 1).
        z_loss_weight: weight of lse^2, lse = log sum exp.
        reduction: "none", "sum", or "mean": divided by the number of tokens that are not ignored, with
            `weight` by the sum of their weights; 0 if there are none (PyTorch: NaN).
        return_statistics: with "none", return (loss, CrossEntropyStatistics) of the loss's shape and
            placements.
        overwrite_input: write the gradient over the logits, see `parallel_cross_entropy`.

    Returns:
        The loss, fp32 (fp64 for fp64 logits), or (loss, statistics).

    Raises:
        TypeError: logits or labels of an unsupported dtype; a plain tensor beside a DTensor of logits' rank.
        ValueError: shapes, placements, mesh, group, vocabulary or weight sizes that do not fit; an empty
            batch (a plain one only for "mean": it may be this rank's part of a larger batch); a label that
            is no class (see `parallel_cross_entropy` for when that is checked).
    """
    terms = LossTerms(
        ignore_index, label_smoothing, z_loss_weight, reduction, return_statistics, overwrite_input
    )
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits are a {type(logits).__name__}, expected a tensor.")
    if isinstance(logits, DTensor):
        layout = logits_layout(logits, -1)
        check_described(layout, tp_group, global_vocab_size)
        return dtensor_cross_entropy(logits, labels, layout, weight, terms)
    return _plain_cross_entropy(logits, labels, tp_group, global_vocab_size, weight, terms)


# Traced by Dynamo, the gradient of the DTensor would be lost without a word.
@torch.compiler.disable
def dtensor_cross_entropy(
    logits: DTensor, labels: Tensor, layout: LogitsLayout, weight: Tensor | None, terms: LossTerms
) -> Tensor | tuple[Tensor, CrossEntropyStatistics]:
    """The cross entropy of DTensor logits of any class dimension and layout (see `logits_layout`); arguments
    and results otherwise as of `loss_parallel_cross_entropy`.
    """
    targets = local_labels(labels, layout)
    class_weight = local_class_weight(weight, layout)
    if layout.label_shape.numel() == 0:
        raise ValueError(
            f"the batch is empty: logits have shape {tuple(logits.shape)}, expected at least one token."
        )
    overwrite = terms.overwrite_input and logits.requires_grad and torch.is_grad_enabled()
    obstacle = overwrite_obstacle(logits) if overwrite else None
    if obstacle is not None:
        raise ValueError(f"overwrite_input=True {obstacle}: pass overwrite_input=False.")
    rows = local_logits(logits, overwrite).movedim(layout.class_dim, -1)
    # before the losses: should a label be no class, the ranks that see it raise only after this collective
    total = (
        _total(targets, class_weight, layout.shard, rows, terms, layout)
        if terms.reduction == "mean"
        else None
    )
    loss, statistics = _per_token(rows, targets, layout.shard, class_weight, terms)
    if terms.reduction == "none":
        return _with_statistics(
            loss,
            statistics,
            lambda t: distributed(t, layout.mesh, layout.label_placements, layout.label_shape),
        )
    loss = loss.sum()
    if total is not None:
        loss = loss / total
    return distributed(loss, layout.mesh, layout.summed_placements, torch.Size())


def _plain_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: Any,
    global_vocab_size: int | None,
    weight: Tensor | None,
    terms: LossTerms,
) -> Tensor | tuple[Tensor, CrossEntropyStatistics]:
    check_label_dtype(labels)
    if isinstance(labels, DTensor) or isinstance(weight, DTensor):
        raise TypeError(
            "labels or weight are a DTensor and logits are a plain tensor: pass the logits as one too."
        )
    if logits.dim() == 0:
        raise ValueError("logits are a scalar, expected [..., C] with the classes last.")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected {tuple(logits.shape[:-1])}: one for each row "
            f"of the logits {tuple(logits.shape)}, classes last."
        )
    if global_vocab_size is None:
        shard = VocabShard.of_equal_shards(group, logits.shape[-1])
        if weight is not None:
            shard = shard.with_class_weight(weight)
    else:
        shard = chunked_shard(group, logits.shape[-1], global_vocab_size)
    if weight is not None:
        check_class_weight(weight, shard.total_columns)
    if terms.reduction == "mean" and labels.numel() == 0:
        raise ValueError(f"the batch is empty: logits have shape {tuple(logits.shape)}, which has no mean.")
    total = _total(labels, weight, shard, logits, terms, None) if terms.reduction == "mean" else None
    loss, statistics = _per_token(logits, labels, shard, weight, terms)
    if terms.reduction == "none":
        return _with_statistics(loss, statistics, lambda t: t)
    return loss.sum() if total is None else loss.sum() / total


def _per_token(
    logits: Tensor, labels: Tensor, shard: VocabShard, weight: Tensor | None, terms: LossTerms
) -> tuple[Tensor, CrossEntropyStatistics | None]:
    """Losses and statistics of the labels' shape, for local logits [..., C] of any rank."""
    logits = fitted(logits, shard)
    if logits.dim() == 1:
        logits = logits[None]
    elif logits.dim() > 3:
        logits = logits.flatten(1, -2)  # a view too where [N, C, d...] had its classes moved last
    result = cross_entropy(
        logits,
        labels.reshape(-1),
        shard=shard,
        ignore_index=terms.ignore_index,
        label_smoothing=terms.label_smoothing,
        z_loss_weight=terms.z_loss_weight,
        overwrite_input=terms.overwrite_input,
        return_statistics=terms.return_statistics,
        check_labels=None,
        class_weight=weight,
    )
    if isinstance(result, tuple):
        loss, statistics = result
        return loss.view(labels.shape), CrossEntropyStatistics(*(t.view(labels.shape) for t in statistics))
    return result.view(labels.shape), None


def _with_statistics(
    loss: Tensor, statistics: CrossEntropyStatistics | None, wrap: Callable[[Tensor], Tensor]
) -> Tensor | tuple[Tensor, CrossEntropyStatistics]:
    if statistics is None:
        return wrap(loss)
    return wrap(loss), CrossEntropyStatistics(*map(wrap, statistics))


@torch.no_grad()
def _total(
    labels: Tensor,
    weight: Tensor | None,
    shard: VocabShard,
    logits: Tensor,
    terms: LossTerms,
    layout: LogitsLayout | None,
) -> Tensor:
    """What a mean is divided by: the number of tokens that are not ignored, or the sum of their weights, over
    the whole batch; 1 where that is 0. 0-d, in the loss's dtype.
    """
    dtype = accumulation_dtype(logits)
    known = (labels >= 0) & (labels < shard.total_columns)
    kept = labels != terms.ignore_index
    if weight is None:
        total = kept.sum()
    else:
        total = torch.where(kept, weight_of_labels(weight.to(dtype), labels), 0.0).sum()
    if layout is not None and layout.batch_dims:
        sums = torch.stack([total, (kept & ~known).sum().to(total.dtype)])
        for dim in layout.batch_dims:
            dist.all_reduce(sums, group=layout.mesh.get_group(dim))
        total = sums[0]
        _check_other_ranks(sums[1], kept & ~known)
    return torch.where(total == 0, 1, total).to(dtype)


def _check_other_ranks(unknown: Tensor, here: Tensor) -> None:
    """Raises where another rank's labels are no classes and will make it raise, as this one's own do."""
    checked = switch("MCE_CHECK_LABELS")
    if checked is None:
        checked = unknown.device.type == "cpu"
    if checked and int(unknown) and not bool(here.any()):
        raise ValueError(
            f"{int(unknown)} labels on other ranks of the batch are neither a class nor ignore_index; the "
            "ranks that hold them name the first one."
        )
