"""One forward and one backward pass over the logits by an implementation.

The same two passes are registered as the opaque torch operators `megatron_ce::forward` and
`megatron_ce::backward`, which is how the operation is seen under torch.compile: kernels, collective and
choice stay out of the graph.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ce_adaptor.implementations import choose, note_use
from megatron_ce_adaptor.implementations.class_weights import ClassWeights
from megatron_ce_adaptor.implementations.dtypes import accumulation_dtype
from megatron_ce_adaptor.implementations.memo import Memo
from megatron_ce_adaptor.vocab_shard import VocabShard


class Terms(NamedTuple):
    """What the loss of a call is made of, the same for all of its rows."""

    shard: VocabShard
    ignore_index: int
    label_smoothing: float
    z_loss_weight: float


def forward_pass(
    module: ModuleType,
    logits: Tensor,
    target: Tensor,
    terms: Terms,
    weights: ClassWeights | None,
    statistics: bool,
    memo: Memo | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """loss [N], saved [3, N] for `backward_pass`, statistics [4, N] or None; one collective if the shard has
    a group.

    Args:
        module: the implementation.
        logits: [N, C] or [A, B, C], any strides; never written.
        target: [N]; N is the same on all ranks of the group.
        memo: of calls that are alike in all but what the tensors hold (see `plan_of`); None for a lone call.
    """
    shard, ignore_index, label_smoothing, z_loss_weight = terms
    if target.shape[0] == 0:
        dtype = accumulation_dtype(logits)
        loss, saved, stats = (logits.new_empty(shape, dtype=dtype) for shape in ((0,), (3, 0), (4, 0)))
        return loss, saved, stats if statistics else None
    if shard.group is None:
        result: tuple[Tensor, Tensor, Tensor | None] = module.forward(
            logits,
            target,
            total_columns=shard.total_columns,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss_weight=z_loss_weight,
            statistics=statistics,
            weights=weights,
            memo=memo,
        )
        return result
    payload = module.row_statistics(
        logits,
        target,
        first_column=shard.first_column,
        ignore_index=ignore_index,
        smooth=label_smoothing > 0,
        statistics=statistics,
        weights=weights,
        memo=memo,
    )
    gathered = shard.gather(payload, module.HEADER)
    merged: tuple[Tensor, Tensor, Tensor | None] = module.merge(
        gathered,
        target,
        total_columns=shard.total_columns,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
        statistics=statistics,
        equal_shards=shard.equal,
        weights=weights,
        memo=memo,
    )
    return merged


def backward_pass(
    module: ModuleType,
    logits: Tensor,
    target: Tensor,
    saved: Tensor,
    grad_loss: Tensor,
    out: Tensor,
    terms: Terms,
    weights: ClassWeights | None,
    memo: Memo | None = None,
) -> None:
    """Writes the gradient of sum(grad_loss * loss) by the logits into `out` (which may be the logits); no
    collective.
    """
    if target.shape[0] == 0:
        return
    shard, ignore_index, label_smoothing, z_loss_weight = terms
    module.gradient(
        logits,
        target,
        saved,
        grad_loss,
        out,
        first_column=shard.first_column,
        total_columns=shard.total_columns,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
        weights=weights,
        memo=memo,
    )


# The operators take what a graph can hold: a group goes by its registered name, the shard by its numbers.


def _shard(group_name: str, first_column: int, columns: int, total_columns: int, equal: bool) -> VocabShard:
    if not group_name:
        return VocabShard(None, 0, 1, first_column, columns, total_columns, equal)
    group: Any = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return VocabShard(group, group.rank(), group.size(), first_column, columns, total_columns, equal)


def _weights(columns: Tensor | None, rows: Tensor | None) -> ClassWeights | None:
    return None if columns is None or rows is None else ClassWeights(columns, rows)


@torch.library.custom_op("megatron_ce::forward", mutates_args=())
def forward_operator(
    logits: Tensor,
    target: Tensor,
    column_weights: Tensor | None,
    row_weights: Tensor | None,
    group_name: str,
    first_column: int,
    total_columns: int,
    equal: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`forward_pass` as an operator; the statistics are [4, 0] when not asked for."""
    shard = _shard(group_name, first_column, logits.shape[-1], total_columns, equal)
    terms = Terms(shard, ignore_index, label_smoothing, z_loss_weight)
    choice = choose(logits.device.type, shard.columns, shard.group is not None)
    note_use(choice.name)
    weights = _weights(column_weights, row_weights)
    loss, saved, stats = forward_pass(choice.module, logits, target, terms, weights, statistics)
    return loss, saved, stats if stats is not None else loss.new_empty(4, 0)


@forward_operator.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    column_weights: Tensor | None,
    row_weights: Tensor | None,
    group_name: str,
    first_column: int,
    total_columns: int,
    equal: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    n = target.shape[0]
    dtype = accumulation_dtype(logits)
    return (
        logits.new_empty(n, dtype=dtype),
        logits.new_empty(3, n, dtype=dtype),
        logits.new_empty(4, n if statistics else 0, dtype=dtype),
    )


@torch.library.custom_op("megatron_ce::backward", mutates_args=())
def backward_operator(
    logits: Tensor,
    target: Tensor,
    saved: Tensor,
    grad_loss: Tensor,
    column_weights: Tensor | None,
    row_weights: Tensor | None,
    split: bool,
    first_column: int,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
) -> Tensor:
    """`backward_pass` out of place as an operator."""
    columns = logits.shape[-1]
    module = choose(logits.device.type, columns, split).module
    shard = VocabShard(None, 0, 1, first_column, columns, total_columns, False)
    terms = Terms(shard, ignore_index, label_smoothing, z_loss_weight)
    out = torch.empty_like(logits)
    weights = _weights(column_weights, row_weights)
    backward_pass(module, logits, target, saved, grad_loss, out, terms, weights)
    return out


@backward_operator.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    saved: Tensor,
    grad_loss: Tensor,
    column_weights: Tensor | None,
    row_weights: Tensor | None,
    split: bool,
    first_column: int,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
) -> Tensor:
    return torch.empty_like(logits)
