"""quack's cross entropy in CuTe DSL; needs nvidia-cutlass-dsl beside it (fetch_peers.py --with quack)."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from peers.base import LossPerToken, Peer, PeerMissing
from peers.loading import peers_folder

VERSION = "0.6.5"
FOLDER = f"quack_kernels-{VERSION}"


def _make(in_place: bool) -> LossPerToken:
    folder = peers_folder() / FOLDER
    if not (folder / "quack").is_dir():
        raise PeerMissing(
            f"quack {VERSION} is not in .peers: run benchmarks/fetch_peers.py --with quack, which brings "
            "nvidia-cutlass-dsl too (a 92 MB wheel)"
        )
    # a wheel's .pth file puts the DSL's packages on the path when it is installed; unpacked, this does
    for path in (folder, folder / "nvidia_cutlass_dsl/dsl_packages"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    from quack.cross_entropy import cross_entropy

    def loss_per_token(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        return cross_entropy(logits, labels, reduction="none", inplace_backward=in_place)

    return loss_per_token


def _declines(columns: int, stride: int, dtype: torch.dtype) -> str | None:
    if columns * dtype.itemsize % 16 or stride * dtype.itemsize % 16:
        return "takes rows of whole 16-byte vectors only"
    return None


def peers() -> list[Peer]:
    return [
        Peer(
            name="quack in place",
            version=lambda: VERSION,
            make=functools.partial(_make, True),
            in_place=True,
            declines=_declines,
            saves="logits, 1 number a token",
        )
    ]
