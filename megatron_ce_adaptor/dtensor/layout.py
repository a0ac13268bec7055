"""The rules for meshes and placements: where the vocabulary is split, and what labels' placements must be.

Exactly one mesh dimension shards the class dimension, in any position of a mesh of any rank: the
tensor-parallel (TP) one. The others shard the batch or replicate it. Nothing is guessed: what does not fit
raises a ValueError that names the placements, from what every rank knows alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from megatron_ce_adaptor.dtensor.chunked_shard import chunked_shard, places_in_group
from megatron_ce_adaptor.vocab_shard import VocabShard

__all__ = [
    "LogitsLayout",
    "check_class_weight",
    "check_described",
    "check_label_dtype",
    "distributed",
    "is_sharded_on",
    "local_class_weight",
    "local_labels",
    "local_logits",
    "logits_layout",
]


@dataclass(frozen=True)
class LogitsLayout:
    """How DTensor logits lie on their mesh.

    Attributes:
        mesh: the logits' mesh.
        placements: the logits'.
        class_dim: the tensor dimension of the classes, not negative.
        tp_dim: the mesh dimension that shards it, or None if every rank has all classes.
        shard: this rank's columns and the TP group (group None: not split).
        label_shape: the logits' global shape without the class dimension.
        label_placements: the labels' and per-token losses': Replicate on TP, as the logits' elsewhere.
        places: which shard each rank of the TP group holds, in the group's rank order.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    class_dim: int
    tp_dim: int | None
    shard: VocabShard
    label_shape: torch.Size
    label_placements: tuple[Placement, ...]
    places: tuple[int, ...] = (0,)

    @property
    def group(self) -> Any:
        """The TP process group, None if the vocabulary is not split."""
        return self.shard.group

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The mesh dimensions that shard the batch."""
        return tuple(d for d, p in enumerate(self.label_placements) if not p.is_replicate())

    @property
    def summed_placements(self) -> tuple[Placement, ...]:
        """Of a sum over this rank's tokens: Partial where the batch is sharded, Replicate elsewhere."""
        return tuple(p if p.is_replicate() else Partial() for p in self.label_placements)


def logits_layout(
    logits: DTensor,
    class_dim: int = -1,
    *,
    mesh: DeviceMesh | None = None,
    require_sharded_vocab: bool = True,
) -> LogitsLayout:
    """The layout of DTensor logits. No collective.

    Args:
        logits: any shape with at least one dimension.
        class_dim: the classes' tensor dimension.
        mesh: a mesh that must be the logits' own.
        require_sharded_vocab: if False, logits with all classes on every rank are accepted too (tp_dim None).

    Raises:
        TypeError: logits are no DTensor.
        ValueError: no or several mesh dimensions shard the classes; a Partial placement; another mesh; this
            process is not in the mesh.
    """
    if not isinstance(logits, DTensor):
        raise TypeError(f"logits are a {type(logits).__name__}, expected a DTensor.")
    if logits.dim() == 0:
        raise ValueError("logits are a scalar, expected a class dimension.")
    placements, own = tuple(logits.placements), logits.device_mesh
    class_dim = class_dim % logits.dim()
    if mesh is not None and mesh != own:
        raise ValueError(
            f"mesh={_mesh_text(mesh)} was given, but the {_description(logits)}: pass the logits' own mesh, "
            "or none."
        )
    tp_dim = _tp_dim(logits, class_dim)
    if tp_dim is None and require_sharded_vocab:
        raise ValueError(
            f"{_description(logits)}: no mesh dimension shards the classes (dimension {class_dim}), expected "
            f"exactly one with Shard({class_dim})."
        )
    if own.get_coordinate() is None:
        raise ValueError(f"this process is not in {_mesh_text(own)}: call this on the mesh's ranks only.")
    label_placements = tuple(
        Replicate() if d == tp_dim else _without_dim(p, class_dim) for d, p in enumerate(placements)
    )
    label_shape = torch.Size(s for d, s in enumerate(logits.shape) if d != class_dim)
    places = _places(own, tp_dim)
    group = None if tp_dim is None else own.get_group(tp_dim)
    columns = logits._local_tensor.shape[class_dim]
    shard = chunked_shard(group, columns, logits.shape[class_dim], places)
    return LogitsLayout(own, placements, class_dim, tp_dim, shard, label_shape, label_placements, places)


