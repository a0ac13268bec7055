"""Walks the tokens in chunks: output layer, loss and gradients of a chunk, in one buffer of logits.

Plain tensors and no autograd. Shapes: N tokens, H hidden size, C columns (this rank's part of the
vocabulary).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ce_adaptor import dispatch
from megatron_ce_adaptor.dispatch import Terms
from megatron_ce_adaptor.implementations.class_weights import ClassWeights
from megatron_ce_adaptor.implementations.dtypes import accumulation_dtype


@dataclasses.dataclass(frozen=True)
class OutputLayer:
    """The output layer and the loss on its logits.

    Attributes:
        weight: [C, H], in the dtype of the matrix products, which is the logits'.
        bias: [C], same dtype, or None.
        module: the implementation of the loss (`implementations.choose`).
        class_weight: [V] of the whole vocabulary, or None.
        chunk_tokens: tokens of a chunk; the last one may have fewer.
        checked: called once, after the first chunk's collective (see `cross_entropy`), to look at the labels.
    """

    weight: Tensor
    bias: Tensor | None
    module: ModuleType
    terms: Terms
    class_weight: Tensor | None
    chunk_tokens: int
    checked: Callable[[], None] | None = None


class Losses(NamedTuple):
    """Of each token, in the accumulation dtype: loss [N]; saved [3, N] for the gradient, None where nobody
    will ask for it; statistics [4, N] or None (see `reference.merge`)."""

    loss: Tensor
    saved: Tensor | None
    statistics: Tensor | None


class Gradients:
    """Buffers that the chunks' gradients go to; each is None where nobody wants that gradient.

    Attributes:
        hidden: [N, H], every row is written once.
        weight: [C, H], added to by every chunk.
        bias: [C], added to by every chunk.
        accumulate: the weight's and the bias's buffers hold something already, to which is added
            (Megatron's main_grad); else their content is overwritten by the first chunk.
    """

    def __init__(
        self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None, accumulate: bool = False
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self._add_weight = self._add_bias = accumulate

    def accumulate_weight(self, buffer: Tensor) -> None:
        """Lets the weight's gradient be added to what `buffer` holds, whatever becomes of the bias's."""
        self.weight, self._add_weight = buffer, True

    def take(self, d_logits: Tensor, hidden: Tensor, weight: Tensor, rows: slice) -> None:
        """The gradients from d_logits [n, C] of the chunk `rows`, hidden [n, H]."""
        if self.hidden is not None:
            multiply_into(self.hidden[rows], d_logits, weight, add=False)
        if self.weight is not None:
            multiply_into(self.weight, d_logits.t(), hidden, add=self._add_weight)
        if self.bias is not None:
            total = d_logits.sum(0, dtype=self.bias.dtype)
            self.bias.add_(total) if self._add_bias else self.bias.copy_(total)
        self._add_weight = self._add_bias = True

    def finish(self) -> None:
        """With no token at all, nothing was written yet."""
        for buffer, added in ((self.weight, self._add_weight), (self.bias, self._add_bias)):
            if buffer is not None and not added:
                buffer.zero_()
        self._add_weight = self._add_bias = True


def losses(hidden: Tensor, labels: Tensor, layer: OutputLayer, *, statistics: bool, save: bool) -> Losses:
    """Losses alone: one matrix product."""
    return _walk(hidden, labels, layer, statistics, save, None, None)


def losses_and_gradients(
    hidden: Tensor,
    labels: Tensor,
    layer: OutputLayer,
    upstream: Tensor,
    gradients: Gradients,
    *,
    statistics: bool,
    save: bool = False,
) -> Losses:
    """Losses, and the gradients of sum(upstream * loss), for an upstream gradient [N] that is known before
    the losses are: three matrix products."""
    found = _walk(hidden, labels, layer, statistics, save, upstream, gradients)
    gradients.finish()
    return found


def recomputed_gradients(
    hidden: Tensor,
    labels: Tensor,
    layer: OutputLayer,
    saved: Tensor,
    upstream: Tensor,
    gradients: Gradients,
) -> None:
    """The gradients of sum(upstream * loss) after `losses`: three matrix products, one of them again."""
    for logits, chunk, rows in _logits(hidden, layer):
        of_chunk = labels[rows]
        dispatch.backward_pass(
            layer.module,
            logits,
            of_chunk,
            saved[:, rows].contiguous(),
            upstream[rows],
            logits,
            layer.terms,
            _weights(layer, of_chunk, saved.dtype),
        )
        gradients.take(logits, chunk, layer.weight, rows)
    gradients.finish()


def _walk(
    hidden: Tensor,
    labels: Tensor,
    layer: OutputLayer,
    statistics: bool,
    save: bool,
    upstream: Tensor | None,
    gradients: Gradients | None,
) -> Losses:
    n, dtype = hidden.shape[0], accumulation_dtype(hidden)
    loss = hidden.new_empty(n, dtype=dtype)
    kept = hidden.new_empty(3, n, dtype=dtype) if save else None
    stats = hidden.new_empty(4, n, dtype=dtype) if statistics else None
    look = layer.checked
    for logits, chunk, rows in _logits(hidden, layer):
        of_chunk = labels[rows]
        weights = _weights(layer, of_chunk, dtype)
        found, saved, about = dispatch.forward_pass(
            layer.module, logits, of_chunk, layer.terms, weights, statistics
        )
        if look is not None:
            look()
            look = None
        loss[rows] = found
        if kept is not None:
            kept[:, rows] = saved
        if stats is not None and about is not None:
            stats[:, rows] = about
        if gradients is not None:
            assert upstream is not None
            dispatch.backward_pass(
                layer.module, logits, of_chunk, saved, upstream[rows], logits, layer.terms, weights
            )
            gradients.take(logits, chunk, layer.weight, rows)
    return Losses(loss, kept, stats)


def _logits(hidden: Tensor, layer: OutputLayer) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """(logits [n, C], hidden [n, H], rows) of each chunk; the logits' memory is the next chunk's."""
    n, step = hidden.shape[0], layer.chunk_tokens
    buffer = hidden.new_empty(min(step, n), layer.weight.shape[0])
    transposed = layer.weight.t()
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        chunk = hidden[rows]
        logits = buffer[: chunk.shape[0]]
        if layer.bias is None:
            torch.mm(chunk, transposed, out=logits)
        else:
            torch.addmm(layer.bias, chunk, transposed, out=logits)
        yield logits, chunk, rows


def _weights(layer: OutputLayer, labels: Tensor, dtype: torch.dtype) -> ClassWeights | None:
    if layer.class_weight is None:
        return None
    shard = layer.terms.shard
    return ClassWeights.of(layer.class_weight, labels, shard.first_column, shard.columns, dtype)


# since torch 2.8: a product of 16-bit matrices is written (or added) to an fp32 one without a rounding
_PRODUCTS_IN_FP32 = "dtype_out" in torch.ops.aten.addmm.overloads()


def multiply_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """out (+)= a @ b.

    `out` may be of a wider dtype than a and b. The product is then not rounded before it is added on CUDA
    devices; elsewhere it is, once (a chunk).
    """
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.device.type == "cuda" and out.dtype == torch.float32 and _PRODUCTS_IN_FP32:
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        product = torch.mm(a, b)
        out.add_(product) if add else out.copy_(product)
