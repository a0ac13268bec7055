"""Which columns of the vocabulary this rank holds, and the one collective of the cross entropy."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# By group, the described sizes (none: equal ones) that were once compared on the host and right: on a device
# comparing means waiting for it. Not by this rank's own size, so that all ranks agree on when to look, also
# when only some see a new one.
_compared: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()


class VocabShard(NamedTuple):
    """Columns [first_column, first_column + columns) of a vocabulary of total_columns, on one rank of a
    group.

    Attributes:
        group: the process group over which the vocabulary is split, or None on one rank.
        rank, world_size: this rank's place in the group.
        equal: the shards' sizes are taken to be equal (`VocabShard.of_equal_shards`); the gathered payloads
            are then checked for it.
        sizes: columns of each rank's shard in rank order, where they are described; the gathered payloads are
            then checked for these.
        misfit: None, or the columns that this rank was given in place of the `columns` that were described,
            or that the class weights have for it: it takes part with as many as it should have, and all
            ranks learn of it in the gather and raise.
    """

    group: Any
    rank: int
    world_size: int
    first_column: int
    columns: int
    total_columns: int
    equal: bool
    sizes: tuple[int, ...] = ()
    misfit: int | None = None

    @property
    def given_columns(self) -> int:
        """What this rank's logits have."""
        return self.columns if self.misfit is None else self.misfit

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

    def with_class_weight(self, class_weight: Any) -> VocabShard:
        """This shard; for class weights of another vocabulary, the equal shard of that one, as a misfit.

        Shards taken to be equal tell each rank another vocabulary where they are not, so one rank alone may
        find that the class weights do not fit. It must not raise before the gather, where the others would
        wait for it.
        """
        if not self.equal or self.sizes or self.group is None or torch.compiler.is_compiling():
            return self
        total = class_weight.shape[0] if isinstance(class_weight, Tensor) and class_weight.dim() == 1 else 0
        # no rank's columns times the world size are any other total: all ranks raise before the gather
        if total in (0, self.total_columns) or total % self.world_size:
            return self
        columns = total // self.world_size
        return self._replace(
            first_column=self.rank * columns, columns=columns, total_columns=total, misfit=self.columns
        )

    def gather(self, payload: Tensor, header: int) -> Tensor:
        """All ranks' payloads in rank order: the only collective of the operation.

        Args:
            payload: [P], the same P, that is as many tokens, on every rank; its last `header` elements
                describe the shard's size.

        Returns:
            [W, P].

        Raises:
            ValueError: on every rank alike, if the sizes were taken to be equal and are not, or are not the
                described ones or those of the class weights. On CPU each call is checked; on a device the
                first call with a group (and described sizes) is, which waits for the device; later ones are
                marked by NaN losses on all ranks, and a rank that knows itself to be the misfit raises.
        """
        if self.misfit is not None:
            payload[:-header].fill_(float("nan"))  # what the others get where they do not compare
            payload[-header].fill_(self.misfit // 65536)
            payload[1 - header].fill_(self.misfit % 65536)
        gathered = payload.new_empty(self.world_size * payload.numel())
        dist.all_gather_into_tensor(gathered, payload, group=self.group)
        gathered = gathered.view(self.world_size, payload.numel())
        if (self.equal or self.sizes) and self.must_compare(payload):
            high_low = gathered[:, -header:][:, :2].tolist()
            self.compare([int(high) * 65536 + int(low) for high, low in high_low])
        if self.misfit is not None:
            self.compare([self.misfit])
            raise ValueError(
                f"the class weight has shape ({self.total_columns},), expected "
                f"({self.misfit * self.world_size},): one weight for each class of the whole vocabulary, on "
                "every rank."
            )
        return gathered

    def compare(self, found: list[int]) -> None:
        """Raises ValueError, the same on every rank, unless the shards' columns are what they should be.

        Args:
            found: of all ranks, or of a misfit one.
        """
        if self.sizes and found != list(self.sizes):
            where = "on the ranks of the group" if len(found) > 1 else "on this rank of the group"
            raise ValueError(
                f"the vocabulary shards have {found} columns {where}, but a vocabulary of {sum(self.sizes)} "
                f"split over {len(self.sizes)} ranks has {list(self.sizes)}: pass the right "
                "global_vocab_size, or give DTensor.from_local the global shape and stride."
            )
        if not self.sizes and len(set(found)) > 1:
            raise ValueError(
                f"the vocabulary shards have {found} columns on the ranks of the group, expected "
                "the same number on every rank: pad the vocabulary to a multiple of the "
                "tensor-parallel size."
            )
        _compared.setdefault(self.group, set()).add(self.sizes)

    def must_compare(self, payload: Tensor) -> bool:
        """Whether this call looks at the gathered sizes."""
        if payload.device.type == "cpu":
            return True
        capturing = payload.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self.sizes not in _compared.get(self.group, ()) and not capturing
