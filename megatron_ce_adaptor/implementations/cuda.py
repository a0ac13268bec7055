"""Launches the Triton kernels: layouts, tile sizes, buffers. Signatures as in `reference`.

Tile sizes were measured on an H200 (docs/performance.md); `BLOCK` columns are one tile, one program's loop
step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron_ce_adaptor.implementations import cuda_kernels as kernels
from megatron_ce_adaptor.implementations.allocation import empty_of
from megatron_ce_adaptor.implementations.class_weights import ClassWeights
from megatron_ce_adaptor.implementations.dtypes import accumulation_dtype
from megatron_ce_adaptor.implementations.memo import Memo
from megatron_ce_adaptor.implementations.prepared_call import PreparedCall
from megatron_ce_adaptor.implementations.rows import Rows, rows_of

HEADER: int = kernels.HEADER.value
INTERPRETED: bool = not isinstance(kernels.merge_kernel, triton.runtime.JITFunction)
NAME = "cuda (interpreter)" if INTERPRETED else "cuda"
READS_ADDRESSES = True

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
# Many short rows: smaller programs, of which more run beside each other on an SM.
_FORWARD_SHORT_ROWS = {2: Tile(2048, 4), 4: Tile(4096, 8), 8: Tile(4096, 8)}
_MANY_ROWS, _SHORT_ROW = 1024, 8192
_GRADIENT = {2: Tile(4096, 4), 4: Tile(2048, 4), 8: Tile(1024, 4)}
# Backward tells the L2 cache to keep what it reads: 2-3 % less time where the logits are several times the
# cache's size, 2 % more where they fit.
_KEEP_FROM_CACHES = 2


def _fit(tile: Tile, columns: int, vec: int) -> Tile:
    """The same tile, no wider than the row needs; a thread holds at least one vector."""
    block = min(tile.block, max(1 << (columns - 1).bit_length(), 32 * vec))
    warps = min(tile.warps, max(block // (32 * vec), 1))
    return Tile(block, warps)


class _Layout(NamedTuple):
    kind: int
    lead: int  # elements from the last 16-byte boundary to the first logit, if kind is _PEELED


def _layout(x: Tensor, rows: Rows) -> _Layout:
    vec = _VECTOR_BYTES // x.element_size()
    if rows.column_stride != 1 and rows.columns > 1:
        return _Layout(_STRIDED, 0)
    lead = x.data_ptr() % _VECTOR_BYTES // x.element_size()
    if lead > x.storage_offset():  # the kernel counts from the boundary, which here lies before the storage
        return _Layout(_STRIDED, 0)
    regular = rows.inner_stride % vec == 0 and rows.outer_stride % vec == 0 and rows.columns % vec == 0
    return _Layout(_ALIGNED if lead == 0 and regular else _PEELED, lead)


def _common_layout(x: Tensor, x_rows: Rows, out: Tensor, out_rows: Rows) -> _Layout:
    """A layout that both tensors have."""
    a, b = _layout(x, x_rows), _layout(out, out_rows)
    vec = _VECTOR_BYTES // x.element_size()
    alike = (
        a.lead == b.lead
        and (x_rows.inner_stride - out_rows.inner_stride) % vec == 0
        and x_rows.inner == out_rows.inner
        and (x_rows.outer_stride - out_rows.outer_stride) % vec == 0
    )
    if a.kind == _STRIDED or b.kind == _STRIDED or not alike:
        return _Layout(_STRIDED, 0)
    return _Layout(max(a.kind, b.kind), a.lead)


def _forward_tiles(rows: Rows) -> dict[int, Tile]:
    if rows.n_rows < _FEW_ROWS:
        return _FORWARD_FEW_ROWS
    if rows.n_rows >= _MANY_ROWS and rows.columns <= _SHORT_ROW:
        return _FORWARD_SHORT_ROWS
    return _FORWARD


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    """Programmatic dependent launch is there from Hopper and Triton 3.4 on."""
    if device.type != "cuda" or INTERPRETED or torch.version.hip or not kernels.HAS_DEPENDENT_LAUNCH:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _cache_bytes(device: torch.device) -> int:
    """Of the L2 cache; for the interpreter's CPU some number."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**20


def _check_grid(programs: int, what: str) -> None:
    if programs > _MAX_PROGRAMS:
        raise ValueError(
            f"{what} would need {programs} programs, more than a grid's {_MAX_PROGRAMS}: split the batch."
        )


# Where a memo holds a call's launches; those with class weights one further on.
_STATISTICS_CALL, _MERGE_CALL, _FORWARD_CALL = 0, 2, 4


def _place(x: Tensor) -> tuple[Any, ...]:
    """What the layout and the compiled kernel depend on in logits or gradient, their shape apart."""
    lead = x.data_ptr() % _VECTOR_BYTES
    return x.stride(), x.dtype, lead, min(x.storage_offset(), 8) if lead else 0


