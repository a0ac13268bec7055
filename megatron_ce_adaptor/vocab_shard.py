"""Which columns of the vocabulary this rank holds, and the one collective of the cross entropy."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Groups whose shards' sizes were once compared on the host and were equal: on a device comparing means
# waiting for it. By group and not by size too, so that all ranks agree on when to look, also when only some
# see a new size.
_compared: weakref.WeakSet[Any] = weakref.WeakSet()


class VocabShard(NamedTuple):
    """Columns [first_column, first_column + columns) of a vocabulary of total_columns, on one rank of a
    group.

    Attributes:
        group: the process group over which the vocabulary is split, or None on one rank.
        rank, world_size: this rank's place in the group.
        equal: the shards' sizes were not described but taken to be equal (`VocabShard.of_equal_shards`); the
            gathered payloads are then checked for it.
    """

    group: Any
    rank: int
    world_size: int
    first_column: int
    columns: int
    total_columns: int
    equal: bool

    @classmethod
    def of_equal_shards(cls, group: Any, columns: int) -> VocabShard:
        """The shard of a rank that knows only its own number of columns: rank r holds [r * columns, (r + 1) *
        columns).

        Raises:
            TypeError: `group` is no process group.
            ValueError: this process is not a member of `group`.
        """
        if group is None:
            return cls(None, 0, 1, 0, columns, columns, True)
        outside = group is dist.GroupMember.NON_GROUP_MEMBER  # a number, which is no mistake of the caller's
        if not outside and isinstance(group, (int, str, list, tuple)):
            raise TypeError(
                f"dist_process_group is {group!r}, expected a torch.distributed process group or None."
            )
        if outside or group.rank() < 0:
            raise ValueError(
                "dist_process_group does not contain this process; pass this rank's tensor-parallel group."
            )
        world_size, rank = group.size(), group.rank()
        if world_size == 1:
            return cls(None, 0, 1, 0, columns, columns, True)
        return cls(group, rank, world_size, rank * columns, columns, world_size * columns, True)

    def gather(self, payload: Tensor, header: int) -> Tensor:
        """All ranks' payloads in rank order: the only collective of the operation.

        Args:
            payload: [P], the same P, that is as many tokens, on every rank; its last `header` elements
                describe the shard's size.

        Returns:
            [W, P].

        Raises:
            ValueError: on every rank alike, if the sizes were taken to be equal and are not. On CPU each call
                is checked; on a device the first call with a group is (it waits for the device),
                later ones are marked by NaN losses on all ranks.
        """
        gathered = payload.new_empty(self.world_size * payload.numel())
        dist.all_gather_into_tensor(gathered, payload, group=self.group)
        gathered = gathered.view(self.world_size, payload.numel())
        if self.equal and self._must_compare(payload):
            high_low = gathered[:, -header:][:, :2].tolist()
            sizes = [int(high) * 65536 + int(low) for high, low in high_low]
            if len(set(sizes)) > 1:
                raise ValueError(
                    f"the vocabulary shards have {sizes} columns on the ranks of the group, expected "
                    "the same number on every rank: pad the vocabulary to a multiple of the "
                    "tensor-parallel size."
                )
            _compared.add(self.group)
        return gathered

    def _must_compare(self, payload: Tensor) -> bool:
        if payload.device.type == "cpu":
            return True
        capturing = payload.is_cuda and torch.cuda.is_current_stream_capturing()
        return self.group not in _compared and not capturing
