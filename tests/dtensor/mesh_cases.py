"""Cross entropy cases on meshes, and their dense fp64 results. Imported on the ranks by name."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


@dataclass(frozen=True)
class MeshLayout:
    """A mesh and, by mesh dimension, what it does to the logits: 'tp', 'batch' (shard dimension 0), 'seq'
    (shard the last dimension that is neither batch nor classes) or 'copy' (replicate)."""

    ranks: tuple[int, ...]
    roles: tuple[str, ...]
    order: tuple[int, ...] = ()  # the mesh's ranks, if not ascending

    def __str__(self) -> str:
        return "x".join(f"{n}{role}" for n, role in zip(self.ranks, self.roles, strict=True))


FOUR = (
    MeshLayout((4,), ("tp",)),
    MeshLayout((2, 2), ("batch", "tp")),
    MeshLayout((2, 2), ("tp", "batch")),
    MeshLayout((2, 2, 1), ("batch", "tp", "copy")),
    MeshLayout((2, 2), ("copy", "tp")),
    MeshLayout((2, 2), ("batch", "tp"), order=(1, 0, 3, 2)),
    MeshLayout((2, 2, 1), ("batch", "batch", "tp")),
)
TWO = (MeshLayout((2,), ("tp",)), MeshLayout((2, 1), ("batch", "tp")), MeshLayout((1, 2), ("batch", "tp")))


@dataclass(frozen=True)
class Case:
    layout: MeshLayout
    shape: tuple[int, ...]  # of the logits, class dimension 1 (functional form) or last (direct)
    reduction: str
    dtype: torch.dtype = torch.float64
    weighted: bool = False
    label_smoothing: float = 0.0
    ignored: str = "none"  # none, some, first_half, all
    z_loss_weight: float = 0.0
    direct: bool = False
    strict: bool | str = True
    scale: float = 3.0
    seed: int = 0

    @property
    def class_dim(self) -> int:
        return len(self.shape) - 1 if self.direct or len(self.shape) == 1 else 1

    @property
    def label_shape(self) -> tuple[int, ...]:
        return tuple(n for d, n in enumerate(self.shape) if d != self.class_dim)


@dataclass
class Example:
    """A case's dense tensors and results. `upstream` has the loss's shape, `gradient` the logits'."""

    logits: Tensor
    labels: Tensor
    weight: Tensor | None
    upstream: Tensor
    loss: Tensor
    gradient: Tensor
    scale: float  # the size of the terms that the loss is made of


@functools.lru_cache(maxsize=4096)
def example(case: Case) -> Example:
    """Dense, in fp64, from PyTorch's own cross entropy: the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    classes = case.shape[case.class_dim]
    logits = (torch.randn(case.shape, generator=generator, dtype=torch.float64) * case.scale).to(case.dtype)
    labels = torch.randint(0, classes, case.label_shape, generator=generator)
    chosen = torch.rand(case.label_shape, generator=generator)
    flat = labels.view(-1)
    if case.ignored == "some":
        labels[chosen < 0.4] = -100
    elif case.ignored == "first_half":  # all that the first rank of a sharded batch holds
        flat[: (flat.numel() + 1) // 2] = -100
    elif case.ignored == "all":
        labels.fill_(-100)
    weight = torch.rand(classes, generator=generator, dtype=torch.float64) + 0.1 if case.weighted else None
    if weight is not None and case.dtype != torch.float64:
        weight = weight.float()
    return _dense(case, logits, labels, weight, generator)


def _dense(
    case: Case, logits: Tensor, labels: Tensor, weight: Tensor | None, generator: torch.Generator
) -> Example:
    x = logits.double().movedim(case.class_dim, -1).reshape(-1, logits.shape[case.class_dim])
    x.requires_grad_()
    flat = labels.reshape(-1)
    w = None if weight is None else weight.double()
    loss = F.cross_entropy(x, flat, w, reduction="none", label_smoothing=case.label_smoothing)
    kept = flat != -100
    if case.z_loss_weight:
        loss = loss + case.z_loss_weight * torch.where(kept, x.logsumexp(-1) ** 2, 0.0)
    size = 1.0 + float(x.detach().abs().max()) * 2
    if case.reduction == "none":
        loss = loss.reshape(case.label_shape)
    else:
        loss, size = loss.sum(), size * flat.numel()
    if case.reduction == "mean":
        total = kept.sum() if w is None else torch.where(kept, w[flat.clamp(min=0)], 0.0).sum()
        divisor = total if total else torch.ones_like(total)  # of nothing: 0, where PyTorch has NaN
        loss, size = loss / divisor, size / max(1e-3, float(divisor))
    upstream = torch.randn(loss.shape, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(loss, x, upstream)
    moved = logits.movedim(case.class_dim, -1)
    gradient = gradient.reshape(moved.shape).movedim(-1, case.class_dim)
    return Example(logits, labels, weight, upstream, loss.detach(), gradient, size)


@functools.lru_cache(maxsize=64)
def mesh_of(layout: MeshLayout) -> DeviceMesh:
    ranks = torch.tensor(layout.order) if layout.order else torch.arange(torch.Size(layout.ranks).numel())
    names = tuple(f"{role}{d}" for d, role in enumerate(layout.roles))
    return DeviceMesh("cpu", ranks.view(layout.ranks), mesh_dim_names=names)


def logits_placements(case: Case) -> list[Placement]:
    sequence = max((d for d in range(len(case.shape)) if d != case.class_dim), default=0)
    of_role = {"tp": Shard(case.class_dim), "batch": Shard(0), "seq": Shard(sequence), "copy": Replicate()}
    return [of_role[role] for role in case.layout.roles]


def label_placements(case: Case) -> list[Placement]:
    sequence = len(case.label_shape) - 1
    of_role = {"tp": Replicate(), "batch": Shard(0), "seq": Shard(sequence), "copy": Replicate()}
    return [of_role[role] for role in case.layout.roles]


def cut(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of a tensor that every rank has: without communication."""
    replicated = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, placements).detach()


SIZES = ((9, 17), (1, 3), (5, 13))
"""(tokens, classes): uneven over 2 and 4 ranks, empty batches and vocabularies on some."""

MORE_SIZES = ((8, 9), (4, 16), (7, 10), *SIZES)


def crossed(
    layouts: Sequence[MeshLayout],
    sizes: Sequence[tuple[int, int]] = SIZES,
    masks: str = "none some first_half",
) -> Iterator[Case]:
    """Every reduction x mesh x (tokens, classes) x weight x smoothing x ignored."""
    for layout, (n, classes), reduction, weighted, smoothing, ignored in itertools.product(
        layouts, sizes, ("none", "sum", "mean"), (False, True), (0.0, 0.1), masks.split()
    ):
        yield Case(layout, (n, classes), reduction, torch.float64, weighted, smoothing, ignored)


def sampled(count: int, layouts: Sequence[MeshLayout], **changes: object) -> list[Case]:
    """A fixed random choice of more sizes and masks than `crossed` has, each with changes."""
    cases = list(crossed(layouts, MORE_SIZES, "none some first_half all"))
    chosen = random.Random(count).sample(cases, count)
    return [replace(case, seed=k, **changes) for k, case in enumerate(chosen)]  # type: ignore[arg-type]