def _statistics_call(
    logits: Tensor,
    target: Tensor,
    first_column: int,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
    split_vocab: bool,
    weighted: bool,
) -> PreparedCall:
    rows = rows_of(logits)
    _check_grid(rows.n_rows, f"{rows.n_rows} rows of logits")
    size = logits.element_size()
    vec = _VECTOR_BYTES // size
    layout = _layout(logits, rows)
    tile = _fit(_forward_tiles(rows)[size], rows.columns, vec)
    overlap = _can_overlap(logits.device)
    return PreparedCall(
        kernels.row_statistics_kernel,
        rows.n_rows,
        logits.device,
        (logits.dtype, target.dtype, logits.data_ptr() % _VECTOR_BYTES == 0),
        (
            layout.lead,
            rows.inner, rows.outer_stride, rows.inner_stride, rows.column_stride,
            target.stride(0),
            rows.n_rows, rows.columns, first_column, total_columns, ignore_index,
            label_smoothing, z_loss_weight,
        ),
        (
            tile.block, vec, layout.kind, rows.two_level,
            label_smoothing > 0, z_loss_weight != 0, statistics, split_vocab, weighted, overlap,
        ),
        tile.warps,
        leads=((0, layout.lead),),
        overlap=overlap,
    )  # fmt: skip


def row_statistics(
    logits: Tensor,
    target: Tensor,
    *,
    first_column: int,
    ignore_index: int,
    smooth: bool,
    statistics: bool,
    weights: ClassWeights | None,
    memo: Memo | None = None,
) -> Tensor:
    """See `reference.row_statistics`."""
    k = 3 + smooth + statistics
    payload = logits.new_empty(k * target.shape[0] + HEADER, dtype=accumulation_dtype(logits))
    weighted = weights is not None
    calls = {} if memo is None else memo.calls
    call = calls.get(_STATISTICS_CALL + weighted)
    if call is None:
        call = calls[_STATISTICS_CALL + weighted] = _statistics_call(
            logits, target, first_column, 0, ignore_index, 1.0 if smooth else 0.0, 0.0, statistics, True,
            weighted,
        )  # fmt: skip
    column_weights, row_weights = weights or (payload, payload)  # not read without weights
    call(logits, target, payload, payload, payload, payload, column_weights, row_weights)
    return payload


