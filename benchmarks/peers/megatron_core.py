"""Megatron-Core's own vocabulary-parallel cross entropy, fused by its JIT fuser and unfused."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from peers.base import LossPerToken, Peer, PeerMissing
from peers.loading import import_from, peers_folder

VERSION = "0.18.0"


def _module(name: str) -> Any:
    """From .peers if it is there, else the installed Megatron-Core, whose version `_version` tells."""
    if (peers_folder() / f"megatron_core-{VERSION}").is_dir():
        return import_from("megatron_core", VERSION, "megatron.core", name)[1]
    try:
        import importlib

        return importlib.import_module(name)
    except ImportError as error:
        raise PeerMissing(
            f"megatron-core {VERSION} is neither in .peers nor installed: run benchmarks/fetch_peers.py"
        ) from error


def _version() -> str:
    # without the commit of whatever repository the process runs in
    return str(_module("megatron.core.package_info").__version__).split("+")[0]


def initialise(world_size: int) -> None:
    """Megatron's groups: all ranks are one tensor-parallel group. torch.distributed must be initialised."""
    state = _module("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(
            tensor_model_parallel_size=world_size, create_gloo_process_groups=False
        )


def _make_fused() -> LossPerToken:
    function = _module("megatron.core.fusions.fused_cross_entropy").fused_vocab_parallel_cross_entropy
    state = _module("megatron.core.parallel_state")

    def loss_per_token(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        return function(logits, labels, group or state.get_tensor_model_parallel_group())

    return loss_per_token


def _make_unfused() -> LossPerToken:
    function = _module("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy

    def loss_per_token(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        return function(logits, labels)

    return loss_per_token


def peers() -> list[Peer]:
    return [
        Peer(
            name=name,
            version=_version,
            make=make,
            dims=3,
            saves="fp32 softmax",
            devices=("cuda", "cpu"),
            splits_vocabulary=True,
            needs_process_group=True,
            compiles=fused,
        )
        for name, make, fused in (
            ("Megatron native fused", _make_fused, True),
            ("Megatron native unfused", _make_unfused, False),
        )
    ]
