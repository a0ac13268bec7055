"""Liger-Kernel: its dense cross entropy, and the vocabulary-parallel one it makes for Megatron."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from peers.base import LossPerToken, Peer
from peers.loading import import_from

VERSION = "0.8.5"


def _make_dense() -> LossPerToken:
    (module,) = import_from("liger_kernel", VERSION, "liger_kernel.ops.cross_entropy")
    function = module.LigerCrossEntropyFunction

    def loss_per_token(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        # the Triton implementation; arguments up to the reduction as LigerCrossEntropyLoss passes them
        return function.apply(logits, labels, None, -100, 0.0, 0.0, "none")[0]

    return loss_per_token


def _make_vocabulary_parallel() -> LossPerToken:
    (module,) = import_from("liger_kernel", VERSION, "liger_kernel.ops.vocab_parallel_cross_entropy")
    function = module.LigerVocabParallelCEFunction

    def loss_per_token(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        return function.apply(logits, labels, group, -100, 0.0, "pytorch", "global")

    return loss_per_token


def peers() -> list[Peer]:
    return [
        Peer(
            name="Liger",
            version=lambda: VERSION,
            make=_make_dense,
            saves="gradient before grad_output",
        ),
        Peer(
            name="Liger vocab-parallel",
            version=lambda: VERSION,
            make=_make_vocabulary_parallel,
            dims=3,
            saves="fp32 exp of the logits",
            splits_vocabulary=True,
        ),
    ]