def _result_buffers(target: Tensor, dtype: torch.dtype, statistics: bool) -> tuple[Tensor, Tensor, Tensor]:
    """loss [N], saved [3, N], stats [4, N] (stats is saved, unused, without statistics)."""
    n = target.shape[0]
    loss = target.new_empty(n, dtype=dtype)
    saved = loss.new_empty((3, n))
    stats = loss.new_empty((4, n)) if statistics else saved
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
    weights: ClassWeights | None,
    memo: Memo | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.merge`."""
    loss, saved, stats = _result_buffers(target, gathered.dtype, statistics)
    weighted = weights is not None
    calls = {} if memo is None else memo.calls
    call = calls.get(_MERGE_CALL + weighted)
    if call is None:
        n = target.numel()
        smooth = label_smoothing > 0
        overlap = _can_overlap(gathered.device)
        call = calls[_MERGE_CALL + weighted] = PreparedCall(
            kernels.merge_kernel,
            -(-n // _MERGE_BLOCK),
            gathered.device,
            (gathered.dtype, target.dtype),
            (target.stride(0), n, total_columns, ignore_index, label_smoothing, z_loss_weight),
            (
                gathered.shape[0], 3 + smooth + statistics, _MERGE_BLOCK,
                smooth, z_loss_weight != 0, statistics, equal_shards, weighted, overlap,
            ),
            4,
            overlap=overlap,
        )  # fmt: skip
    call(gathered, target, loss, saved, stats, saved if weights is None else weights.rows)
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
    weights: ClassWeights | None,
    memo: Memo | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.forward`; here one kernel."""
    loss, saved, stats = _result_buffers(target, accumulation_dtype(logits), statistics)
    weighted = weights is not None
    calls = {} if memo is None else memo.calls
    call = calls.get(_FORWARD_CALL + weighted)
    if call is None:
        call = calls[_FORWARD_CALL + weighted] = _statistics_call(
            logits, target, 0, total_columns, ignore_index, label_smoothing, z_loss_weight, statistics, False,
            weighted,
        )  # fmt: skip
        if memo is not None and not weighted:
            memo.forward = _ForwardAgain(call, logits, loss, statistics)
    column_weights, row_weights = weights or (saved, saved)
    call(logits, target, saved, loss, saved, stats, column_weights, row_weights)
    return loss, saved, stats if statistics else None


class _ForwardAgain:
    """What `forward` did, for another call that has its memo, without class weights."""

    __slots__ = ("_call", "_dtype", "_empty", "_n", "_statistics")

    def __init__(self, call: PreparedCall, logits: Tensor, loss: Tensor, statistics: bool) -> None:
        self._call = call
        self._empty = empty_of(logits.device)
        self._n = loss.shape[0]
        self._dtype = loss.dtype
        self._statistics = statistics

    def __call__(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if not self._call.is_on_current_device():
            return None
        n, dtype, empty = self._n, self._dtype, self._empty
        loss = empty((n,), (1,), dtype)
        saved = empty((3, n), (n, 1), dtype)
        stats = empty((4, n), (n, 1), dtype) if self._statistics else None
        self._call.launch(logits, target, saved, loss, saved, saved if stats is None else stats, saved, saved)
        return loss, saved, stats


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
    weights: ClassWeights | None,
    memo: Memo | None = None,
) -> None:
    """See `reference.gradient`."""
    if logits.numel() == 0:
        return
    weighted = weights is not None
    # Logits and labels too: hooks for saved tensors (offloading, ...) may bring them back with other strides
    # and alignment than forward's, which is all that the memo stands for.
    key = (
        weighted, grad_loss.dtype, grad_loss.stride(), target.stride(), target.dtype,
        _place(logits), None if out is logits else _place(out),
    )  # fmt: skip
    calls = {} if memo is None else memo.calls
    call = calls.get(key)
    if call is None:
        options = (first_column, total_columns, ignore_index, label_smoothing, z_loss_weight)
        call = calls[key] = _gradient_call(logits, target, grad_loss, out, *options, weighted=weighted)
        aligned = logits.data_ptr() % _VECTOR_BYTES == 0 and _place(logits) == _place(out)
        if memo is not None and not weighted and aligned and logits.is_contiguous():
            memo.gradient = _GradientAgain(call, logits, target, grad_loss)
    column_weights, row_weights = weights or (saved, saved)
    call(logits, out, target, grad_loss, saved, column_weights, row_weights)


class _GradientAgain:
    """What `gradient` did for contiguous, aligned logits, for another call that has its memo, without class
    weights.
    """

    __slots__ = ("_call", "_empty", "_kind", "_shape")

    def __init__(self, call: PreparedCall, logits: Tensor, target: Tensor, grad_loss: Tensor) -> None:
        self._call = call
        self._empty = empty_of(logits.device)
        self._shape = tuple(logits.shape)
        self._kind = self._kind_of(logits, target, grad_loss)

    @staticmethod
    def _kind_of(logits: Tensor, target: Tensor, grad_loss: Tensor) -> tuple[Any, ...]:
        """What the launch depends on beside the shapes, here or in `gradient`."""
        return (
            logits.data_ptr() % _VECTOR_BYTES, logits.stride(), logits.dtype,
            target.stride(), target.dtype, grad_loss.stride(), grad_loss.dtype,
        )  # fmt: skip

    def __call__(
        self, logits: Tensor, target: Tensor, saved: Tensor, grad_loss: Tensor, overwrite: bool
    ) -> Tensor | None:
        call, kind = self._call, self._kind
        if self._kind_of(logits, target, grad_loss) != kind or not call.is_on_current_device():
            return None
        out = logits.detach() if overwrite else self._empty(self._shape, kind[1], kind[2])
        call.launch(out if overwrite else logits, out, target, grad_loss, saved, saved, saved)
        return out


def _gradient_call(
    logits: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    out: Tensor,
    first_column: int,
    total_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    weighted: bool,
) -> PreparedCall:
    rows, out_rows = rows_of(logits), rows_of(out)
    size = logits.element_size()
    vec = _VECTOR_BYTES // size
    layout = _common_layout(logits, rows, out, out_rows)
    tile = _fit(_GRADIENT[size], rows.columns, vec)
    tiles_per_row = -(-rows.columns // tile.block)
    overlap = _can_overlap(logits.device)
    keep = logits.numel() * size > _KEEP_FROM_CACHES * _cache_bytes(logits.device)
    _check_grid(rows.n_rows * tiles_per_row, f"the gradient of {rows.n_rows} x {rows.columns} logits")
    return PreparedCall(
        kernels.gradient_kernel,
        rows.n_rows * tiles_per_row,
        logits.device,
        (
            logits.dtype, target.dtype, grad_loss.dtype,
            logits.data_ptr() % _VECTOR_BYTES == 0, out.data_ptr() % _VECTOR_BYTES == 0,
        ),
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
            label_smoothing > 0, z_loss_weight != 0, weighted, keep, overlap,
        ),
        tile.warps,
        leads=((0, layout.lead), (1, layout.lead)),
        overlap=overlap,
    )  # fmt: skip
