"""Which columns of the vocabulary this rank holds, and the one collective of the cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mindspore import Tensor, mint

from megatron_ce_adaptor.mindspore import runtime

# By group, the described sizes (none: equal ones) that were once compared on the host and right: on a device
# comparing means waiting for it. Not by this rank's own size, so that all ranks agree on when to look.
_compared: dict[str, set[tuple[int, ...]]] = {}

HEADER = 2
"""Elements after a rank's statistics: its number of columns as (high, low) parts of 2^16, exact in fp32."""


class VocabShard(NamedTuple):
    """Columns [first_column, first_column + columns) of a vocabulary of total_columns, on one rank of a
    group.

    Attributes:
        group: the name of the group over which the vocabulary is split, or None on one rank.
        rank, world_size: this rank's place in the group.
        sizes: columns of each rank's shard in the group's rank order where they are described, else empty:
            then they are taken to be equal. The gathered payloads are checked for it.
        misfit: None, or the columns that this rank was given in place of the `columns` that were described,
            or that the class weights have for it: it takes part with as many as it should have, and all ranks
            learn of it in the gather and raise.
    """

    group: str | None
    rank: int
    world_size: int
    first_column: int
    columns: int
    total_columns: int
    sizes: tuple[int, ...] = ()
    misfit: int | None = None

    @property
    def given_columns(self) -> int:
        """What this rank's logits have."""
        return self.columns if self.misfit is None else self.misfit

    @classmethod
    def of_equal_shards(cls, group: Any, columns: int, places: Sequence[int] | None = None) -> VocabShard:
        """The shard of a rank that knows only its own number of columns, and that all have as many.

        Args:
            places: which shard each rank of the group holds; None: shard r on rank r.

        Raises:
            TypeError, ValueError: see `runtime.place_in_group`.
        """
        rank, world_size = runtime.place_in_group(group)
        if world_size == 1:
            return cls(None, 0, 1, 0, columns, columns)
        place = rank if places is None else places[rank]
        return cls(group, rank, world_size, place * columns, columns, world_size * columns)

    @classmethod
    def of_chunks(
        cls, group: Any, columns: int, total_columns: int, places: Sequence[int] | None = None
    ) -> VocabShard:
        """This rank's chunk of a vocabulary of known size: ceil(V / W) columns, the last ranks fewer or none.

        Raises:
            TypeError: `group` is no name, `total_columns` no int.
            ValueError: this process is not in the group; an unsplit vocabulary of another size; a size < 1.
                A wrong number of columns raises only in the gather, on all ranks alike.
        """
        if isinstance(total_columns, bool) or not isinstance(total_columns, int):
            raise TypeError(f"global_vocab_size is {total_columns!r}, expected an int.")
        if total_columns < 1:
            raise ValueError(
                f"the vocabulary's size (global_vocab_size) is {total_columns}, expected at least 1."
            )
        rank, world_size = runtime.place_in_group(group)
        if world_size == 1:
            if columns != total_columns:
                raise ValueError(
                    f"the logits have {columns} columns and the vocabulary (global_vocab_size) "
                    f"{total_columns}, but it is on one rank: pass the tensor-parallel group (tp_group), or "
                    "the right size."
                )
            return cls(None, 0, 1, 0, columns, columns)
        order = tuple(places) if places is not None else tuple(range(world_size))
        chunks = chunk_sizes(total_columns, world_size)
        sizes = tuple(chunks[place] for place in order)
        return cls(
            group,
            rank,
            world_size,
            min(total_columns, order[rank] * chunks[0]),
            sizes[rank],
            total_columns,
            sizes,
            columns if columns != sizes[rank] else None,
        )

    def with_class_weight(self, class_weight: Any) -> VocabShard:
        """This shard; for class weights of another vocabulary, the equal shard of that one, as a misfit.

        Shards taken to be equal tell each rank another vocabulary where they are not, so one rank alone may
        find that the class weights do not fit. It must not raise before the gather, where the others would
        wait for it.
        """
        if self.sizes or self.group is None:
            return self
        is_vector = isinstance(class_weight, Tensor) and class_weight.ndim == 1
        total = class_weight.shape[0] if is_vector else 0
        # no rank's columns times the world size are any other total: all ranks raise before the gather
        if total in (0, self.total_columns) or total % self.world_size:
            return self
        columns = total // self.world_size
        return self._replace(
            first_column=self.rank * columns, columns=columns, total_columns=total, misfit=self.columns
        )

    def fitted(self, logits: Tensor) -> Tensor:
        """The logits [..., given_columns], of a misfit shard cut or filled up to the columns it should
        have."""
        if self.misfit is None:
            return logits
        if self.misfit > self.columns:
            return logits[..., : self.columns]
        missing = mint.zeros((*logits.shape[:-1], self.columns - self.misfit), dtype=logits.dtype)
        return mint.cat([logits, missing], -1)

    def gather(self, rows: Tensor, *, last: bool = True) -> tuple[list[Tensor], Tensor | None]:
        """All ranks' statistics in rank order: the only collective of the operation.

        Args:
            rows: [P], the same P on every rank.
            last: the call's last gather; a misfit rank raises in no earlier one, where the others, which
                do not look, would go on to the next and wait for it there.

        Returns:
            [P] of each rank; and where the sizes were not compared on the host, whether they agree (0-d
            bool).

        Raises:
            ValueError: on every rank alike, if the shards' sizes are not what they were taken for. On CPU
                each call is checked; on a device the first call with a group (and described sizes) is, which
                waits for the device; later ones are marked by NaN losses on all ranks, and a rank that knows
                itself to be the misfit raises.
        """
        assert self.group is not None
        if self.misfit is not None:
            rows = rows + float("nan")  # what the others get where they do not compare
        given = self.given_columns
        header = Tensor([given // 65536, given % 65536], rows.dtype)
        gathered = runtime.all_gather(mint.cat([rows, header]), self.group)
        length = rows.shape[0]
        split = [mint.split(piece, [length, HEADER]) for piece in gathered]
        headers = mint.cat([header for _, header in split])
        agree = None
        if self.must_compare(rows):
            numbers = headers.asnumpy().reshape(-1, HEADER)
            self.compare([int(high) * 65536 + int(low) for high, low in numbers])
        else:
            agree = self._agreement(headers)
        if last:
            self.raise_if_misfit()
        return [statistics for statistics, _ in split], agree

    def must_compare(self, tensor: Tensor) -> bool:
        """Whether this call looks at the gathered sizes."""
        return runtime.is_on_cpu(tensor) or self.sizes not in _compared.get(str(self.group), ())

    def _agreement(self, headers: Tensor) -> Tensor:
        sizes = self.sizes or (self.columns,) * self.world_size
        expected = Tensor([part for size in sizes for part in divmod(size, 65536)], headers.dtype)
        return (headers == expected).all()

    def raise_if_misfit(self) -> None:
        """Raises ValueError where this rank's logits or the class weights are known not to fit."""
        if self.misfit is not None:
            self.compare([self.misfit])
            raise ValueError(
                f"the class weight has shape ({self.total_columns},), expected "
                f"({self.misfit * self.world_size},): one weight for each class of the whole vocabulary, on "
                "every rank."
            )

    def compare(self, found: list[int]) -> None:
        """Raises ValueError, the same on every rank, unless the shards' columns are what they should be.

        Args:
            found: of all ranks, or of a misfit one.
        """
        assert self.group is not None
        if self.sizes and found != list(self.sizes):
            where = "on the ranks of the group" if len(found) > 1 else "on this rank of the group"
            raise ValueError(
                f"the vocabulary shards have {found} columns {where}, but a vocabulary of {sum(self.sizes)} "
                f"split over {len(self.sizes)} ranks has {list(self.sizes)}: pass the right "
                f"global_vocab_size."
            )
        if not self.sizes and len(set(found)) > 1:
            raise ValueError(
                f"the vocabulary shards have {found} columns on the ranks of the group, expected the same "
                "number on every rank: pad the vocabulary to a multiple of the tensor-parallel size, or pass "
                "global_vocab_size where the function takes it."
            )
        if len(found) > 1:
            _compared.setdefault(self.group, set()).add(self.sizes)


def chunk_sizes(total_columns: int, world_size: int) -> list[int]:
    """Columns of each of `world_size` shards: ceil(total / world_size) until none are left."""
    full = -(-total_columns // world_size)
    return [max(0, min(full, total_columns - place * full)) for place in range(world_size)]


def class_weight_error(weight: Any, classes: int) -> None:
    """Raises TypeError or ValueError unless `weight` holds a floating-point number for each class."""
    if not isinstance(weight, Tensor) or weight.dtype not in runtime.LOGITS_DTYPES:
        found = f"a tensor of {weight.dtype}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
        raise TypeError(f"weight is {found}, expected a floating-point tensor of class weights.")
    if tuple(weight.shape) != (classes,):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, expected ({classes},): one for each class of the whole "
            "vocabulary, on every rank."
        )
