"""`loss_parallel`: inside it, PyTorch's own cross entropy works on logits whose classes are split.

`torch.nn.functional.cross_entropy` is intercepted as it is called (a `TorchFunctionMode`), with its class
weights, label smoothing and reduction, and not its decomposition: so backward needs no context, contexts
nest, and nothing of PyTorch's is replaced that could be left behind.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import _reduction as legacy_reduction
from torch.overrides import TorchFunctionMode

from megatron_ce_adaptor.dtensor.layout import is_sharded_on, logits_layout
from megatron_ce_adaptor.dtensor.loss import LossTerms, dtensor_cross_entropy

__all__ = ["is_loss_parallel_active", "loss_parallel"]

Strictness = bool | Literal["torch"]


@dataclass(frozen=True)
class _Entry:
    """One `with loss_parallel(...)` that is open."""

    mesh: DeviceMesh | None
    strict: Strictness
    mode: TorchFunctionMode


# The open contexts of this thread (and asyncio task), innermost last.
_open: contextvars.ContextVar[tuple[_Entry, ...]] = contextvars.ContextVar("loss_parallel", default=())


def loss_parallel(mesh: DeviceMesh | None = None, strict: Strictness = True) -> LossParallel:
    """A context (or decorator) in which `F.cross_entropy` and `nn.CrossEntropyLoss` compute DTensor logits
    whose classes are split over one mesh dimension, without gathering them.

    Logits [N, C], [N, C, d1, ...] or [C] as PyTorch has them; labels, class weights, label smoothing,
    placements and collectives as of `loss_parallel_cross_entropy`; the loss is fp32 (fp64 for fp64 logits).
    Calls with plain tensors are PyTorch's own. Contexts nest (the innermost counts), one object may be
    entered again while it is open, other threads see nothing of it, and backward may run anywhere.

    What cannot be right is refused: class probabilities as targets (TypeError); `log_softmax` and `nll_loss`
    of DTensors over their sharded dimension (NotImplementedError), which are fine outside.

    Args:
        mesh: a mesh that logits must be on; None for any.
        strict: True: DTensor logits whose classes no mesh dimension shards raise ValueError. False: they are
            computed too, with the same reductions and no collective for the classes; nothing else is
            relaxed. "torch": as True, and what PyTorch 2.13's `loss_parallel` does not do raises
            NotImplementedError: reduction="mean" on a mesh of several dimensions, label smoothing.

    Raises:
        TypeError: mesh is no DeviceMesh.
        ValueError: strict is none of these.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}, expected a DeviceMesh or None.")
    if not isinstance(strict, bool) and strict != "torch":
        raise ValueError(f"strict is {strict!r}, expected True, False or 'torch'.")
    return LossParallel(mesh, strict)


def is_loss_parallel_active() -> bool:
    """Whether the calling thread is inside `loss_parallel`."""
    return bool(_open.get())


class LossParallel(contextlib.ContextDecorator):
    """What `loss_parallel` returns. Holds its arguments alone: what is open is kept by thread."""

    def __init__(self, mesh: DeviceMesh | None, strict: Strictness) -> None:
        self.mesh = mesh
        self.strict = strict

    def __enter__(self) -> LossParallel:
        mode = _Interception()
        mode.__enter__()
        _open.set((*_open.get(), _Entry(self.mesh, self.strict, mode)))
        return self

    def __exit__(self, *exception: Any) -> None:
        if not _open.get():
            raise RuntimeError("loss_parallel is left on another thread or task than it was entered on.")
        *outer, entry = _open.get()
        _open.set(tuple(outer))
        entry.mode.__exit__(*exception)


class _Interception(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **kwargs)
        # An asyncio task that did not open the context, on the thread of one that did, is left alone.
        entries = _open.get()
        if not entries:
            return func(*args, **kwargs)
        return replacement(entries[-1], func, *args, **kwargs)


def _cross_entropy(
    entry: _Entry,
    func: Callable[..., Any],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not isinstance(input, DTensor):
        if isinstance(target, DTensor) or isinstance(weight, DTensor):
            raise TypeError(
                "the target or weight is a DTensor and the logits are a plain tensor; pass these as one too."
            )
        return func(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if size_average is not None or reduce is not None:
        reduction = legacy_reduction.legacy_get_string(size_average, reduce)
    layout = logits_layout(
        input, 1 if input.dim() > 1 else 0, mesh=entry.mesh, require_sharded_vocab=entry.strict is not False
    )
    if entry.strict == "torch":
        _refuse_what_torch_refuses(layout.mesh, reduction, label_smoothing)
    terms = LossTerms(ignore_index, label_smoothing, reduction=reduction)
    return dtensor_cross_entropy(input, target, layout, weight, terms)


def _refuse_what_torch_refuses(mesh: DeviceMesh, reduction: str, label_smoothing: float) -> None:
    if reduction == "mean" and mesh.ndim > 1:
        raise NotImplementedError(
            f"reduction='mean' on a mesh of {mesh.ndim} dimensions is not supported by PyTorch's "
            "loss_parallel (strict='torch'): pass strict=True, which does it, or reduction='sum' or 'none'."
        )
    if label_smoothing:
        raise NotImplementedError(
            f"label_smoothing={label_smoothing} is not supported by PyTorch's loss_parallel "
            "(strict='torch'): pass strict=True, which does it."
        )


def _log_softmax(
    entry: _Entry, func: Callable[..., Any], input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    if isinstance(input, DTensor):
        over = (0 if input.dim() in (0, 1, 3) else 1) if dim is None else dim  # F.log_softmax's default
        _refuse_if_sharded("log_softmax", input, over)
    return func(input, dim, *args, **kwargs)


def _nll_loss(entry: _Entry, func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(input, DTensor):
        _refuse_if_sharded("nll_loss", input, 1 if input.dim() > 1 else 0)
    return func(input, *args, **kwargs)


def _refuse_if_sharded(name: str, input: DTensor, dim: Any) -> None:
    if isinstance(dim, int) and is_sharded_on(input, dim):
        raise NotImplementedError(
            f"{name} over dimension {dim} of a DTensor with placements {tuple(input.placements)} inside "
            "loss_parallel: call F.cross_entropy or loss_parallel_cross_entropy on the logits, or first "
            "gather_tensor_parallel_logits."
        )


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.log_softmax: _log_softmax,
    torch.log_softmax: _log_softmax,
    torch.special.log_softmax: _log_softmax,
    cast(Any, Tensor.log_softmax): _log_softmax,
    F.nll_loss: _nll_loss,
}
