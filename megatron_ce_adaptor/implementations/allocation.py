"""Uninitialised tensors in the least time: a small kernel's buffers otherwise take longer than its launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (shape, strides, dtype) -> a tensor on the current device. What torch.compile's generated code calls: a
# quarter of torch.empty's time, most of which goes into finding out what is meant by its arguments. Not
# documented: without it, torch.empty_strided.
_by_device: dict[str, Callable[..., Tensor]] = {}
with contextlib.suppress(AttributeError):
    _guards: Any = torch._C._dynamo.guards
    _by_device["cuda"] = _guards._empty_strided_cuda
    _by_device["cpu"] = _guards._empty_strided_cpu


def empty_of(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """A function (shape, strides, dtype) that gives uninitialised memory on this device, which has to be the
    current one.
    """
    found = _by_device.get(device.type)
    if found is not None:
        return found

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty
