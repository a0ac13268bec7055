"""PyTorch's own: eager in the logits' dtype, eager after an upcast to fp32, compiled, and loss_parallel."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peers.base import BF16, LossPerToken, Peer

EAGER = "torch eager"


def _cross_entropy(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _upcast_cross_entropy(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="none")


def _compiled() -> LossPerToken:
    return torch.compile(_upcast_cross_entropy, dynamic=False)


@functools.lru_cache
def _mesh(device_type: str, world_size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, (world_size,))


def _loss_parallel(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    mesh = _mesh(logits.device.type, group.size())
    split = DTensor.from_local(logits, mesh, [Shard(logits.dim() - 1)], run_check=False)
    loss: Any = F.cross_entropy(split, labels, reduction="none")
    return loss.to_local()


def _loss_parallel_context() -> contextlib.AbstractContextManager[Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def _version() -> str:
    return torch.__version__


def peers() -> list[Peer]:
    both = ("cuda", "cpu")
    return [
        Peer(
            name=EAGER,
            version=_version,
            make=lambda: _cross_entropy,
            saves="log-probabilities in the logits' dtype",
            devices=both,
        ),
        Peer(
            name="torch eager, fp32 upcast",
            version=_version,
            make=lambda: _upcast_cross_entropy,
            saves="fp32 log-probabilities",
            devices=both,
            dtypes=(BF16,),
        ),
        Peer(
            name="torch.compile, fp32 upcast",
            version=_version,
            make=_compiled,
            saves="logits, 2 numbers a token",
            devices=("cuda",),
            compiles=True,
        ),
        Peer(
            name="PyTorch loss_parallel",
            version=_version,
            make=lambda: _loss_parallel,
            saves="log-probabilities in the logits' dtype",
            devices=both,
            splits_vocabulary=True,
            only_split=True,
            context=_loss_parallel_context,
        ),
    ]
