"""A stand-in for MindSpore's HyperParallel: what the adapter touches of it, under its names.

Written from its interface (DTensors with `_local_tensor`, `device_mesh`, `placements`; meshes with
`mesh_shape`, `rank_list`, `get_group`, `get_local_rank`; the context; the module that its dispatcher looks
the cross entropy up in). Like it, it takes all shards to be of this rank's size.
"""

from __future__ import annotations

from typing import Any

import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor


class Placement:
    def is_shard(self) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'dim', '')})"


class Shard(Placement):
    def __init__(self, dim: int) -> None:
        self.dim = dim

    def is_shard(self) -> bool:
        return True


class Replicate(Placement):
    def is_replicate(self) -> bool:
        return True


class Partial(Placement):
    def is_partial(self) -> bool:
        return True


class DeviceMesh:
    """Ranks in a grid; `ranks` is the same nested list on every process."""

    def __init__(self, ranks: Any, mesh_dim_names: tuple[str, ...]) -> None:
        grid = np.array(ranks)
        self.mesh_shape = grid.shape
        self.rank_list = tuple(int(rank) for rank in grid.reshape(-1))
        self.mesh_dim_names = mesh_dim_names
        self.ndim = grid.ndim
        self.coordinate = tuple(int(i) for i in np.argwhere(grid == dist.get_rank())[0])
        self._groups: list[str] = []
        for dim in range(grid.ndim):
            for line in np.moveaxis(grid, dim, -1).reshape(-1, grid.shape[dim]):
                name = dist.new_group(sorted(int(rank) for rank in line))
                if dist.get_rank() in line:
                    self._groups.append(name)

    def get_group(self, dim: int) -> str:
        return self._groups[dim]

    def get_local_rank(self, dim: int) -> int:
        return self.coordinate[dim]


class DTensor(Tensor):
    def __new__(cls, local: Tensor, device_mesh: DeviceMesh, placements: Any) -> DTensor:
        made = Tensor._make_subclass(cls, local)
        made._local_tensor, made.device_mesh, made.placements = local, device_mesh, tuple(placements)
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = list(self._local_tensor.shape)
        for size, placement in zip(self.device_mesh.mesh_shape, self.placements, strict=True):
            if placement.is_shard():
                sizes[placement.dim] *= size
        return tuple(sizes)
