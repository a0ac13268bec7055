"""The 1500 accuracy cases and the 1500 speed shapes: fixed lists, the same on every machine."""

from __future__ import annotations

import dataclasses
import itertools
import random

COUNT = 1500
_SEED = 20261101

DTYPES = ("bf16", "fp16", "fp32", "fp64")
LAYOUTS = ("nv", "sbv", "bsv")
STRIDES = ("contiguous", "padded", "odd padded", "transposed", "shifted")
IGNORED = ("none", "some", "all")
SMOOTHINGS = (0.0, 0.1)
# few different numbers of columns, chosen at the edges of vectors and tiles, because each compiles kernels
COLUMNS = (1, 7, 129, 1000, 1024, 4096, 4099, 8200, 32000, 50257)
ROWS = (1, 3, 16, 63, 200)


@dataclasses.dataclass(frozen=True)
class AccuracyCase:
    """One call. `strides`: how the logits lie in memory; `ignored`: which labels are ignore_idx."""

    number: int
    dtype: str
    reduce_loss: bool
    layout: str
    label_smoothing: float
    ignored: str
    strides: str
    rows: int
    columns: int
    overwrite_input: bool
    target_dtype: str
    scale: float  # standard deviation of the logits

    @property
    def text(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if f.name != "number"]
        return ", ".join(parts)


def accuracy_cases(count: int = COUNT) -> list[AccuracyCase]:
    """`count` cases spread over the whole list of COUNT, each option with each other many times over.

    Every combination of dtype, reduction, smoothing, ignored labels and layout comes with several strides and
    shapes.
    """
    generator = random.Random(_SEED)
    outer = list(itertools.product(DTYPES, (False, True), SMOOTHINGS, IGNORED, LAYOUTS))
    shapes = list(itertools.product(STRIDES, ROWS, COLUMNS))
    generator.shuffle(shapes)
    made: list[AccuracyCase] = []
    seen: set[tuple[object, ...]] = set()
    position = 0
    while len(made) < COUNT:
        dtype, reduce_loss, smoothing, ignored, layout = outer[position % len(outer)]
        strides, rows, columns = shapes[(position * 7 + position // len(outer)) % len(shapes)]
        position += 1
        if layout == "nv" and strides == "transposed":
            strides = "padded"
        key = (dtype, reduce_loss, smoothing, ignored, layout, strides, rows, columns)
        if key in seen:
            continue
        seen.add(key)
        made.append(
            AccuracyCase(
                number=len(made),
                dtype=dtype,
                reduce_loss=reduce_loss,
                layout=layout,
                label_smoothing=smoothing,
                ignored=ignored,
                strides=strides,
                rows=rows,
                columns=columns,
                overwrite_input=generator.random() < 0.3,
                target_dtype=generator.choice(("int64", "int64", "int32")),
                scale=generator.choice((1.0, 1.0, 5.0)),
            )
        )
    return _spread(made, count)


@dataclasses.dataclass(frozen=True)
class SpeedShape:
    number: int
    dtype: str
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def text(self) -> str:
        return f"{self.rows}x{self.columns} {self.dtype}"


_VOCABULARIES = (32000, 32001, 32064, 49152, 50257, 50304, 64128, 100352, 128256, 129280, 151936)


def speed_shapes(count: int = COUNT, most_elements: int = 2**30) -> list[SpeedShape]:
    """`count` different shapes: half with vocabularies that models have, half with any number of columns."""
    generator = random.Random(_SEED + 1)
    made: list[SpeedShape] = []
    seen: set[tuple[str, int, int]] = set()
    while len(made) < COUNT:
        dtype = ("bf16", "bf16", "fp32", "fp16")[len(made) % 4]
        rows = round(2 ** generator.uniform(5, 14))
        if len(made) % 2:
            rows = max(32, rows // 32 * 32)
            columns = generator.choice(_VOCABULARIES)
        else:
            columns = round(2 ** generator.uniform(10, 17))
            if len(made) % 8:
                columns = columns // 64 * 64
        key = (dtype, rows, columns)
        if key in seen or rows * columns > 2**30:
            continue
        seen.add(key)
        made.append(SpeedShape(len(made), *key))
    return _spread([s for s in made if s.elements <= most_elements], count)


def _spread(items: list, count: int) -> list:
    """`count` of them, evenly over the list (all if there are no more)."""
    if count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]
