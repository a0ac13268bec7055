"""Launches the Triton kernels for Ascend NPUs: grids, buffers, layouts. Signatures as in `reference`."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_ce_adaptor.implementations import ascend_kernels as kernels
from megatron_ce_adaptor.implementations import ascend_tiles as tiles
from megatron_ce_adaptor.implementations.class_weights import ClassWeights
from megatron_ce_adaptor.implementations.memo import Memo
from megatron_ce_adaptor.implementations.rows import Rows, rows_of

HEADER: int = kernels.HEADER.value
INTERPRETED: bool = not isinstance(kernels.merge_kernel, triton.runtime.JITFunction)
NAME = "ascend (interpreter)" if INTERPRETED else "ascend"
READS_ADDRESSES = True

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Integers from here on are not exact in fp32, in which `merge_kernel` compares labels.
_MOST_COLUMNS = 2**24
# Programs in the interpreter: as many as a 910B3 has vector cores, so that programs loop over rows there too.
_CORES_OF_910B3 = 40


@functools.cache
def vector_cores(device: torch.device) -> int:
    """How many programs of a kernel run at once: the most a grid is given."""
    if device.type == "cpu":
        return _CORES_OF_910B3
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["num_vectorcore"])


def _launch(kernel: Any, device: torch.device, work: int, *arguments: Any) -> None:
    """Runs `kernel` over `work` rows or blocks of rows, on the tensors' device and its current stream."""
    grid = (max(1, min(work, vector_cores(device))),)
    on_device = contextlib.nullcontext()
    if device.type != "cpu":
        on_device = torch.get_device_module(device).device(device)
    with on_device:
        kernel[grid](*arguments)


def _check(logits: Tensor, total_columns: int) -> None:
    if logits.dtype not in _DTYPES:
        raise TypeError(
            f"the Ascend kernels got {logits.dtype} logits, expected float16, bfloat16 or float32: an NPU's "
            "vector unit has no fp64. Convert them, or set MCE_IMPLEMENTATION=reference."
        )
    if total_columns >= _MOST_COLUMNS:
        raise ValueError(
            f"the vocabulary has {total_columns} columns, the Ascend kernels take less than {_MOST_COLUMNS}: "
            "set MCE_IMPLEMENTATION=reference."
        )


def _dense(vector: Tensor) -> Tensor:
    """[N] with unit stride: kernels read small vectors as blocks, or by the number of the row."""
    return vector if vector.numel() < 2 or vector.stride(0) == 1 else vector.contiguous()


def _layout(rows: Rows) -> tuple[int, int, int, int]:
    return rows.inner, rows.outer_stride, rows.inner_stride, rows.column_stride


def _is_strided(rows: Rows) -> bool:
    """Consecutive columns are no neighbours: slow, but without a copy of the logits."""
    if rows.column_stride == 1 or rows.columns == 1:
        return False
    if abs(rows.column_stride) * tiles.STRIDED >= 2**31:  # offsets within a tile are 32-bit vectors
        raise ValueError(
            f"the logits' columns are {rows.column_stride} elements apart, the Ascend kernels reach "
            f"{2**31 // tiles.STRIDED - 1}: pass logits.contiguous()."
        )
    return True


