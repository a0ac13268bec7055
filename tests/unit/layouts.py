"""Logits, labels and upstream gradients in the memory layouts that people hand to a loss.

A logits layout is a pair: the shape of the parent tensor, and the view of it that is the logits. The
parent is larger than the view in most of them, and its other elements must never be written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    parent_shape: Callable[[int], tuple[int, ...]]
    view: Callable[[Tensor], Tensor]
    overlapping: bool = False


LAYOUTS: dict[str, Layout] = {
    "matrix": Layout(lambda v: (6, v), lambda x: x),
    "batch_first": Layout(lambda v: (2, 3, v), lambda x: x),
    "sequence_first": Layout(lambda v: (2, 3, v), lambda x: x.transpose(0, 1)),
    "all_but_last_position": Layout(lambda v: (2, 4, v), lambda x: x[:, :-1]),
    "one_position": Layout(lambda v: (3, 4, v), lambda x: x[:, 0:1]),
    "one_batch_transposed": Layout(lambda v: (1, 5, v), lambda x: x.transpose(0, 1)),
    "every_second_row": Layout(lambda v: (9, v), lambda x: x[::2]),
    "inner_rows": Layout(lambda v: (7, v), lambda x: x[1:-1]),
    "every_second_column": Layout(lambda v: (5, 2 * v), lambda x: x[:, 1::2]),
    "vocabulary_slice": Layout(lambda v: (5, v + 6), lambda x: x[:, 3:-3]),
    "vocabulary_slice_3d": Layout(lambda v: (2, 3, v + 3), lambda x: x[:, 1:, 1:-2]),
    "storage_offset": Layout(lambda v: (5 * v + 3,), lambda x: x[3:].view(5, -1)),
    "transposed_matrix": Layout(lambda v: (v, 5), lambda x: x.t()),
    "vocabulary_outermost": Layout(lambda v: (v, 2, 3), lambda x: x.permute(1, 2, 0)),
    "expanded_rows": Layout(lambda v: (1, v), lambda x: x.expand(4, -1), overlapping=True),
    "expanded_batch": Layout(lambda v: (1, 3, v), lambda x: x.expand(2, -1, -1), overlapping=True),
}

LABEL_LAYOUTS = ("int64", "int32", "shifted", "strided_int32", "flat", "expanded", "transposed")


def labels_in(layout: str, leading: tuple[int, ...], vocab: int, generator: torch.Generator) -> Tensor:
    """Random labels for rows of shape `leading`, stored in the way that `layout` names."""

    def draw(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, vocab, shape, generator=generator).to(dtype)

    if layout == "int64":
        return draw(*leading)
    if layout == "int32":
        return draw(*leading, dtype=torch.int32)
    if layout == "shifted":  # labels[:, 1:]
        return draw(*leading[:-1], leading[-1] + 1)[..., 1:]
    if layout == "strided_int32":
        return draw(*leading[:-1], 2 * leading[-1], dtype=torch.int32)[..., ::2]
    if layout == "flat":
        return draw(torch.Size(leading).numel())
    if layout == "expanded":
        return draw(*leading[:-1], 1).expand(leading)
    if layout == "transposed":
        return draw(*reversed(leading)).permute(*reversed(range(len(leading))))
    raise ValueError(layout)


UPSTREAM_LAYOUTS = ("first_is_zero", "expanded", "transposed", "strided")


def upstream_in(
    layout: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """A random gradient of the loss, stored in the way that `layout` names."""

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    if layout == "first_is_zero":  # a kernel that reads element 0 for every row returns zeros
        upstream = draw(*shape)
        upstream.view(-1)[:1] = 0.0
        return upstream
    if layout == "expanded":  # what `loss.sum().backward()` and `loss.mean().backward()` hand over
        return draw().expand(shape)
    if layout == "transposed":
        return draw(*reversed(shape)).permute(*reversed(range(len(shape))))
    if layout == "strided":
        return draw(*shape[:-1], 2 * shape[-1])[..., 1::2]
    raise ValueError(layout)