def _tp_dim(logits: DTensor, class_dim: int) -> int | None:
    """The one mesh dimension that shards the classes, or None; ValueError for several and for Partial."""
    placements = logits.placements
    for dim, placement in enumerate(placements):
        if not placement.is_replicate() and _sharded_dim(placement) is None:
            raise ValueError(
                f"{_description(logits)}: mesh dimension {dim} is {placement!r}, expected Shard or "
                "Replicate; redistribute the logits first."
            )
    found = [d for d, p in enumerate(placements) if _sharded_dim(p) == class_dim]
    if len(found) > 1 or (found and not _is_plain_shard(placements[found[0]])):
        raise ValueError(
            f"{_description(logits)}: mesh dimensions {found} shard the classes (dimension {class_dim}), "
            f"expected exactly one with Shard({class_dim})."
        )
    return found[0] if found else None


def _places(mesh: DeviceMesh, tp_dim: int | None) -> tuple[int, ...]:
    if tp_dim is None:
        return (0,)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index: list[Any] = list(coordinate)
    index[tp_dim] = slice(None)
    return places_in_group(mesh.get_group(tp_dim), mesh.mesh[tuple(index)].tolist())


def local_labels(labels: Tensor, layout: LogitsLayout) -> Tensor:
    """This rank's labels, of the placements that the layout asks for. No collective.

    DTensor labels must have these placements, or get them by cutting what every rank holds (Replicate to
    Shard); plain labels stand for the whole batch and are accepted only where it is not sharded.

    Raises:
        TypeError: labels are no integer tensor.
        ValueError: another shape, mesh or placements that would take communication.
    """
    check_label_dtype(labels)
    if tuple(labels.shape) != tuple(layout.label_shape):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected {tuple(layout.label_shape)}: the logits' "
            "global shape without the class dimension."
        )
    wanted = layout.label_placements
    if not isinstance(labels, DTensor):
        if layout.batch_dims:
            raise ValueError(
                f"labels are a plain tensor, but the logits' placements {layout.placements} shard the batch: "
                f"pass a DTensor with placements {wanted}, so that it is clear which labels are this rank's."
            )
        return labels
    if labels.device_mesh != layout.mesh:
        raise ValueError(
            f"labels are on {_mesh_text(labels.device_mesh)} and logits on {_mesh_text(layout.mesh)}: both "
            "must be on one mesh."
        )
    if tuple(labels.placements) != wanted:
        if not _only_cuts(labels.placements, wanted):
            raise ValueError(
                f"labels have placements {tuple(labels.placements)}, expected {wanted} (or Replicate where "
                "that shards) for logits "
                f"with placements {layout.placements}: redistribute the labels, which takes communication."
            )
        labels = labels.redistribute(layout.mesh, wanted)
    return _arrived(labels.to_local())


def local_class_weight(weight: Tensor | None, layout: LogitsLayout) -> Tensor | None:
    """The whole vocabulary's class weights as a plain tensor. No collective.

    Raises:
        ValueError: DTensor weights on another mesh or not replicated.
    """
    if weight is not None:
        check_class_weight(weight, layout.shard.total_columns)
    if not isinstance(weight, DTensor):
        return weight
    if weight.device_mesh != layout.mesh or not all(p.is_replicate() for p in weight.placements):
        raise ValueError(
            f"weight has placements {tuple(weight.placements)} on {_mesh_text(weight.device_mesh)}, expected "
            f"Replicate on every dimension of {_mesh_text(layout.mesh)}: each rank needs the whole "
            "vocabulary's class weights."
        )
    return _arrived(weight.to_local())


