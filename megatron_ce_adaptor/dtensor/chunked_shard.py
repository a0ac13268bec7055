"""The columns that `torch.chunk` gives a rank of a vocabulary of known size: uneven and empty shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ce_adaptor.vocab_shard import VocabShard


def chunk_sizes(total_columns: int, world_size: int) -> list[int]:
    """Columns of each of `world_size` shards: ceil(total / world_size) until none are left, as torch.chunk
    and DTensor's Shard lay them.
    """
    full = -(-total_columns // world_size)
    return [max(0, min(full, total_columns - place * full)) for place in range(world_size)]


def chunked_shard(
    group: Any, columns: int, total_columns: int, places: Sequence[int] | None = None
) -> VocabShard:
    """This rank's shard of a vocabulary of `total_columns` split over `group`.

    A rank whose logits have the wrong number of columns cannot raise before the collective, where the others
    would wait for it. It gets the shard that it should have, marked as a misfit: with logits that are
    `fitted` to it, all ranks raise alike in the gather.

    Args:
        group: the process group, or None for an unsplit vocabulary.
        columns: of this rank's logits.
        places: which shard each rank of the group holds, in the group's rank order; None: shard r on rank r.

    Raises:
        TypeError: `group` is no process group, `total_columns` no int.
        ValueError: this process is not in the group; an unsplit vocabulary of another size; a size < 1; a
            misfit under torch.compile, whose graph does not compare.
    """
    if isinstance(total_columns, bool) or not isinstance(total_columns, int):
        raise TypeError(f"global_vocab_size is {total_columns!r}, expected an int.")
    if total_columns < 1:
        raise ValueError(
            f"the vocabulary's size (global_vocab_size) is {total_columns}, expected at least 1."
        )
    even = VocabShard.of_equal_shards(group, columns)  # for its checks of the group
    if even.group is None:
        if columns != total_columns:
            raise ValueError(
                f"the logits have {columns} columns and the vocabulary (global_vocab_size) {total_columns}, "
                "but it is on one rank: pass the tensor-parallel group (tp_group), or the right size."
            )
        return even
    order = tuple(places) if places is not None else tuple(range(even.world_size))
    chunks = chunk_sizes(total_columns, even.world_size)
    sizes = tuple(chunks[place] for place in order)
    shard = even._replace(
        first_column=min(total_columns, order[even.rank] * chunks[0]),
        columns=sizes[even.rank],
        total_columns=total_columns,
        equal=len(set(sizes)) == 1,
        sizes=sizes,
        misfit=columns if columns != sizes[even.rank] else None,
    )
    if shard.misfit is not None and torch.compiler.is_compiling():
        shard.compare([shard.misfit])
    return shard


def fitted(logits: Tensor, shard: VocabShard) -> Tensor:
    """The logits, of a misfit shard cut or filled up to the columns it should have."""
    if shard.misfit is None:
        return logits
    return F.pad(logits, (0, shard.columns - shard.misfit))


def places_in_group(group: Any, ranks_in_order: list[int]) -> tuple[int, ...]:
    """For each rank of the group, in its order, the index of its global rank in `ranks_in_order`.

    A process group sorts its ranks; a DeviceMesh may list them in any order.
    """
    return tuple(ranks_in_order.index(dist.get_global_rank(group, r)) for r in range(group.size()))
