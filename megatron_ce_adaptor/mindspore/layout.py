"""HyperParallel's DTensors, known by their attributes, and where on their mesh the vocabulary is split.

HyperParallel is not imported: a DTensor is what has `_local_tensor`, `device_mesh` and `placements`; a mesh
has `mesh_shape`, `rank_list`, `get_group(dim)` and `get_local_rank(dim)`; a placement `is_shard()`,
`is_replicate()`, `is_partial()` and, if it shards, `dim`. The rules are those of
`megatron_ce_adaptor.dtensor.layout`: exactly one mesh dimension shards the classes, in any position of a mesh
of any rank; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor

from megatron_ce_adaptor.mindspore.vocab_shard import VocabShard, class_weight_error


def is_dtensor(value: Any) -> bool:
    """Whether the value is a distributed tensor as HyperParallel has them."""
    return all(hasattr(value, name) for name in ("_local_tensor", "device_mesh", "placements"))


@dataclass(frozen=True)
class LogitsLayout:
    """How DTensor logits lie on their mesh.

    Attributes:
        mesh, placements: the logits'.
        class_dim: the tensor dimension of the classes, not negative.
        tp_dim: the mesh dimension that shards it.
        shard: this rank's columns and the TP group.
        label_shape: the local logits' shape without the class dimension.
        label_dims: for each mesh dimension, the labels' dimension that it shards, or None.
        places: which shard each rank of the TP group holds, in the group's rank order.
    """

    mesh: Any
    placements: tuple[Any, ...]
    class_dim: int
    tp_dim: int
    shard: VocabShard
    label_shape: tuple[int, ...]
    label_dims: tuple[int | None, ...]
    places: tuple[int, ...]

    @property
    def batch_groups(self) -> list[str]:
        """The groups of the mesh dimensions that shard the batch."""
        return [self.mesh.get_group(d) for d, cut in enumerate(self.label_dims) if cut is not None]


def logits_layout(
    logits: Any, class_dim: int = -1, tp_group: Any = None, global_vocab_size: int | None = None
) -> LogitsLayout:
    """The layout of DTensor logits. No collective.

    Args:
        class_dim: the classes' tensor dimension.
        tp_group: nothing or the group of the mesh dimension that shards the classes.
        global_vocab_size: nothing, or the vocabulary's size where the shards are uneven: HyperParallel's
            DTensors take all shards to be as large as this rank's.

    Raises:
        ValueError: no or several mesh dimensions shard the classes; a Partial placement; another group.
    """
    local = logits._local_tensor
    placements, mesh = tuple(logits.placements), logits.device_mesh
    if local.ndim == 0:
        raise ValueError("logits are a scalar, expected a class dimension.")
    class_dim = class_dim % local.ndim
    where = f"logits of local shape {tuple(local.shape)} with placements {placements} on {mesh_text(mesh)}"
    cut_dims = [_sharded_dim(p, local.ndim, where, d) for d, p in enumerate(placements)]
    found = [d for d, cut in enumerate(cut_dims) if cut == class_dim]
    if len(found) != 1:
        many = f"mesh dimensions {found} shard" if found else "no mesh dimension shards"
        raise ValueError(
            f"{where}: {many} the classes (dimension {class_dim}), expected exactly one with "
            f"Shard({class_dim})."
        )
    tp_dim = found[0]
    group = mesh.get_group(tp_dim)
    if tp_group is not None and tp_group != group:
        raise ValueError(
            f"tp_group is {tp_group!r}, but mesh dimension {tp_dim}, which shards the classes of the logits, "
            f"has "
            f"the group {group!r}: leave tp_group out for DTensors."
        )
    places = _places(mesh, tp_dim, group)
    columns = local.shape[class_dim]
    if global_vocab_size is None:
        shard = VocabShard.of_equal_shards(group, columns, places)
    else:
        shard = VocabShard.of_chunks(group, columns, global_vocab_size, places)
    return LogitsLayout(
        mesh,
        placements,
        class_dim,
        tp_dim,
        shard,
        tuple(s for d, s in enumerate(local.shape) if d != class_dim),
        tuple(
            None if d == tp_dim or cut is None else cut - (cut > class_dim) for d, cut in enumerate(cut_dims)
        ),
        places,
    )


def _sharded_dim(placement: Any, ndim: int, where: str, mesh_dim: int) -> int | None:
    if placement.is_replicate():
        return None
    if not placement.is_shard() or type(placement).__name__ != "Shard":
        raise ValueError(
            f"{where}: mesh dimension {mesh_dim} is {placement!r}, expected Shard or Replicate; redistribute "
            f"the "
            "logits first."
        )
    return int(placement.dim) % ndim


def _places(mesh: Any, tp_dim: int, group: Any) -> tuple[int, ...]:
    """For each rank of the group, in its order, its index along the mesh dimension."""
    ranks = np.array(mesh.rank_list).reshape(mesh.mesh_shape)
    index: list[Any] = [mesh.get_local_rank(d) for d in range(ranks.ndim)]
    index[tp_dim] = slice(None)
    along = [int(rank) for rank in ranks[tuple(index)].reshape(-1)]
    if len(along) == 1:
        return (0,)
    return tuple(along.index(rank) for rank in dist.get_process_group_ranks(group))


def local_labels(labels: Any, layout: LogitsLayout) -> Tensor:
    """This rank's labels. No collective.

    Plain labels are this rank's own where the batch is not sharded; elsewhere they could be the whole batch,
    and a DTensor must say.

    Raises:
        TypeError: labels are no tensor.
        ValueError: another shape, mesh or placements.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels are a {type(labels).__name__}, expected a mindspore.Tensor of class ids.")
    local = labels
    if is_dtensor(labels):
        local = labels._local_tensor  # type: ignore[union-attr, unused-ignore]
        if labels.device_mesh is not layout.mesh and list(labels.device_mesh.rank_list) != list(
            layout.mesh.rank_list
        ):
            raise ValueError(
                f"labels are on {mesh_text(labels.device_mesh)} and logits on {mesh_text(layout.mesh)}: both "
                f"must "
                "be on one mesh."
            )
        cut = [
            None if p.is_replicate() else int(p.dim) % local.ndim if p.is_shard() else p
            for p in labels.placements
        ]
        if tuple(cut) != layout.label_dims:
            raise ValueError(
                f"labels have placements {tuple(labels.placements)}, expected Replicate on the mesh "
                f"dimension that "
                f"shards the classes and the logits' elsewhere, for logits with placements "
                f"{layout.placements}: "
                "redistribute the labels."
            )
    elif layout.batch_groups:
        raise ValueError(
            f"labels are a plain tensor, but the logits' placements {layout.placements} shard the batch: "
            f"pass a "
            "DTensor, so that it is clear which labels are this rank's."
        )
    if tuple(local.shape) != layout.label_shape:
        raise ValueError(
            f"labels have local shape {tuple(local.shape)}, expected {layout.label_shape}: the local logits' "
            f"shape "
            "without the class dimension."
        )
    return local


def local_class_weight(weight: Any, shard: VocabShard) -> tuple[Tensor | None, VocabShard]:
    """The whole vocabulary's class weights as a plain tensor, and the shard that goes with them (see
    `VocabShard.with_class_weight`). No collective.

    Raises:
        ValueError: DTensor weights that are not replicated.
    """
    if weight is None:
        return None, shard
    if is_dtensor(weight):
        if not all(p.is_replicate() for p in weight.placements):
            raise ValueError(
                f"weight has placements {tuple(weight.placements)}, expected Replicate on every mesh "
                f"dimension: "
                "each rank needs the whole vocabulary's class weights."
            )
        weight = weight._local_tensor
    shard = shard.with_class_weight(weight)
    class_weight_error(weight, shard.total_columns)
    return weight, shard


def mesh_text(mesh: Any) -> str:
    """The mesh in words."""
    names = getattr(mesh, "mesh_dim_names", None)
    sizes = "x".join(str(size) for size in mesh.mesh_shape)
    return f"mesh {sizes}" + (f" ({', '.join(map(str, names))})" if names else "")
