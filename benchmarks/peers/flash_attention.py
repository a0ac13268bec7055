"""flash-attention's Triton cross entropy, from the one file that holds it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from peers.base import LossPerToken, Peer
from peers.loading import package_folder, private_module

VERSION = "2.8.3"


def _make() -> LossPerToken:
    path = package_folder("flash_attn", VERSION) / "flash_attn/ops/triton/cross_entropy.py"
    function = private_module("_peer_flash_attn", path).cross_entropy_loss

    def loss_per_token(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        return function(logits, labels, inplace_backward=True, process_group=group)[0]

    return loss_per_token


def peers() -> list[Peer]:
    return [
        Peer(
            name="flash-attn in place",
            version=lambda: VERSION,
            make=_make,
            in_place=True,
            saves="logits, 1 number a token",
            splits_vocabulary=True,
        )
    ]