def _share_tiles(rows: Rows) -> bool:
    """Several rows can be one tile: one stride leads from each to the next, and reaches all rows of a tile
    within 32 bits, since those offsets are vectors.
    """
    reach = abs(rows.inner_stride) * tiles.short_tile(0).rows + rows.columns
    return not rows.two_level and not _is_strided(rows) and reach < 2**31


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
    _check(logits, first_column + logits.shape[-1])
    rows = rows_of(logits)
    payload = torch.empty(
        (3 + smooth + statistics) * rows.n_rows + HEADER, dtype=torch.float32, device=logits.device
    )
    options = tiles.Options(smooth, statistics, smooth and weights is not None, _is_strided(rows))
    column_weights = payload if weights is None else weights.columns
    size = float(rows.columns // 65536), float(rows.columns % 65536)
    if rows.columns <= tiles.MOST_SHORT_STATISTICS and _share_tiles(rows):
        tile = tiles.short_tile(rows.columns)
        _launch(
            kernels.short_row_statistics_kernel, logits.device, -(-rows.n_rows // tile.rows),
            logits, _dense(target), payload, column_weights,
            rows.inner_stride, rows.n_rows, rows.columns, float(first_column), *size,
            *tile, smooth, statistics, options.weighted,
        )  # fmt: skip
        return payload
    _launch(
        kernels.row_statistics_kernel, logits.device, rows.n_rows,
        logits, _dense(target), payload, column_weights,
        *_layout(rows), rows.n_rows, rows.columns, first_column, ignore_index, *size,
        tiles.statistics_tile(rows.columns, logits.element_size(), options), rows.two_level, options.strided,
        smooth, statistics, options.weighted,
    )  # fmt: skip
    return payload


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
    """See `reference.merge`. Labels are compared as fp32: where ignore_index is beyond 2^24, a label that is
    no class and rounds to the same fp32 number counts as ignored too.
    """
    _check(gathered, total_columns)
    n = target.numel()
    loss = torch.empty(n, dtype=torch.float32, device=target.device)
    saved = torch.empty(3, n, dtype=torch.float32, device=target.device)
    stats = torch.empty(4, n, dtype=torch.float32, device=target.device) if statistics else None
    if n == 0:
        return loss, saved, stats
    _launch(
        kernels.merge_kernel, gathered.device, -(-n // tiles.MERGE_ROWS),
        gathered, _dense(target), loss, saved, saved if stats is None else stats,
        saved if weights is None else weights.rows,
        n, float(total_columns), float(ignore_index), label_smoothing, z_loss_weight,
        gathered.shape[0], tiles.MERGE_ROWS,
        label_smoothing > 0, z_loss_weight != 0, statistics, equal_shards, weights is not None,
    )  # fmt: skip
    return loss, saved, stats


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
    """See `reference.forward`; `merge` is a kernel of its own here too: it computes on vectors of rows what
    would take a vector instruction for each row otherwise.
    """
    _check(logits, total_columns)
    payload = row_statistics(
        logits,
        target,
        first_column=0,
        ignore_index=ignore_index,
        smooth=label_smoothing > 0,
        statistics=statistics,
        weights=weights,
    )
    return merge(
        payload[None],
        target,
        total_columns=total_columns,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
        statistics=statistics,
        equal_shards=False,
        weights=weights,
    )


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
    rows, out_rows = rows_of(logits), rows_of(out)
    strided, out_strided = _is_strided(rows), _is_strided(out_rows)
    smooth, z_loss = label_smoothing > 0, z_loss_weight != 0
    column_weights, row_weights = (saved, saved) if weights is None else weights
    factors = (
        label_smoothing, 1.0 - label_smoothing, label_smoothing / total_columns, 1.0 / total_columns,
        2.0 * z_loss_weight,
    )  # fmt: skip
    if rows.columns <= tiles.MOST_SHORT_GRADIENT and _share_tiles(rows) and _share_tiles(out_rows):
        short = tiles.short_tile(rows.columns)
        _launch(
            kernels.short_row_gradient_kernel, logits.device, -(-rows.n_rows // short.rows),
            logits, out, _dense(target), _dense(grad_loss), saved, column_weights, row_weights,
            rows.inner_stride, out_rows.inner_stride, rows.n_rows, rows.columns,
            float(first_column), float(ignore_index), *factors,
            *short, smooth, z_loss, weights is not None,
        )  # fmt: skip
        return
    tile = tiles.gradient_tile(rows.columns, tiles.Options(strided=strided or out_strided))
    _launch(
        kernels.gradient_kernel, logits.device, rows.n_rows,
        logits, out, _dense(target), _dense(grad_loss), saved, column_weights, row_weights,
        *_layout(rows), *_layout(out_rows), rows.n_rows, rows.columns, first_column, ignore_index, *factors,
        tile, rows.two_level, out_rows.two_level, strided, out_strided,
        smooth, z_loss, weights is not None,
    )  # fmt: skip
