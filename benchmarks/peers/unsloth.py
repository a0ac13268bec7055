"""Unsloth's Triton cross entropy, from its file and the launch settings beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peers.base import LossPerToken, Peer
from peers.loading import package_folder, private_module

VERSION = "2026.10.9"


def _make() -> LossPerToken:
    import triton.language as tl
    from triton.language.extra import libdevice

    kernels = package_folder("unsloth", VERSION) / "unsloth/kernels"
    settings = private_module(
        "_peer_unsloth_settings",
        kernels / "utils.py",
        {"Version": _version},
        frozenset({"calculate_settings", "MAX_FUSED_SIZE", "next_power_of_2"}),
    )
    module = private_module(
        "_peer_unsloth",
        kernels / "cross_entropy_loss.py",
        {
            "calculate_settings": settings.calculate_settings,
            "MAX_FUSED_SIZE": settings.MAX_FUSED_SIZE,
            "triton_tanh": libdevice.tanh,
            "triton_cast": tl.cast,
            "torch_gpu_device": torch.cuda.device,
            "is_cdna": lambda: False,  # no AMD GPU
            "_eviction_hints_ok": lambda device: True,  # they are from compute capability 7.0 on
            "Version": _version,
            "logger": None,  # it and the next are for patching transformers
            "_patch_loss_functions": None,
        },
    )
    function = module.Fast_CrossEntropyLoss

    def loss_per_token(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        return function.apply(logits, labels, 0, 0)

    return loss_per_token


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3])


def peers() -> list[Peer]:
    return [Peer(name="Unsloth", version=lambda: VERSION, make=_make, saves="logits, 2 numbers a token")]
