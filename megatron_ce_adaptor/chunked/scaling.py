"""Multiplying a gradient by the upstream scale: exactly, in place, and not at all where the scale is 1.

On a CUDA device the scale is read by the kernel, so that a scale of 1, the usual one, costs a launch and
no pass over the gradient, and the host never waits. On other devices but the CPU, such as NPUs, and where
Triton is not installed, PyTorch operations multiply; the results are the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096
_PROGRAMS_PER_SM = 8
_BLOCK_BYTES = 1 << 22


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient * factor`, computed in fp32 (fp64 for fp64) and rounded once to `dtype`.

    Args:
        gradient: contiguous; overwritten and returned if it has `dtype` already.
        factor: 0-d, fp32 or fp64, on the gradient's device.
    """
    if gradient.dtype != dtype:
        wide = gradient.to(factor.dtype)
        return torch.mul(wide, factor, out=torch.empty_like(gradient, dtype=dtype))
    if gradient.numel() == 0:
        return gradient
    if gradient.device.type == "cpu":
        number = factor.item()
        return gradient if number == 1.0 else gradient.mul_(number)
    # not is_cuda: torch_npu's transfer_to_npu makes it a synonym of is_npu
    launch = _kernel() if gradient.device.type == "cuda" else None
    if launch is not None:
        launch(gradient, factor)
        return gradient
    # A block at a time: PyTorch's mul_ rounds the factor to the gradient's dtype first.
    flat = gradient.view(-1)
    for block in flat.split(max(1, _BLOCK_BYTES // factor.element_size())):
        block.copy_(torch.mul(block.to(factor.dtype), factor))
    return gradient


@functools.cache
def _kernel() -> Any:
    """A function (gradient, factor) that launches the Triton kernel; None where Triton is not installed:
    on a GPU, with MCE_IMPLEMENTATION=reference only.
    """
    try:
        from megatron_ce_adaptor.chunked import scaling_kernels
    except ModuleNotFoundError as error:
        if error.name != "triton":  # a broken Triton is no missing one
            raise
        return None

    def launch(gradient: Tensor, factor: Tensor) -> None:
        with torch.cuda.device(gradient.device):
            processors = torch.cuda.get_device_properties(gradient.device).multi_processor_count
            blocks = -(-gradient.numel() // _BLOCK)
            grid = (min(blocks, processors * _PROGRAMS_PER_SM),)
            scaling_kernels.scale_kernel[grid](gradient, factor, gradient.numel(), _BLOCK, num_warps=8)

    return launch
