"""One forward and one backward pass over the logits by the implementation that `choose` names.

The same two passes are registered as the opaque torch operators `megatron_ce::forward` and
`megatron_ce::backward`, which is how the operation is seen under torch.compile: kernels, collective and
choice stay out of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ce_adaptor.implementations import choose, note_use
from megatron_ce_adaptor.vocab_shard import VocabShard


def forward_pass(
    logits: Tensor,
    target: Tensor,
    shard: VocabShard,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """loss [N], saved [3, N] for `backward_pass`, statistics [4, N] or None; one collective if the shard has
    a group.

    Args:
        logits: [N, C] or [A, B, C], any strides; never written.
        target: [N]; N is the same on all ranks of the group.
    """
    choice = choose(logits.device.type)
    note_use(choice.name)
    if target.numel() == 0:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        loss, saved, stats = (logits.new_empty(shape, dtype=dtype) for shape in ((0,), (3, 0), (4, 0)))
        return loss, saved, stats if statistics else None
    options = {
        "total_columns": shard.total_columns,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss_weight": z_loss_weight,
        "statistics": statistics,
    }
    if shard.group is None:
        return choice.module.forward(logits, target, **options)
    payload = choice.module.row_statistics(
        logits,
        target,
        first_column=shard.first_column,
        ignore_index=ignore_index,
        smooth=label_smoothing > 0,
        statistics=statistics,
    )
    gathered = shard.gather(payload, choice.module.HEADER)
    return choice.module.merge(gathered, target, equal_shards=shard.equal, **options)


def backward_pass(
    logits: Tensor,
    target: Tensor,
    saved: Tensor,
    grad_loss: Tensor,
    out: Tensor,
    shard: VocabShard,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
) -> None:
    """Writes the gradient of sum(grad_loss * loss) by the logits into `out` (which may be the logits); no
    collective.
    """
    choose(logits.device.type).module.gradient(
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
    )


# The operators take what a graph can hold: a group goes by its registered name, the shard by its numbers.


def _shard(group_name: str, first_column: int, columns: int, total_columns: int, equal: bool) -> VocabShard:
    if not group_name:
        return VocabShard(None, 0, 1, first_column, columns, total_columns, equal)
    group: Any = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return VocabShard(group, group.rank(), group.size(), first_column, columns, total_columns, equal)


@torch.library.custom_op("megatron_ce::forward", mutates_args=())
def forward_operator(
    logits: Tensor,
    target: Tensor,
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
    loss, saved, stats = forward_pass(
        logits, target, shard, ignore_index, label_smoothing, z_loss_weight, statistics
    )
    return loss, saved, stats if stats is not None else loss.new_empty(4, 0)


@forward_operator.register_fake
def _(
    logits: Tensor,
    target: Tensor,
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
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
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
    first_column: int,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
) -> Tensor:
    """`backward_pass` out of place as an operator."""
    shard = VocabShard(None, 0, 1, first_column, logits.shape[-1], total_columns, False)
    out = torch.empty_like(logits)
    backward_pass(logits, target, saved, grad_loss, out, shard, ignore_index, label_smoothing, z_loss_weight)
    return out


@backward_operator.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    saved: Tensor,
    grad_loss: Tensor,
    first_column: int,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
) -> Tensor:
    return torch.empty_like(logits)
