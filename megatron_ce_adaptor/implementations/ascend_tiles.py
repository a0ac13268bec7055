"""Columns of a tile of the Ascend kernels.

Every width here is compiled for the 910B3 by `megatron-ce npu-check`, with three versions of the compiler, in
CI. Among those that fit they were chosen by its estimate of the cost of a row, not measured on a device.
"""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """What of a call decides the tiles: constants of the kernels."""

    smooth: bool = False
    statistics: bool = False
    weighted: bool = False
    strided: bool = False


# The widest that three compilers place in the 192 KiB of local memory with two buffers for each load:
_WIDEST_STATISTICS = 16384  # max and sum alone: 32 KiB a load, two loops, one fp32 tile
_WIDEST_WITH_SUM = 8192  # one more tile for the sum of x, or for exp * (x - max)
_WIDEST_FP32_WITH_MORE = 4096  # fp32 logits, their sum, and weights or statistics: 8192 is 32 bytes too wide
_WIDEST_GRADIENT = 8192  # a load, a store, four fp32 tiles; 16384 is too wide for 16-bit logits
# Where consecutive columns are no neighbours, each element takes 32 bytes, the unit of a copy.
STRIDED = 512
# Rows that are merged at once: up to 22 fp32 tiles are alive.
MERGE_ROWS = 1024

# A row ends in two partly filled tiles (one in backward), each of which costs as much as a whole one, and
# every tile costs some waits: (columns up to, width).
STATISTICS_WIDTHS = ((1536, 1024), (4096, 2048), (16384, 4096), (65536, 8192))
GRADIENT_WIDTHS = ((1024, 1024), (2048, 2048), (4096, 4096))

# Short rows share a tile of so many elements, 16 x 256 to 2 x 2048: the least power of two of columns that
# holds a row. In backward, sharing no longer pays beyond 1024 columns.
_SHORT_ELEMENTS, _LEAST_SHORT = 4096, 256
MOST_SHORT_STATISTICS, MOST_SHORT_GRADIENT = 2048, 1024


class ShortTile(NamedTuple):
    """Rows and columns of a tile that holds whole rows."""

    rows: int
    columns: int


def short_tile(columns: int) -> ShortTile:
    """The tile of the kernels for short rows, of at most MOST_SHORT_STATISTICS columns."""
    width = max(1 << max(columns - 1, 0).bit_length(), _LEAST_SHORT)
    return ShortTile(_SHORT_ELEMENTS // width, width)


def statistics_tile(columns: int, itemsize: int, options: Options) -> int:
    """Columns of a tile of `row_statistics_kernel`, for rows of `columns` logits of `itemsize` bytes."""
    if options.strided:
        return STRIDED
    widest = _WIDEST_STATISTICS
    if options.smooth or options.statistics:
        more = options.smooth and (options.statistics or options.weighted)
        widest = _WIDEST_FP32_WITH_MORE if more and itemsize == 4 else _WIDEST_WITH_SUM
    return min(_width(columns, STATISTICS_WIDTHS, widest), widest)


def gradient_tile(columns: int, options: Options) -> int:
    """Columns of a tile of `gradient_kernel`."""
    return STRIDED if options.strided else _width(columns, GRADIENT_WIDTHS, _WIDEST_GRADIENT)


def _width(columns: int, widths: tuple[tuple[int, int], ...], widest: int) -> int:
    return next((width for most, width in widths if columns <= most), widest)