def check_label_dtype(labels: Any) -> None:
    """Raises TypeError unless labels are an int64 or int32 tensor."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels are a {type(labels).__name__}, expected a tensor of class ids.")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"labels have dtype {labels.dtype}, expected int64 or int32 class ids; class probabilities are "
            "not supported for a split vocabulary."
        )


def check_described(layout: LogitsLayout, group: Any, global_vocab_size: int | None) -> None:
    """What a caller said about DTensor logits must be what they say themselves.

    Raises:
        ValueError: it is not.
    """
    assert layout.tp_dim is not None
    if group is not None and group is not layout.mesh.get_group(layout.tp_dim):
        raise ValueError(
            f"tp_group is not the group of mesh dimension {layout.tp_dim}, which shards the classes of the "
            "logits: leave tp_group out for DTensors."
        )
    total = layout.shard.total_columns
    if global_vocab_size is not None and global_vocab_size != total:
        raise ValueError(
            f"global_vocab_size is {global_vocab_size}, but the DTensor logits have {total} classes: leave "
            "it out for DTensors."
        )


def local_logits(logits: DTensor, overwritten: bool = False) -> Tensor:
    """This rank's part, sharing its memory; the gradient of it becomes one of the logits' placements.

    Args:
        overwritten: backward will have replaced this memory: it then marks the DTensor, which has a version
            of its own, as modified.

    `DTensor.to_local` reckons the gradient's global strides from this rank's sizes. Where shards are uneven
    these are not the logits', and autograd then copies the gradient into a replicated tensor.
    """
    return _LocalLogits.apply(logits, overwritten)


def _arrived(local: Tensor) -> Tensor:
    """The tensor itself where it is the result of a collective that may still run."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


class _LocalLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: DTensor, overwritten: bool) -> Tensor:
        ctx.mesh, ctx.placements = logits.device_mesh, logits.placements
        ctx.shape, ctx.stride = logits.shape, logits.stride()
        if overwritten:
            ctx.save_for_backward(logits)
        local = _arrived(logits._local_tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        for logits in ctx.saved_tensors:
            torch.autograd.graph.increment_version(logits)
        distributed_grad = DTensor.from_local(
            grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )
        return distributed_grad, None


def is_sharded_on(tensor: DTensor, dim: int) -> bool:
    """Whether a mesh dimension shards this tensor dimension."""
    return any(_sharded_dim(p) == dim % max(tensor.dim(), 1) for p in tensor.placements)


def distributed(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """The DTensor of this global shape, contiguous, whose part on this rank is `local`."""
    strides = [1] * len(shape)
    for d in reversed(range(len(shape) - 1)):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def check_class_weight(weight: Any, classes: int) -> None:
    """Raises TypeError or ValueError unless `weight` holds a floating-point number for each class."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        found = f"a tensor of {weight.dtype}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
        raise TypeError(f"weight is {found}, expected a floating-point tensor of class weights.")
    if tuple(weight.shape) != (classes,):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, expected ({classes},): one for each class of the whole "
            "vocabulary, on every rank."
        )


def _only_cuts(have: Sequence[Placement], wanted: Sequence[Placement]) -> bool:
    """Whether `wanted` comes from `have` by slicing what this rank holds.

    So it is where a Replicate becomes a Shard, unless a later mesh dimension has already cut the same tensor
    dimension: the earlier cut comes first, and the pieces would be others.
    """
    for d, (old, new) in enumerate(zip(have, wanted, strict=True)):
        if old == new:
            continue
        if not old.is_replicate() or not _is_plain_shard(new):
            return False
        if any(_sharded_dim(p) == _sharded_dim(new) for p in have[d + 1 :]):
            return False
    return True


def _is_plain_shard(placement: Placement) -> bool:
    return type(placement) is Shard


def _sharded_dim(placement: Placement) -> int | None:
    """The tensor dimension of a Shard or _StridedShard (FSDP2 on TP), else None."""
    return (
        getattr(placement, "dim", None) if not (placement.is_replicate() or placement.is_partial()) else None
    )


def _without_dim(placement: Placement, removed: int) -> Placement:
    """The placement of a tensor from which dimension `removed` was reduced away."""
    dim = _sharded_dim(placement)
    if dim is None or dim < removed:
        return placement
    if _is_plain_shard(placement):
        return Shard(dim - 1)
    strided: Any = placement
    return type(strided)(dim - 1, split_factor=strided.split_factor)


def _description(logits: DTensor) -> str:
    shape, placements = tuple(logits.shape), tuple(logits.placements)
    return f"logits of shape {shape} with placements {placements} on {_mesh_text(logits.device_mesh)}"


def _mesh_text(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    sizes = "x".join(str(size) for size in mesh.mesh.shape)
    return f"mesh {sizes}" + (f" ({', '.join(names)})" if names else "")
