"""Launches the Triton kernels: layouts, tile sizes, buffers. Signatures as in `reference`.

Tile sizes were measured on an H200 (docs/performance.md); `BLOCK` columns are one tile, one program's loop
step.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron_ce_adaptor.implementations import cuda_kernels as kernels
from megatron_ce_adaptor.implementations.rows import Rows, rows_of

HEADER = 4
INTERPRETED: bool = not isinstance(kernels.merge_kernel, triton.runtime.JITFunction)
NAME = "cuda (interpreter)" if INTERPRETED else "cuda"

_ALIGNED, _PEELED, _STRIDED = 0, 1, 2
_VECTOR_BYTES = 16
_MERGE_BLOCK = 256
_MAX_PROGRAMS = 2**31 - 1


class Tile(NamedTuple):
    """Columns of a tile, warps of its program."""

    block: int
    warps: int


# By bytes per logit. Forward: one program a row; few rows leave SMs idle, so each gets more warps and a wider
# tile.
_FORWARD = {2: Tile(4096, 4), 4: Tile(8192, 8), 8: Tile(4096, 8)}
_FORWARD_FEW_ROWS = {2: Tile(16384, 32), 4: Tile(16384, 32), 8: Tile(8192, 32)}
_FEW_ROWS = 132
_GRADIENT = {2: Tile(4096, 4), 4: Tile(1024, 4), 8: Tile(1024, 4)}
_GRADIENT_UNALIGNED = {2: Tile(2048, 4), 4: Tile(1024, 4), 8: Tile(1024, 4)}


@functools.lru_cache(maxsize=1024)
def _fit(tile: Tile, columns: int, vec: int) -> Tile:
    """The same tile, no wider than the row needs; a thread holds at least one vector."""
    block = min(tile.block, max(1 << (columns - 1).bit_length(), 32 * vec))
    warps = min(tile.warps, max(block // (32 * vec), 1))
    return Tile(block, warps)


class _Layout(NamedTuple):
    kind: int
    tensor: Tensor  # whose address is a multiple of 16 bytes if kind is _PEELED
    lead: int  # elements between that address and the first logit


def _layout(x: Tensor, rows: Rows) -> _Layout:
    vec = _VECTOR_BYTES // x.element_size()
    if rows.column_stride != 1 and rows.columns > 1:
        return _Layout(_STRIDED, x, 0)
    lead = x.data_ptr() % _VECTOR_BYTES // x.element_size()
    regular = rows.inner_stride % vec == 0 and rows.outer_stride % vec == 0
    if lead == 0:
        return _Layout(_ALIGNED if regular and rows.columns % vec == 0 else _PEELED, x, 0)
    if lead <= x.storage_offset():
        # The kernel counts from an aligned address, so that its vectors are provably aligned.
        return _Layout(_PEELED, x.as_strided(x.shape, x.stride(), x.storage_offset() - lead), lead)
    return _Layout(_STRIDED, x, 0)


def _common_layout(x: Tensor, x_rows: Rows, out: Tensor, out_rows: Rows) -> tuple[_Layout, Tensor]:
    """A layout both tensors have, and `out` as the kernel wants it."""
    a = _layout(x, x_rows)
    if out is x:
        return a, a.tensor
    b = _layout(out, out_rows)
    vec = _VECTOR_BYTES // x.element_size()
    alike = (
        a.lead == b.lead
        and (x_rows.inner_stride - out_rows.inner_stride) % vec == 0
        and x_rows.inner == out_rows.inner
        and (x_rows.outer_stride - out_rows.outer_stride) % vec == 0
    )
    if a.kind == _STRIDED or b.kind == _STRIDED or not alike:
        return _Layout(_STRIDED, x, 0), out
    return _Layout(max(a.kind, b.kind), a.tensor, a.lead), b.tensor


def _on_device_of(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be the logits'."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_grid(programs: int, what: str) -> None:
    if programs > _MAX_PROGRAMS:
        raise ValueError(
            f"{what} would need {programs} programs, more than a grid's {_MAX_PROGRAMS}: split the batch."
        )


class _Kernel:
    """A Triton kernel whose compiled variants are launched without the JIT's work for each argument.

    The JIT looks at every argument of every call (about 2 us each) to find the variant to run. These kernels
    have no variants but those that `variant` names: their integers have fixed types and no special cases for
    their values (see cuda_kernels), so the variant can be kept and launched at once.
    """

    def __init__(self, jit: Any) -> None:
        self._jit = jit
        self._variants: dict[tuple[Any, ...], Any] = {}

    def launch(
        self,
        programs: int,
        device: torch.device,
        variant: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        scalars: tuple[int | float, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        """Runs `programs` programs on the current stream of `device`, which is the current one.

        Args:
            variant: the dtypes and alignments of `tensors` that the compiled kernel depends on.
            tensors, scalars, constants: one after the other the kernel's parameters.
        """
        hooks = triton.knobs.runtime if _DIRECT else None
        if (
            hooks is None
            or hooks.launch_enter_hook.calls
            or hooks.launch_exit_hook.calls
            or self._jit.pre_run_hooks
        ):
            self._jit[(programs,)](*tensors, *scalars, *constants, num_warps=warps)
            return
        key = (device.index, variant, constants, warps)
        compiled = self._variants.get(key)
        if compiled is None:
            self._variants[key] = self._jit[(programs,)](*tensors, *scalars, *constants, num_warps=warps)
            return
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        pointers = [tensor.data_ptr() for tensor in tensors]
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *pointers, *scalars, *constants,
        )  # fmt: skip


# How a compiled kernel is called differs between versions of Triton; the others go through the JIT.
_DIRECT = not INTERPRETED and triton.__version__.startswith("3.6.")
_statistics_kernel = _Kernel(kernels.row_statistics_kernel)
_merge_kernel = _Kernel(kernels.merge_kernel)
_gradient_kernel = _Kernel(kernels.gradient_kernel)


def _launch_statistics(
    logits: Tensor,
    target: Tensor,
    payload: Tensor,
    loss: Tensor,
    saved: Tensor,
    stats: Tensor,
    *,
    first_column: int,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
    split_vocab: bool,
) -> None:
    rows = rows_of(logits)
    _check_grid(rows.n_rows, f"{rows.n_rows} rows of logits")
    size = logits.element_size()
    vec = _VECTOR_BYTES // size
    layout = _layout(logits, rows)
    tile = _fit((_FORWARD_FEW_ROWS if rows.n_rows < _FEW_ROWS else _FORWARD)[size], rows.columns, vec)
    with _on_device_of(logits):
        _statistics_kernel.launch(
            rows.n_rows,
            logits.device,
            (logits.dtype, target.dtype, layout.tensor.data_ptr() % _VECTOR_BYTES == 0),
            (layout.tensor, target, payload, loss, saved, stats),
            (
                layout.lead,
                rows.inner, rows.outer_stride, rows.inner_stride, rows.column_stride,
                target.stride(0),
                rows.n_rows, rows.columns, first_column, total_columns, ignore_index,
                label_smoothing, z_loss_weight,
            ),
            (
                tile.block, vec, layout.kind, rows.two_level,
                label_smoothing > 0, z_loss_weight != 0, statistics, split_vocab,
            ),
            tile.warps,
        )  # fmt: skip


def row_statistics(
    logits: Tensor, target: Tensor, *, first_column: int, ignore_index: int, smooth: bool, statistics: bool
) -> Tensor:
    """See `reference.row_statistics`."""
    n = target.numel()
    k = 3 + smooth + statistics
    payload = torch.empty(k * n + HEADER, dtype=_accumulation_dtype(logits), device=logits.device)
    _launch_statistics(
        logits, target, payload, payload, payload, payload,
        first_column=first_column, total_columns=0, ignore_index=ignore_index,
        label_smoothing=1.0 if smooth else 0.0, z_loss_weight=0.0, statistics=statistics, split_vocab=True,
    )  # fmt: skip
    return payload


def _result_buffers(target: Tensor, dtype: torch.dtype, statistics: bool) -> tuple[Tensor, Tensor, Tensor]:
    """loss [N], saved [3, N], stats [4, N] (stats is saved, unused, without statistics)."""
    n = target.numel()
    loss = torch.empty(n, dtype=dtype, device=target.device)
    saved = torch.empty(3, n, dtype=dtype, device=target.device)
    stats = torch.empty(4, n, dtype=dtype, device=target.device) if statistics else saved
    return loss, saved, stats


def merge(
    gathered: Tensor,
    target: Tensor,
    *,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
    equal_shards: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.merge`."""
    n = target.numel()
    loss, saved, stats = _result_buffers(target, gathered.dtype, statistics)
    if n:
        smooth = label_smoothing > 0
        with _on_device_of(gathered):
            _merge_kernel.launch(
                -(-n // _MERGE_BLOCK),
                gathered.device,
                (gathered.dtype, target.dtype),
                (gathered, target, loss, saved, stats),
                (target.stride(0), n, total_columns, ignore_index, label_smoothing, z_loss_weight),
                (
                    gathered.shape[0], 3 + smooth + statistics, _MERGE_BLOCK,
                    smooth, z_loss_weight != 0, statistics, equal_shards,
                ),
                4,
            )  # fmt: skip
    return loss, saved, stats if statistics else None


def forward(
    logits: Tensor,
    target: Tensor,
    *,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.forward`; here one kernel."""
    loss, saved, stats = _result_buffers(target, _accumulation_dtype(logits), statistics)
    if target.numel():
        _launch_statistics(
            logits, target, saved, loss, saved, stats,
            first_column=0, total_columns=total_columns, ignore_index=ignore_index,
            label_smoothing=label_smoothing, z_loss_weight=z_loss_weight, statistics=statistics,
            split_vocab=False,
        )  # fmt: skip
    return loss, saved, stats if statistics else None


def gradient(
    logits: Tensor,
    target: Tensor,
    saved: Tensor,
    grad_loss: Tensor,
    out: Tensor,
    *,
    first_column: int,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
) -> None:
    """See `reference.gradient`."""
    rows = rows_of(logits)
    if rows.n_rows == 0 or rows.columns == 0:
        return
    size = logits.element_size()
    vec = _VECTOR_BYTES // size
    out_rows = rows if out is logits else rows_of(out)
    layout, out = _common_layout(logits, rows, out, out_rows)
    tile = _fit((_GRADIENT if layout.kind == _ALIGNED else _GRADIENT_UNALIGNED)[size], rows.columns, vec)
    tiles_per_row = -(-rows.columns // tile.block)
    _check_grid(rows.n_rows * tiles_per_row, f"the gradient of {rows.n_rows} x {rows.columns} logits")
    with _on_device_of(logits):
        _gradient_kernel.launch(
            rows.n_rows * tiles_per_row,
            logits.device,
            (
                logits.dtype, target.dtype, grad_loss.dtype,
                layout.tensor.data_ptr() % _VECTOR_BYTES == 0, out.data_ptr() % _VECTOR_BYTES == 0,
            ),
            (layout.tensor, out, target, grad_loss, saved),
            (
                layout.lead,
                rows.inner, rows.outer_stride, rows.inner_stride, rows.column_stride,
                out_rows.inner, out_rows.outer_stride, out_rows.inner_stride, out_rows.column_stride,
                target.stride(0), grad_loss.stride(0),
                rows.n_rows, rows.columns, tiles_per_row, first_column, total_columns, ignore_index,
                label_smoothing, z_loss_weight,
            ),
            (
                tile.block, vec, layout.kind, rows.two_level, out_rows.two_level,
                label_smoothing > 0, z_loss_weight != 0,
            ),
            tile.warps,
        )  # fmt: skip
