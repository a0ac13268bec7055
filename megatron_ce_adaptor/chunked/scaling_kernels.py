"""The Triton kernel that multiplies a tensor in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(
    x_ptr,  # [n], written
    factor_ptr,  # [1], fp32 or fp64
    n,
    BLOCK: tl.constexpr,
):
    """x *= factor, unless the factor is 1; every program takes each num_programs-th block."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(start, n, step):
            offsets = first + tl.arange(0, BLOCK)
            mask = offsets < n
            x = tl.load(x_ptr + offsets, mask=mask)
            tl.store(x_ptr + offsets, (x.to(factor.dtype) * factor).to(x_ptr.dtype.element_ty), mask=mask)
