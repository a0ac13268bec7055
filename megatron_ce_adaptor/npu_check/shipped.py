"""The kernels of this package as they are launched on an NPU: every kernel, dtype and tile, with the
constants that cost the most and the least.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ce_adaptor.implementations import ascend_tiles as tiles
from megatron_ce_adaptor.implementations.ascend_tiles import Options

MODULE = "megatron_ce_adaptor.implementations.ascend_kernels"
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
# The row whose cost is estimated, so that the numbers of all tiles can be compared.
COLUMNS = 32768


@dataclass(frozen=True)
class Case:
    """One compilation. types: as in `compiler.lower`; trips, rows: as in `cost.cost_of_row`."""

    name: str
    source: str
    kernel: str
    dtype: str
    tile: int
    types: dict[str, str]
    constants: dict[str, Any]
    trips: tuple[float, ...] = ()
    rows: int = 1
    columns: int = COLUMNS

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_POINTERS = {
    "Y": "*i64",
    **dict.fromkeys(("PAYLOAD", "GATHERED", "LOSS", "SAVED", "STATS", "G_LOSS"), "*fp32"),
}
_POINTERS |= dict.fromkeys(("COLUMN_WEIGHTS", "ROW_WEIGHTS"), "*fp32")
_INT64 = "inner_rows outer_stride inner_stride g_inner_rows g_outer_stride g_inner_stride"
_INT64 += " n_rows first_column ignore_index"
_INT32 = "column_stride g_column_stride n_cols"
_FP32 = "columns_high columns_low total_columns ignore_index_fp32 label_smoothing z_loss_weight"
_FP32 += " one_less_smoothing per_class one_class double_z_loss_weight"
_SCALARS = {n: t for names, t in ((_INT64, "i64"), (_INT32, "i32"), (_FP32, "fp32")) for n in names.split()}


def cases(every: bool = False) -> Iterator[Case]:
    """All kernels, dtypes and tiles.

    Args:
        every: with every combination of constants; otherwise, for each, with none of the options and with all
            of them, for the widest tile with each that changes the tile, and fp16, for which bf16 stands,
            with the widest tiles alone (not in those that rows share).
    """
    with_int32_labels: dict[str, Case] = {}
    for case in _with_int64_labels(every):
        yield case
        if case.dtype != "fp16" and "plain" not in case.name and "strided" not in case.name:
            with_int32_labels[case.kernel] = dataclasses.replace(
                case, name=f"{case.name} int32 labels", types={**case.types, "Y": "*i32"}
            )
    yield from with_int32_labels.values()


def _with_int64_labels(every: bool) -> Iterator[Case]:
    for dtype in DTYPES:
        yield from _unique(_statistics(dtype, every))
        yield from _unique(_gradient(dtype, every))
        yield from _short(dtype, every)
    yield from _merge(every)


def _unique(of_kernel: Iterator[Case]) -> Iterator[Case]:
    seen: set[str] = set()
    for case in of_kernel:
        if case.name not in seen:
            seen.add(case.name)
            yield case


def _types(dtype: str) -> dict[str, str]:
    return {"X": f"*{dtype}", "G_X": f"*{dtype}", **_POINTERS, **_SCALARS}


def _name(kernel: str, dtype: str, tile: int, **flags: bool) -> str:
    chosen = "+".join(flag for flag, on in flags.items() if on)
    return f"{kernel} {dtype} {tile} {chosen or 'plain'}"


def _tiles_in_use(of_columns: Any) -> list[int]:
    """Widths that a tile function returns for any row, found at the edges of the tables."""
    edges = {
        1,
        *(2**k + d for k in range(5, 25) for d in (-1, 0, 1)),
        *(e for e, _ in tiles.STATISTICS_WIDTHS),
    }
    return sorted({of_columns(c) for c in edges | {e + 1 for e in edges}})


def _statistics(dtype: str, every: bool) -> Iterator[Case]:
    for smooth, statistics, weighted, strided in itertools.product((False, True), repeat=4):
        options = Options(smooth, statistics, weighted, strided)
        if weighted and not smooth:
            continue  # the weights only enter the sum of the logits
        widths = _tiles_in_use(lambda c, o=options: tiles.statistics_tile(c, DTYPES[dtype], o))
        extreme = smooth == statistics == weighted
        for tile in widths:
            if not (every or (extreme and dtype != "fp16") or (tile == widths[-1] and not strided)):
                continue
            yield Case(
                _name("row_statistics", dtype, tile, **options._asdict()),
                MODULE, "row_statistics_kernel", dtype, tile, _types(dtype),
                {
                    "BLOCK": tile, "TWO_LEVEL": True, "STRIDED": strided,
                    "SMOOTH": smooth, "STATISTICS": statistics, "WEIGHTED": weighted,
                },
                # whole tiles of both ranges, averaged over the target's column; what is left of them
                trips=(max(COLUMNS / tile - 1.0, 0.0), 2.0),
            )  # fmt: skip


def _gradient(dtype: str, every: bool) -> Iterator[Case]:
    for smooth, z_loss, weighted, strided, g_strided in itertools.product((False, True), repeat=5):
        options = Options(smooth=smooth, weighted=weighted, strided=strided or g_strided)
        widths = _tiles_in_use(lambda c, o=options: tiles.gradient_tile(c, o))
        extreme = smooth == z_loss == weighted
        for tile in widths:
            if not (every or (extreme and dtype != "fp16") or (tile == widths[-1] and not options.strided)):
                continue
            yield Case(
                _name(
                    "gradient", dtype, tile, smooth=smooth, z_loss=z_loss, weighted=weighted,
                    strided=strided, g_strided=g_strided,
                ),
                MODULE, "gradient_kernel", dtype, tile, _types(dtype),
                {
                    "BLOCK": tile, "TWO_LEVEL": True, "G_TWO_LEVEL": True, "STRIDED": strided,
                    "G_STRIDED": g_strided, "SMOOTH": smooth, "Z_LOSS": z_loss, "WEIGHTED": weighted,
                },
                # whole tiles of a live row; the tiles of an ignored one
                trips=(COLUMNS / tile, COLUMNS / tile),
            )  # fmt: skip


def _short(dtype: str, every: bool) -> Iterator[Case]:
    widths = sorted({tiles.short_tile(2**k) for k in range(12) if 2**k <= tiles.MOST_SHORT_STATISTICS})
    types = {**_types(dtype), "first_column": "fp32", "inner_stride": "i32", "g_inner_stride": "i32"}
    for kernel, most in (
        ("statistics", tiles.MOST_SHORT_STATISTICS),
        ("gradient", tiles.MOST_SHORT_GRADIENT),
    ):
        names = ("SMOOTH", "STATISTICS" if kernel == "statistics" else "Z_LOSS", "WEIGHTED")
        for flags, tile in itertools.product(itertools.product((False, True), repeat=3), widths):
            wanted = every or (len(set(flags)) == 1 and dtype != "fp16")
            if not wanted or tile.columns > most or (kernel == "statistics" and flags[2] and not flags[0]):
                continue
            constants = dict(zip(names, flags, strict=True))
            flagged = {name.lower(): on for name, on in constants.items()}
            yield Case(
                _name(f"short_row_{kernel} of {tile.rows}", dtype, tile.columns, **flagged),
                MODULE, f"short_row_{kernel}_kernel", dtype, tile.columns, types,
                {"ROWS": tile.rows, "BLOCK": tile.columns, **constants},
                rows=tile.rows,
                columns=tile.columns,
            )  # fmt: skip


def _merge(every: bool) -> Iterator[Case]:
    names = ("SMOOTH", "Z_LOSS", "STATISTICS", "EQUAL_SHARDS", "WEIGHTED")
    for flags in itertools.product((False, True), repeat=len(names)):
        if not (every or sum(flags) in (0, 1, len(flags))):
            continue
        constants = dict(zip(names, flags, strict=True))
        for world in (1, 8) if every else (8,):
            flagged = {name.lower(): on for name, on in constants.items()}
            yield Case(
                _name(f"merge of {world}", "fp32", tiles.MERGE_ROWS, **flagged),
                MODULE, "merge_kernel", "fp32", tiles.MERGE_ROWS, _types("fp32"),
                {"WORLD": world, "BLOCK": tiles.MERGE_ROWS, **constants},
                trips=(float(world), float(world)),
                rows=tiles.MERGE_ROWS,
                columns=0,
            )  # fmt: skip
