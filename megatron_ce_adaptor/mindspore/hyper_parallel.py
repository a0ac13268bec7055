"""`register_with_hyper_parallel`: HyperParallel's `loss_parallel` context computes with this package.

HyperParallel's dispatcher sends a cross entropy of its DTensors inside `loss_parallel()` to
`hyper_parallel.platform.mindspore.loss_parallel_ops.distributed_cross_entropy_from_op_call(op, args,
kwargs)`, which it looks up in that module at each call. That name and `distributed_cross_entropy` are
replaced. The functions that are no single operator in MindSpore, and so never come to the dispatcher as a
cross entropy, are wrapped where they are called: `mint.nn.functional.cross_entropy`, `ops.cross_entropy`, and
with them `mint.nn.CrossEntropyLoss` and `nn.CrossEntropyLoss`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from megatron_ce_adaptor.mindspore.cross_entropy import check_dtypes, check_options
from megatron_ce_adaptor.mindspore.layout import (
    is_dtensor,
    local_class_weight,
    local_labels,
    logits_layout,
)
from megatron_ce_adaptor.mindspore.loss import REDUCTIONS, reduced_cross_entropy

__all__ = ["register_with_hyper_parallel", "unregister_from_hyper_parallel"]

_OPERATIONS = "hyper_parallel.platform.mindspore.loss_parallel_ops"
_CONTEXT = "hyper_parallel.core.tensor_parallel.loss_parallel"
# The argument order of HyperParallel's (and torch's) function, and that of MindSpore's.
_TORCH_ORDER = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
_MINDSPORE_ORDER = ("input", "target", "weight", "ignore_index", "reduction", "label_smoothing")

# (object, attribute, what was there) of everything replaced, newest last.
_replaced: list[tuple[Any, str, Any]] = []


def register_with_hyper_parallel() -> None:
    """Routes the cross entropy inside HyperParallel's `loss_parallel()` to this package. May be called twice.

    Inside the context, logits that are DTensors with the classes (dimension 1 of [N, C, d1, ...]; where the
    labels have the logits' leading shape, the last one; 0 of [C]) sharded over exactly one mesh dimension are
    computed by the operation behind `loss_parallel_cross_entropy`: any mesh, label smoothing, class weights
    beside ignored labels, 0-d losses (HyperParallel: shape [1]). Results are plain tensors, as
    HyperParallel's; "sum" and "mean" on a mesh that also shards the batch are this rank's part (see
    `loss_parallel_cross_entropy`). Everything else is left as it is.

    Raises:
        ImportError: HyperParallel with a `loss_parallel` for MindSpore is not installed.
    """
    if _replaced:
        return
    try:
        operations = importlib.import_module(_OPERATIONS)
        context = importlib.import_module(_CONTEXT)
        is_active = context.is_loss_parallel_active
        originals = [
            (operations, name, getattr(operations, name))
            for name in ("distributed_cross_entropy_from_op_call", "distributed_cross_entropy")
        ]
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"no HyperParallel with loss_parallel for MindSpore was found ({error}): install it, or call "
            "loss_parallel_cross_entropy yourself."
        ) from error
    _replace(*originals[0][:2], _from_op_call)
    _replace(*originals[1][:2], _computed)
    for owner, name in _functions():
        original = getattr(owner, name)
        _replace(owner, name, _routed(original, is_active))


def unregister_from_hyper_parallel() -> None:
    """Puts back what `register_with_hyper_parallel` replaced; does nothing where nothing is."""
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, replacement)


def _functions() -> list[tuple[Any, str]]:
    """Where MindSpore's cross entropy functions are called by name."""
    return [
        (ms.mint.nn.functional, "cross_entropy"),
        (ms.mint.nn, "cross_entropy"),  # what mint.nn.CrossEntropyLoss calls
        (ms.ops, "cross_entropy"),  # and nn.CrossEntropyLoss
    ]


def _routed(original: Callable[..., Any], is_active: Callable[[], bool]) -> Callable[..., Any]:
    def cross_entropy(*args: Any, **kwargs: Any) -> Any:
        arguments = _named(_MINDSPORE_ORDER, args, kwargs)
        if is_dtensor(arguments.get("input")) and is_active():
            return _computed(**arguments)
        return original(*args, **kwargs)

    cross_entropy.__wrapped__ = original  # type: ignore[attr-defined]
    return cross_entropy


def _from_op_call(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _computed(**_named(_TORCH_ORDER, args, kwargs))


def _named(order: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(order, args, strict=False)), **kwargs}


def _computed(
    input: Any = None,
    target: Any = None,
    weight: Any = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    input_tensor: Any = None,
) -> Tensor:
    """The cross entropy of one call, with torch's arguments; `input_tensor` is HyperParallel's name of
    `input`."""
    logits = input if input_tensor is None else input_tensor
    if not is_dtensor(logits):
        raise TypeError(
            f"inside loss_parallel the logits are a {type(logits).__name__}, expected a DTensor whose "
            f"classes one mesh "
            "dimension shards."
        )
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}.")
    check_options(ignore_index, label_smoothing, 0.0)
    layout = logits_layout(logits, _class_dim(logits, target))
    labels = local_labels(target, layout)
    local = logits._local_tensor
    check_dtypes(local, labels, "logits", "labels")
    weight, shard = local_class_weight(weight, layout.shard)
    if layout.class_dim != local.ndim - 1:
        order = (*(d for d in range(local.ndim) if d != layout.class_dim), layout.class_dim)
        local = ops.transpose(local, order)
    result = reduced_cross_entropy(
        local, labels, shard, layout, weight, ignore_index, label_smoothing, 0.0, reduction, False
    )
    assert isinstance(result, Tensor)
    return result


def _class_dim(logits: Any, labels: Any) -> int:
    """HyperParallel takes logits [batch, seq, V] with labels [batch, seq], torch [N, C, d1, ...] with [N, d1,
    ...]."""
    shape = tuple(logits._local_tensor.shape)
    own = labels._local_tensor if is_dtensor(labels) else labels
    if len(shape) > 2 and tuple(getattr(own, "shape", ())) == shape[:-1]:
        return len(shape) - 1
    return 1 if len(shape) > 1 else 0
