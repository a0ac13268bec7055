"""The columns that `torch.chunk` gives a rank of a vocabulary of known size: uneven and empty shards."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ce_adaptor.vocab_shard import VocabShard

# Vocabulary sizes whose shards were once compared on the host and fit, by group; see `must_compare`.
_compared: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


def chunk_sizes(total_columns: int, world_size: int) -> list[int]:
    """Columns of each of `world_size` shards: ceil(total / world_size) until none are left, as torch.chunk
    and DTensor's Shard lay them.
    """
    full = -(-total_columns // world_size)
    return [max(0, min(full, total_columns - place * full)) for place in range(world_size)]


class ChunkedShard(VocabShard):
    """A `VocabShard` of a described layout, whose gather compares the sizes that came with the described
    ones.

    A rank whose logits have the wrong number of columns cannot raise before the collective, where the others
    would wait for it. So it takes part with as many columns as it should have (`fitted`), the size it was
    given travels in the payload, and every rank raises alike after it.
    """

    given_columns: int
    """What this rank's logits have, where `columns` is what they should have."""

    places: tuple[int, ...]
    """Which shard each rank holds, in the group's rank order."""

    @property
    def expected(self) -> list[int]:
        """Columns of each rank's shard, in the group's rank order."""
        sizes = chunk_sizes(self.total_columns, self.world_size)
        return [sizes[place] for place in self.places]

    def fitted(self, logits: Tensor) -> Tensor:
        """The logits, cut or filled up to the described number of columns; themselves where that is right."""
        if self.given_columns == self.columns:
            return logits
        return F.pad(logits, (0, self.columns - self.given_columns))

    def gather(self, payload: Tensor, header: int) -> Tensor:
        """As `VocabShard.gather`.

        Raises:
            ValueError: on every rank alike, if a shard is not of the described size. On CPU each call is
                checked; on a device the first call with a group and a vocabulary size (it waits for the
                device), later ones on the rank that is wrong.
        """
        if self.given_columns != self.columns:
            payload[-header].fill_(self.given_columns // 65536)
            payload[1 - header].fill_(self.given_columns % 65536)
        described = VocabShard(*self[:-1], equal=False)
        gathered = described.gather(payload, header)
        if must_compare(self.group, self.total_columns, payload):
            high_low = gathered[:, -header:][:, :2].tolist()
            sizes = [int(high) * 65536 + int(low) for high, low in high_low]
            compare_sizes(self.group, self.total_columns, sizes, self.expected)
        if self.given_columns != self.columns:
            raise ValueError(_wrong_size(f"{self.given_columns} columns on this rank", self.columns, self))
        return gathered


def chunked_shard(
    group: Any, columns: int, total_columns: int, places: Sequence[int] | None = None
) -> VocabShard:
    """This rank's shard of a vocabulary of `total_columns` split over `group`.

    Args:
        group: the process group, or None for an unsplit vocabulary.
        columns: of this rank's logits.
        places: which shard each rank of the group holds, in the group's rank order; None: shard r on rank r.

    Raises:
        TypeError: `group` is no process group, `total_columns` no int.
        ValueError: this process is not in the group; an unsplit vocabulary of another size; a size < 1.
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
    sizes = chunk_sizes(total_columns, even.world_size)
    first = min(total_columns, order[even.rank] * sizes[0])
    own = sizes[order[even.rank]]
    equal = total_columns % even.world_size == 0
    shard = ChunkedShard(even.group, even.rank, even.world_size, first, own, total_columns, equal)
    shard.given_columns = columns
    shard.places = order
    if columns != own and torch.compiler.is_compiling():  # a graph's collective is not this class's gather
        raise ValueError(_wrong_size(f"{columns} columns on this rank", own, shard))
    return shard


def must_compare(group: Any, total_columns: int, payload: Tensor) -> bool:
    """Whether this call looks at the gathered sizes: always on CPU, once a group and size on a device."""
    if payload.device.type == "cpu":
        return True
    capturing = payload.is_cuda and torch.cuda.is_current_stream_capturing()
    return not capturing and total_columns not in _compared.get(group, ())


def compare_sizes(group: Any, total_columns: int, sizes: Sequence[int], expected: Sequence[int]) -> None:
    """Raises ValueError unless the shards are of the expected sizes; remembers that they were."""
    if list(sizes) != list(expected):
        what = f"{list(sizes)} columns on the ranks of the group"
        raise ValueError(_wrong_size(what, list(expected), (total_columns, len(sizes))))
    _compared.setdefault(group, set()).add(total_columns)


def _wrong_size(what: str, expected: Any, vocabulary: VocabShard | tuple[int, int]) -> str:
    if isinstance(vocabulary, VocabShard):
        vocabulary = vocabulary.total_columns, vocabulary.world_size
    return (
        f"the vocabulary shards have {what}, but a vocabulary of {vocabulary[0]} split over {vocabulary[1]} "
        f"ranks has {expected}: pass the right global_vocab_size, or give DTensor.from_local the global "
        "shape and stride."
    )


def places_in_group(group: Any, ranks_in_order: Sequence[int]) -> list[int]:
    """For each rank of the group, in its order, the index of its global rank in `ranks_in_order`.

    A process group sorts its ranks; a DeviceMesh may list them in any order.
    """
    return [list(ranks_in_order).index(dist.get_global_rank(group, r)) for r in range(group.size())]
