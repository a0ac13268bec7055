"""TransformerEngine's parallel_cross_entropy, two releases side by side, from its Python files alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from peers.base import LossPerToken, Peer
from peers.loading import package_folder, private_module

VERSIONS = ("2.17.0", "2.20.2")


def load(version: str) -> ModuleType:
    """The module `transformer_engine.pytorch.cross_entropy` of a release, on private names."""
    root = package_folder("transformer_engine", version) / "transformer_engine"
    prefix = "_peer_te_" + version.replace(".", "_")
    kernels = private_module(f"{prefix}_kernels", root / "common/triton/cross_entropy.py")
    names = {n: v for n, v in vars(kernels).items() if n.endswith("_kernel")}
    launch = private_module(f"{prefix}_launch", root / "pytorch/triton/cross_entropy.py", names)
    return private_module(
        f"{prefix}_api",
        root / "pytorch/cross_entropy.py",
        {
            "triton_cross_entropy": launch,
            "no_torch_dynamo": _no_torch_dynamo,
        },
    )


def _no_torch_dynamo(recursive: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As in transformer_engine.pytorch.jit, without the test for an ONNX export."""
    return functools.partial(torch._dynamo.disable, recursive=recursive)


def _make(version: str, overwrite_input: bool) -> LossPerToken:
    function = load(version).parallel_cross_entropy
    options = {"overwrite_input": True} if overwrite_input else {}

    def loss_per_token(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        return function(logits, labels, dist_process_group=group, **options)

    return loss_per_token


def _declines_strided(columns: int, stride: int, dtype: torch.dtype) -> str | None:
    return None if columns == stride else "overwrite_input takes contiguous logits only"


def peers() -> list[Peer]:
    old, new = VERSIONS
    rows = [
        (f"TransformerEngine {old}", old, False, True, "gradient in the logits' memory"),
        (f"TransformerEngine {new}", new, False, False, "copy of the logits, 2 numbers a token"),
        (f"TransformerEngine {new} overwrite_input", new, True, True, "logits, 2 numbers a token"),
    ]
    return [
        Peer(
            name=name,
            version=functools.partial(str, version),
            make=functools.partial(_make, version, overwrite),
            dims=3,
            in_place=in_place,
            saves=saves,
            splits_vocabulary=True,
            declines=_declines_strided if overwrite else Peer.declines,
        )
        for name, version, overwrite, in_place, saves in rows
    ]
