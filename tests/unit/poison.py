"""Uninitialised memory that shows: `torch.empty` and its relatives hold NaN, so that reading it before
writing fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ce_adaptor.implementations import allocation

FACTORIES = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch, "empty_permuted"))
METHODS = ("new_empty", "new_empty_strided")


def _poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.is_meta:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return create


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Floating-point tensors from `torch.empty*`, `Tensor.new_empty*` and the package's own allocations are
    filled with NaN inside the context."""
    direct = dict(allocation._by_device)
    allocation._by_device.update({kind: _poisoned(original) for kind, original in direct.items()})
    saved = [(owner, name, getattr(owner, name)) for owner, name in FACTORIES]
    for owner, name, original in saved:
        setattr(owner, name, _poisoned(original))
    for name in METHODS:
        setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        allocation._by_device.update(direct)
        for owner, name, original in saved:
            setattr(owner, name, original)
        for name in METHODS:
            delattr(torch.Tensor, name)  # inherited from the C base class again
