"""Kernels that npu-check must reject or call slow: without them a gate that accepts everything would pass."""

import triton
import triton.language as tl


@triton.jit
def double_precision(X, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    tl.store(X + at, tl.exp(x), mask=at < n)


@triton.jit
def inline_ptx(X, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    y = tl.inline_asm_elementwise(
        "ex2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(X + at, y, mask=at < n)


@triton.jit
def undefined_name(X, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(X + at, no_such_function(at), mask=at < n)  # noqa: F821


@triton.jit
def int64_comparison(X, n, BLOCK: tl.constexpr):
    """Accepted, but as loops over single elements."""
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0)
    tl.store(X + at, tl.where(x == tl.cast(at, tl.int64), x + 1, x), mask=at < n)


@triton.jit
def exponentials(X, n, BLOCK: tl.constexpr):
    """Well, up to the width that fits."""
    for i in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < n, other=0.0)
        tl.store(X + at, tl.exp(x), mask=at < n)
