"""Everyone who computes this loss, each behind one interface (`peers.base.Peer`)."""

from __future__ import annotations

from peers import (
    flash_attention,
    liger,
    megatron_core,
    ours,
    pytorch,
    quack,
    torchtitan,
    transformer_engine,
    unsloth,
)
from peers.base import LossPerToken, Peer, PeerMissing

__all__ = ["LossPerToken", "Peer", "PeerMissing", "all_peers"]

_MODULES = (
    ours,
    transformer_engine,
    quack,
    flash_attention,
    unsloth,
    liger,
    pytorch,
    megatron_core,
    torchtitan,
)


def all_peers() -> list[Peer]:
    """Ours in place, ours, then the others; names are unique."""
    return [peer for module in _MODULES for peer in module.peers()]
