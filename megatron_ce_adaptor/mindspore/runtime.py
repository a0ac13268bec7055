"""What the package asks of MindSpore itself: devices, autograd's state, and the collectives.

Only operators that are there on CPUs and on Ascend are used, so that what was run on CPU with mccl is what
runs on NPUs with hccl; what differs is chosen here, by what the device can do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import mindspore.mint.distributed as dist
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function

try:
    from mindspore.graph.api import _pynative_executor as _executor
except ImportError:  # where it was before 2.9
    from mindspore.common.api import _pynative_executor as _executor

LOGITS_DTYPES = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
LABEL_DTYPES = (ms.int64, ms.int32)
NEG_INF = float("-inf")

# Bytes of fp32 of a block of rows: on a CPU few enough to stay in its cache, on a device enough that the
# launches of the operators do not count.
_CPU_BLOCK_BYTES = 1 << 20
_DEVICE_BLOCK_BYTES = 1 << 28


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether the tensor is computed on by the CPU."""
    device = getattr(tensor, "device", None) or ms.get_context("device_target")
    return str(device).upper().startswith("CPU")


def accumulation_dtype(tensor: Tensor) -> Any:
    """fp64 for fp64 tensors, else fp32."""
    return ms.float64 if tensor.dtype == ms.float64 else ms.float32


def number(value: float, dtype: Any) -> Any:
    """A number to compute with in `dtype`: beside fp64 tensors MindSpore rounds a Python float to fp32."""
    return Tensor(value, ms.float64) if dtype == ms.float64 else value


def total(tensor: Tensor) -> Tensor:
    """The sum of all elements, 0-d; of none, 0 (which MindSpore's own on the CPU is not)."""
    return tensor.sum() if tensor.size else Tensor(0.0, tensor.dtype)


def rows_of_a_block(columns: int, on_cpu: bool) -> int:
    """How many rows of so many columns a block may have."""
    return max(1, (_CPU_BLOCK_BYTES if on_cpu else _DEVICE_BLOCK_BYTES) // (max(columns, 1) * 4))


def blocks(step: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The tensors [N, ...] in blocks of `step` rows, views of them: one operator a tensor, where every index
    into one would wait until the operators before it are launched."""
    if not tensors or tensors[0].shape[0] <= step:
        return [tensors]
    return list(zip(*(mint.split(tensor, step) for tensor in tensors), strict=True))


def matrix(
    a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False, dtype: Any = None
) -> Tensor:
    """a @ b of matrices of one dtype, in that dtype, or in a wider `dtype` without rounding in between (of
    operands cast to it: MindSpore's product has no output dtype).

    The CPU has no product of bf16 matrices: there it is made in fp32 and rounded once, which is what a
    device's product with fp32 accumulation gives.
    """
    product = _product(transpose_a, transpose_b)
    if dtype is not None and dtype != a.dtype:
        return product(a.astype(dtype), b.astype(dtype))
    if a.dtype == ms.bfloat16 and is_on_cpu(a):
        return product(a.astype(ms.float32), b.astype(ms.float32)).astype(ms.bfloat16)
    return product(a, b)


@functools.cache
def _product(transpose_a: bool, transpose_b: bool) -> Any:
    return ops.MatMul(transpose_a, transpose_b)


def is_wanted(ctx: Any, position: int) -> bool:
    """Inside a `_Function`'s forward: whether the gradient by this argument may be asked for."""
    return bool(_executor.grad_flag()) and bool(ctx.needs_input_grad[position])


class _Work:
    """A computation as one object that autograd does not look into."""

    __slots__ = ("compute", "name")

    def __init__(self, compute: Callable[[], Any], name: str) -> None:
        self.compute, self.name = compute, name


class _Once(_Function):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(ctx: Any, work: _Work, *inputs: Tensor) -> Any:
        ctx.name = work.name
        return work.compute()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name} has no second derivative: do not take a gradient of its gradient (nested gradient "
            "functions)."
        )


def differentiable_once(name: str, compute: Callable[[], Any], *inputs: Tensor) -> Any:
    """Inside a `_Function`'s backward: what `compute` returns, tensors that depend on `inputs`, of which any
    gradient raises RuntimeError.

    Not earlier, where it would be recorded: after an exception inside a gradient function MindSpore goes on
    recording everything.
    """
    return _Once.apply(_Work(compute, name), *inputs)


def place_in_group(group: Any) -> tuple[int, int]:
    """(rank, size) of this process in a communication group, by the group's name; (0, 1) for None.

    Raises:
        TypeError: `group` is no name of a group.
        ValueError: there is no such group, or this process is not in it.
    """
    if group is None:
        return 0, 1
    if not isinstance(group, str):
        raise TypeError(
            f"the tensor-parallel group is {group!r}, expected the name of a MindSpore communication group "
            "(what mint.distributed.new_group returns) or None."
        )
    rank = dist.get_rank(group) if group else -1  # new_group returns "" to those that are not in the group
    if rank < 0:
        raise ValueError(
            f"the tensor-parallel group {group!r} does not contain this process (or does not exist); pass "
            f"this "
            "rank's own group."
        )
    return rank, dist.get_world_size(group)


def all_gather(payload: Tensor, group: str) -> list[Tensor]:
    """The payloads of all ranks in rank order, each of this one's shape. One collective."""
    size = dist.get_world_size(group)
    pieces = [mint.empty(payload.shape, dtype=payload.dtype) for _ in range(size)]
    dist.all_gather(pieces, payload.contiguous(), group=group)
    return pieces


def sum_over_ranks(tensor: Tensor, group: str) -> Tensor:
    """The sum over the group's ranks; may overwrite its argument. One collective.

    On the CPU, where mccl adds up no fp64, the ranks' tensors are gathered and added in rank order.
    """
    if is_on_cpu(tensor):
        first, *others = all_gather(tensor, group)
        for other in others:
            first = first + other
        return first
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, op="sum", group=group)
    return tensor


def concatenated(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The pieces joined; a single one as it is."""
    return pieces[0] if len(pieces) == 1 else mint.cat(list(pieces), dim)
