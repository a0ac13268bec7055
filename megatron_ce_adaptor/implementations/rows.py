"""How the rows of a 2-D or 3-D logits tensor lie in memory, so that no layout ever needs a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """Row r = (r // inner, r % inner) starts at element (r // inner) * outer_stride + (r % inner) *
    inner_stride.
    """

    n_rows: int
    columns: int
    inner: int
    outer_stride: int
    inner_stride: int
    column_stride: int

    @property
    def two_level(self) -> bool:
        """True when the two leading dimensions do not collapse into one stride."""
        return self.inner < self.n_rows


def rows_of(logits: torch.Tensor) -> Rows:
    """Describes logits of shape [N, C] or [A, B, C] as N (= A * B) rows of C columns."""
    if logits.dim() == 2:
        n, columns = logits.shape
        return Rows(n, columns, max(n, 1), 0, logits.stride(0), logits.stride(1))
    a, b, columns = logits.shape
    outer, inner, column_stride = logits.stride()
    if a == 1 or b == 1 or outer == b * inner:
        # One stride reaches every row. With b == 1 it is the outer one (the inner stride of a size-1
        # dimension is arbitrary).
        return Rows(a * b, columns, max(a * b, 1), 0, outer if b == 1 else inner, column_stride)
    return Rows(a * b, columns, b, outer, inner, column_stride)


def matrices_of(*tensors: torch.Tensor) -> Iterator[tuple[tuple[torch.Tensor, ...], slice]]:
    """Views of tensors of one shape as [rows, C] matrices, each with the slice of row numbers they cover."""
    first = tensors[0]
    described = [rows_of(t) for t in tensors]
    if first.dim() == 2:
        yield tensors, slice(None)
    elif not any(rows.two_level for rows in described):
        yield (
            tuple(
                t.as_strided((rows.n_rows, rows.columns), (rows.inner_stride, rows.column_stride))
                for t, rows in zip(tensors, described, strict=True)
            ),
            slice(None),
        )
    elif first.shape[0] <= first.shape[1]:
        for i in range(first.shape[0]):
            yield tuple(t[i] for t in tensors), slice(i * first.shape[1], (i + 1) * first.shape[1])
    else:
        for j in range(first.shape[1]):
            yield tuple(t[:, j] for t in tensors), slice(j, None, first.shape[1])


def empty_gradient(logits: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor for the gradient of these logits: their shape, dtype and device.

    Its rows lie relative to 16-byte boundaries as the logits' do, so that one vectorised kernel reads the one
    and writes the other, unless that would cost more than an eighth of the memory.
    """
    itemsize = logits.element_size()
    lead = logits.data_ptr() % 16 // itemsize
    if (lead == 0 and logits.is_contiguous()) or logits.numel() == 0:
        return torch.empty_like(logits)
    shape, strides = logits.shape, logits.stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if has_overlapping_elements(logits) or extent > logits.numel() + logits.numel() // 8 + 16:
        return torch.empty_like(logits)
    buffer = torch.empty(extent + lead, dtype=logits.dtype, device=logits.device)
    return buffer.as_strided(shape, strides, lead)


def has_overlapping_elements(tensor: torch.Tensor) -> bool:
    """True if two elements may share memory (an expanded tensor): such a tensor cannot be overwritten."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
