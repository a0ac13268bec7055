"""`gather_tensor_parallel_logits`: whole rows of logits on every rank, for inference and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from megatron_ce_adaptor.dtensor.chunked_shard import chunked_shard, fitted
from megatron_ce_adaptor.dtensor.layout import check_described, distributed, local_logits, logits_layout
from megatron_ce_adaptor.vocab_shard import VocabShard

__all__ = ["gather_tensor_parallel_logits"]

# Numbers after a rank's columns in the gathered buffer: its column count in base 256, which every dtype holds
# exactly.
_HEADER = 4


# Dynamo cannot hand a shard over where it breaks its graph.
@torch.compiler.disable
def gather_tensor_parallel_logits(
    logits: Tensor, tp_group: Any = None, global_vocab_size: int | None = None
) -> Tensor:
    """Logits [..., C] split over tensor-parallel ranks by their last dimension to [..., V] on every rank.

    Differentiable. Of *plain* logits each rank's gradient is its own columns of the gathered logits'
    gradient, without communication: what follows is taken to be computed alike on every rank of the group.
    A *DTensor* becomes Replicate on the TP mesh dimension and keeps its other placements; its gradient knows
    by its placements what must be summed.

    Collectives: one all_gather. Plain logits without `global_vocab_size` exchange their sizes first, which
    may then be any (one more all_gather of a number, and the host waits for it).

    Args:
        logits: this rank's columns, any floating dtype; shard r of the vocabulary on the group's rank r.
        tp_group: of plain logits, the group; None for an unsplit vocabulary (returned as it is). Of DTensors,
            nothing or the TP mesh dimension's group.
        global_vocab_size: V, split as torch.chunk does; of DTensors, nothing or the logits' last size.

    Raises:
        TypeError, ValueError: as `loss_parallel_cross_entropy` for group, sizes, mesh and placements.
    """
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits are a {type(logits).__name__}, expected a tensor.")
    if not logits.is_floating_point():
        raise TypeError(f"logits have dtype {logits.dtype}, expected a floating-point one.")
    if isinstance(logits, DTensor):
        layout = logits_layout(logits, -1)
        check_described(layout, tp_group, global_vocab_size)
        assert layout.tp_dim is not None
        placements = list(layout.placements)
        placements[layout.tp_dim] = Replicate()
        whole = _gathered(local_logits(logits), layout.shard, layout.places)
        return distributed(whole, layout.mesh, placements, logits.shape)
    if logits.dim() == 0:
        raise ValueError("logits are a scalar, expected [..., C] with the classes last.")
    columns = logits.shape[-1]
    if global_vocab_size is not None:
        shard = chunked_shard(tp_group, columns, global_vocab_size)
        return _gathered(logits, shard, range(shard.world_size))
    shard = VocabShard.of_equal_shards(tp_group, columns)
    if shard.group is not None:
        shard = shard._replace(sizes=_exchanged_sizes(logits, shard))
    return _gathered(logits, shard, range(shard.world_size), agreed=True)


def _gathered(logits: Tensor, shard: VocabShard, places: Sequence[int], agreed: bool = False) -> Tensor:
    if shard.group is None:
        return logits
    return _GatherColumns.apply(fitted(logits, shard), shard, places, agreed)


def _exchanged_sizes(logits: Tensor, shard: VocabShard) -> tuple[int, ...]:
    mine = torch.tensor([logits.shape[-1]], device=logits.device)
    sizes = mine.new_empty(shard.world_size)
    dist.all_gather_into_tensor(sizes, mine, group=shard.group)
    return tuple(sizes.tolist())


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabShard, places: Sequence[int], agreed: bool) -> Tensor:
        """
        Args:
            logits: with as many columns as the shard has.
            shard: with its sizes.
            places: which shard each rank of the group holds.
            agreed: the sizes were exchanged and need no comparing.
        """
        *leading, columns = logits.shape
        rows, full = torch.Size(leading).numel(), max(shard.sizes)
        buffer = logits.new_zeros(rows * full + _HEADER)
        buffer[: rows * full].view(rows, full)[:, :columns] = logits.reshape(rows, columns)
        for digit in range(_HEADER):
            buffer[rows * full + digit].fill_(shard.given_columns // 256**digit % 256)
        gathered = buffer.new_empty(shard.world_size * buffer.numel())
        dist.all_gather_into_tensor(gathered, buffer, group=shard.group)
        gathered = gathered.view(shard.world_size, -1)
        if not agreed and shard.must_compare(gathered):
            digits = gathered[:, rows * full :].tolist()
            shard.compare([sum(int(d) * 256**k for k, d in enumerate(of_rank)) for of_rank in digits])
        if shard.misfit is not None:
            shard.compare([shard.misfit])
        by_place = sorted(range(shard.world_size), key=lambda rank: places[rank])
        pieces = [gathered[r, : rows * full].view(rows, full)[:, : shard.sizes[r]] for r in by_place]
        before = [shard.sizes[r] for r in by_place if places[r] < places[shard.rank]]
        ctx.own = slice(sum(before), sum(before) + columns)
        return torch.cat(pieces, 1).view(*leading, sum(shard.sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[..., ctx.own].contiguous(), None, None, None
