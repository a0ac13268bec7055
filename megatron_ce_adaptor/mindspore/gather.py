"""`gather_tensor_parallel_logits`: whole rows of logits on every rank, for inference and evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint
from mindspore.common._grad_function import _Function

from megatron_ce_adaptor.mindspore import runtime
from megatron_ce_adaptor.mindspore.layout import is_dtensor, logits_layout
from megatron_ce_adaptor.mindspore.vocab_shard import VocabShard

__all__ = ["gather_tensor_parallel_logits"]

# Numbers after a rank's columns in the gathered buffer: its column count in base 256, which every dtype holds
# exactly.
_DIGITS = 4


def gather_tensor_parallel_logits(
    logits: Tensor, tp_group: Any = None, global_vocab_size: int | None = None
) -> Tensor:
    """Logits [..., C] split over tensor-parallel ranks by their last dimension to [..., V] on every rank.

    Differentiable: each rank's gradient is its own columns of the gathered logits' gradient, without
    communication; what follows is taken to be computed alike on every rank of the group.

    Collectives: one all_gather. Without `global_vocab_size` plain logits exchange their sizes first, which
    may then be any (one more all_gather of a number, and the host waits for it).

    Args:
        logits: this rank's columns, any floating dtype, plain; or a DTensor of HyperParallel's whose last
            dimension one mesh dimension shards: the result is a plain tensor of this rank's part of the
                batch.
        tp_group: of plain logits, the group's name; None for an unsplit vocabulary (returned as it is). Of
            DTensors, nothing or the TP mesh dimension's group.
        global_vocab_size: V, split as `loss_parallel_cross_entropy` takes it.

    Raises:
        TypeError, ValueError: as `loss_parallel_cross_entropy` for group, sizes, mesh and placements.
    """
    places: Sequence[int] | None = None
    if is_dtensor(logits):
        layout = logits_layout(logits, -1, tp_group, global_vocab_size)
        logits = logits._local_tensor  # type: ignore[attr-defined, unused-ignore]
        tp_group, places = layout.shard.group, layout.places
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits are a {type(logits).__name__}, expected a mindspore.Tensor.")
    if logits.dtype not in runtime.LOGITS_DTYPES:
        raise TypeError(f"logits have dtype {logits.dtype}, expected a floating-point one.")
    if logits.ndim == 0:
        raise ValueError("logits are a scalar, expected [..., C] with the classes last.")
    if global_vocab_size is not None:
        shard = VocabShard.of_chunks(tp_group, logits.shape[-1], global_vocab_size, places)
        agreed = False
    else:
        shard = VocabShard.of_equal_shards(tp_group, logits.shape[-1], places)
        agreed = True
        if shard.group is not None:
            sizes = runtime.all_gather(Tensor([logits.shape[-1]], ms.int32), shard.group)
            shard = shard._replace(sizes=tuple(int(n) for n in mint.cat(sizes).asnumpy()))
    if shard.group is None:
        return logits
    order = tuple(places) if places is not None else tuple(range(shard.world_size))
    return _GatherColumns.apply(shard.fitted(logits), _Call(shard, order, agreed))


class _Call:
    """The arguments that are no tensors, as one object that autograd does not look into."""

    __slots__ = ("agreed", "places", "shard")

    def __init__(self, shard: VocabShard, places: tuple[int, ...], agreed: bool) -> None:
        self.shard, self.places, self.agreed = shard, places, agreed


class _GatherColumns(_Function):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _Call) -> Tensor:
        shard, places = call.shard, call.places
        leading, columns = logits.shape[:-1], logits.shape[-1]
        rows, full = math.prod(leading), max(shard.sizes)
        own = logits.reshape(rows, columns)
        if columns < full:
            own = mint.cat([own, mint.zeros((rows, full - columns), dtype=logits.dtype)], 1)
        digits = [shard.given_columns // 256**k % 256 for k in range(_DIGITS)]
        buffer = mint.cat([own.reshape(-1), Tensor(digits, ms.float32).astype(logits.dtype)])
        assert shard.group is not None
        gathered = runtime.all_gather(buffer, shard.group)
        if not call.agreed and shard.must_compare(buffer):
            _compare(shard, [piece[rows * full :] for piece in gathered])
        shard.raise_if_misfit()
        by_place = sorted(range(shard.world_size), key=lambda rank: places[rank])
        pieces = [gathered[r][: rows * full].reshape(rows, full)[:, : shard.sizes[r]] for r in by_place]
        before = sum(shard.sizes[r] for r in by_place if places[r] < places[shard.rank])
        ctx.own = slice(before, before + columns)
        filled = [piece for piece in pieces if piece.shape[1]]
        return runtime.concatenated(filled, 1).reshape(*leading, sum(shard.sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[..., ctx.own].contiguous(), None


def _compare(shard: VocabShard, headers: list[Tensor]) -> None:
    digits = mint.cat([h.astype(ms.float32) for h in headers]).asnumpy().reshape(-1, _DIGITS)
    shard.compare([sum(int(d) * 256**k for k, d in enumerate(of_rank)) for of_rank in digits])
