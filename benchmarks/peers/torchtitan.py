"""TorchTitan's `_LossParallelCrossEntropy`, after the fp32 upcast of its cross_entropy_loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from peers.base import LossPerToken, Peer
from peers.loading import package_folder, private_module

VERSION = "0.3.0"


class _Types:
    """Stands for spmd_types, which only registers a type check that is off by default."""

    @staticmethod
    def register_autograd_function(function: type) -> type:
        return function


def _make() -> LossPerToken:
    path = package_folder("torchtitan", VERSION) / "torchtitan/components/loss.py"
    unused = ("CompileConfig", "current_spmd_mesh", "get_spmd_backend", "logger")
    module = private_module(
        "_peer_torchtitan",
        path,
        {"spmd": _Types, **dict.fromkeys(unused)},
        frozenset({"IGNORE_INDEX", "_LossParallelCrossEntropy"}),
    )
    function = module._LossParallelCrossEntropy

    def loss_per_token(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        vocabulary = logits.shape[-1] * group.size()
        return function.apply(logits.float(), labels, group, vocabulary, "none")

    return loss_per_token


def peers() -> list[Peer]:
    return [
        Peer(
            name="TorchTitan",
            version=lambda: VERSION,
            make=_make,
            saves="fp32 log-probabilities",
            devices=("cuda", "cpu"),
            splits_vocabulary=True,
            only_split=True,
        )
    ]
