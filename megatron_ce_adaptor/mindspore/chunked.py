"""`ChunkedLossWrapper`: the output layer and `CrossEntropyLoss`, chunk by chunk over the tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, nn, ops
from mindspore.common._grad_function import _Function

from megatron_ce_adaptor.mindspore import rows, runtime
from megatron_ce_adaptor.mindspore.cross_entropy import (
    CrossEntropyStatistics,
    check_dtypes,
    forward_pass,
    labels_are_checked,
    refuse_unknown_labels,
    terms_of,
)
from megatron_ce_adaptor.mindspore.layout import is_dtensor
from megatron_ce_adaptor.mindspore.losses import CrossEntropyLoss, LossAndMetrics, valid_token_count
from megatron_ce_adaptor.mindspore.vocab_shard import VocabShard

__all__ = ["ChunkedLossWrapper"]


class ChunkedLossWrapper:
    """`loss(lm_head(hidden), labels)` without ever holding the logits of more than a chunk of the tokens.

    ```python
    criterion = ChunkedLossWrapper(CrossEntropyLoss(bare=True), num_chunks=4).set_lm_head(model.lm_head)
    grad_fn = ms.value_and_grad(lambda ids: criterion(model(ids), labels, n), None, model.trainable_params())
    ```

    Loss, metrics and gradients are those of the unchunked call. All gradients are computed in the forward
    pass, in each chunk: logits, loss, gradient of the logits, and its products with hidden and weight: three
    matrix products, as without chunks. Backward multiplies them by the upstream scale. In between they are
    held: as many bytes as hidden and lm_head's parameters. Gradients that no gradient function could ask for
    are not computed.

    lm_head is a `mindspore.nn.Dense` without activation or a `mindspore.mint.nn.Linear`: the whole layer, or
    this rank's shard of the vocabulary with `CrossEntropyLoss(tp_group=...)`.

    Collectives: for each chunk one all_gather of 3 to 5 numbers a token if the vocabulary is split, in
    forward; and in backward one all_reduce of hidden's gradient, once a call, with
    `reduce_hidden_gradient=True`.

    Args:
        loss: computes the loss of each token; its `bare` is this object's.
        num_chunks: into how many chunks of nearly the same number of tokens, at most one for each token; the
            last may be smaller.
        accumulation_dtype: mindspore.float32 to add up the parameters' gradients over the chunks in fp32 and
            to round them once; None: in their own dtype (fp16: always in fp32).
        reduce_hidden_gradient: only for shards of a split vocabulary, where it must be said: True to add
            hidden's gradient up over tp_group, False if an operator before lm_head does.

    Raises (when called): what `CrossEntropyLoss` raises; TypeError and ValueError, with a sentence, for
        tensors that do not fit together or an lm_head that cannot be chunked; RuntimeError without lm_head
        and for second derivatives.
    """

    def __init__(
        self,
        loss: CrossEntropyLoss,
        num_chunks: int = 8,
        *,
        accumulation_dtype: Any = None,
        reduce_hidden_gradient: bool | None = None,
    ) -> None:
        if not isinstance(loss, CrossEntropyLoss):
            raise TypeError(
                f"loss is a {type(loss).__name__}, expected megatron_ce_adaptor.mindspore.CrossEntropyLoss: "
                f"the "
                "chunks' gradients are computed by its own formulas."
            )
        if isinstance(num_chunks, bool) or not isinstance(num_chunks, int):
            raise TypeError(f"num_chunks is {num_chunks!r}, expected an int.")
        if num_chunks < 1:
            raise ValueError(f"num_chunks is {num_chunks}, expected at least 1.")
        if accumulation_dtype not in (None, ms.float32):
            raise ValueError(
                f"accumulation_dtype is {accumulation_dtype}, expected mindspore.float32 or None."
            )
        self.loss = loss
        self.num_chunks = num_chunks
        self.accumulation_dtype = accumulation_dtype
        self.reduce_hidden_gradient = reduce_hidden_gradient
        self._head: Any = None
        self._weight: Tensor | None = None

    def set_lm_head(self, lm_head: Any, weight: Tensor | None = None) -> ChunkedLossWrapper:
        """Sets the output layer; returns this object.

        Args:
            weight: used in place of lm_head.weight (tied embeddings).

        Raises:
            TypeError, ValueError: a layer that computes something else than hidden @ weight.T + bias.
        """
        _check_head(lm_head)
        self._head, self._weight = lm_head, weight
        return self

    def __call__(
        self, hidden: Tensor, labels: Tensor, global_valid_tokens: Tensor | float | None = None
    ) -> LossAndMetrics | Tensor:
        """The loss, with its metrics unless `loss.bare`.

        Args:
            hidden: [..., H], what lm_head would be called with.
            labels: class ids, int32 or int64, of hidden's shape without H.
            global_valid_tokens: as for `CrossEntropyLoss`.
        """
        if self._head is None:
            raise RuntimeError("there is no lm_head yet: call set_lm_head(model.lm_head) first.")
        weight = self._head.weight if self._weight is None else self._weight
        bias = getattr(self._head, "bias", None)
        _check_tensors(hidden, weight, bias, labels)
        terms = self.loss
        shard = self._shard(weight)
        if terms.weight is not None:
            shard = shard.with_class_weight(terms.weight)
        flat = labels.reshape(-1)
        tokens = flat.shape[0]
        count = valid_token_count(global_valid_tokens, hidden)
        call = _Call(
            shard,
            terms,
            max(1, -(-tokens // self.num_chunks)),
            1.0 if count is None else 1.0 / count,
            self.accumulation_dtype,
            bool(self.reduce_hidden_gradient),
        )
        found = _GradientsInForward.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, flat, call)
        if labels_are_checked(hidden) and tokens:
            refuse_unknown_labels(labels, shard.total_columns, terms.ignore_index)
        if not terms.report_metrics:
            return found if terms.bare else (found, {})
        total, lse, target_log_prob, entropy, correct = found
        if terms.bare:
            return total
        statistics = CrossEntropyStatistics(lse, target_log_prob, entropy, correct != 0)
        return total, terms.metrics_of(statistics, flat, count)

    def _shard(self, weight: Tensor) -> VocabShard:
        group, total = self.loss.tp_group, self.loss.global_vocab_size
        if total is None:
            shard = VocabShard.of_equal_shards(group, weight.shape[0])
        else:
            shard = VocabShard.of_chunks(group, weight.shape[0], total)
        if shard.group is not None and self.reduce_hidden_gradient is None:
            raise ValueError(
                f"lm_head is a plain layer whose vocabulary is split over {shard.world_size} ranks: say "
                "ChunkedLossWrapper(..., reduce_hidden_gradient=True) to add the hidden states' gradient up "
                "over "
                "tp_group, or False if something before lm_head already does."
            )
        return shard


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments that are no tensors, as one object that autograd does not look into."""

    shard: VocabShard
    loss: CrossEntropyLoss
    chunk_tokens: int
    token_weight: Any
    accumulation_dtype: Any
    reduce_hidden: bool

    def factor(self, dtype: Any) -> Any:
        """What each token's loss is multiplied by."""
        weight = self.token_weight
        return weight if isinstance(weight, Tensor) else runtime.number(weight, dtype)


class _Gradients:
    """The gradients by hidden (a piece for each chunk), weight and bias; each None where nobody wants it."""

    def __init__(self, wanted: tuple[bool, bool, bool], dtype: Any) -> None:
        self.wanted = wanted
        self.dtype = dtype
        self.hidden: list[Tensor] = []
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def take(self, d_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        if self.wanted[0]:
            self.hidden.append(runtime.matrix(d_logits, weight))
        if self.wanted[1]:
            product = runtime.matrix(d_logits, hidden, transpose_a=True, dtype=self.dtype)
            self.weight = product if self.weight is None else self.weight.add_(product)
        if self.wanted[2]:
            total = d_logits.astype(runtime.accumulation_dtype(d_logits)).sum(0).astype(self.dtype)
            self.bias = total if self.bias is None else self.bias.add_(total)

    def of_hidden(self) -> Tensor | None:
        """[N, H], None where nobody wants it or there is no token."""
        return runtime.concatenated(self.hidden) if self.hidden else None


class _GradientsInForward(_Function):  # type: ignore[misc, unused-ignore]
    """Hidden [N, H], weight [C, H], bias [C] or None, labels [N] and a `_Call` to the total, 0-d, or (total,
    four statistics [N])."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call
    ) -> Any:
        wanted = (
            runtime.is_wanted(ctx, 0),
            runtime.is_wanted(ctx, 1),
            bias is not None and runtime.is_wanted(ctx, 2),
        )
        wide = ms.float32 if hidden.dtype == ms.float16 else call.accumulation_dtype or hidden.dtype
        gradients = _Gradients(wanted, wide)
        losses, statistics = _walk(hidden, weight, bias, labels, call, gradients)
        ctx.call, ctx.gradients = call, gradients
        ctx.like = (hidden, weight, bias)
        acc = runtime.accumulation_dtype(hidden)
        total = (runtime.concatenated(losses) if losses else mint.zeros((1,), dtype=acc)).sum()
        total = total * call.factor(acc)
        if not call.loss.report_metrics:
            return total
        if not losses:
            statistics = [[mint.zeros((0,), dtype=acc)]] * 4
        kinds = tuple(runtime.concatenated(kind) for kind in statistics)
        ctx.mark_non_differentiable(*kinds)
        return (total, *kinds)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        wanted = ctx.gradients.wanted
        if not any(wanted):
            return (None,) * 5
        hidden, weight, _ = ctx.like

        def scaled() -> Any:
            found = _scaled(ctx.gradients, ctx.call, ctx.like, grad_total)
            return found if len(found) > 1 else found[0]

        found = runtime.differentiable_once("the chunked loss", scaled, hidden, weight, grad_total)
        remaining = iter(found if isinstance(found, tuple) else (found,))
        return (*(next(remaining) if asked else None for asked in wanted), None, None)


def _scaled(
    gradients: _Gradients, call: _Call, like: tuple[Tensor | None, ...], grad_total: Tensor
) -> tuple[Tensor, ...]:
    """The gradients that are wanted, times the upstream gradient and the token's weight; hidden's added up
    over the ranks first, if that was asked for."""
    hidden = gradients.of_hidden()
    if hidden is not None and call.reduce_hidden and call.shard.group is not None:
        hidden = runtime.sum_over_ranks(hidden.astype(gradients.dtype), call.shard.group)
    found = []
    held = (hidden, gradients.weight, gradients.bias)
    for gradient, argument, wanted in zip(held, like, gradients.wanted, strict=True):
        if not wanted:
            continue
        assert argument is not None
        if gradient is None:  # no token at all
            found.append(mint.zeros(argument.shape, dtype=argument.dtype))
            continue
        acc = runtime.accumulation_dtype(argument)
        factor = grad_total.astype(acc) * call.factor(acc)
        found.append((gradient.astype(acc) * factor).astype(argument.dtype))
    return tuple(found)


def _walk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call, gradients: _Gradients
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Losses and statistics of each chunk; their gradients go to `gradients`."""
    losses: list[Tensor] = []
    statistics: list[list[Tensor]] = [[], [], [], []]
    loss = call.loss
    chunks = runtime.blocks(call.chunk_tokens, hidden, labels) if labels.shape[0] else []
    for index, (chunk, own) in enumerate(chunks):
        logits = runtime.matrix(chunk, weight, transpose_b=True)
        if bias is not None:
            logits = logits + bias
        logits = call.shard.fitted(logits)
        terms = terms_of(
            call.shard, own, loss.weight, loss.ignore_index, loss.label_smoothing, loss.z_loss_weight,
            loss.report_metrics, logits,
        )  # fmt: skip
        merged = forward_pass(logits, own, call.shard, terms, last=index == len(chunks) - 1)
        losses.append(merged.loss)
        if merged.statistics is not None:
            for collected, kind in zip(statistics, merged.statistics, strict=True):
                collected.append(kind.astype(merged.loss.dtype))
        if any(gradients.wanted):
            d_logits = rows.gradient(logits, own, merged.saved, ops.ones_like(merged.loss), terms)
            gradients.take(d_logits, chunk, weight)
    return losses, statistics


def _check_head(head: Any) -> None:
    if not isinstance(head, (nn.Dense, mint.nn.Linear)) or not _computes_linearly(head):
        raise TypeError(
            f"lm_head is a {type(head).__name__}, which may compute something else than hidden @ weight.T + "
            f"bias; "
            "expected a mindspore.nn.Dense without activation or a mindspore.mint.nn.Linear, with its own "
            "construct."
        )


def _computes_linearly(head: Any) -> bool:
    kind = nn.Dense if isinstance(head, nn.Dense) else mint.nn.Linear
    return type(head).construct is kind.construct and getattr(head, "activation", None) is None


def _check_tensors(hidden: Any, weight: Tensor, bias: Tensor | None, labels: Any) -> None:
    if is_dtensor(hidden) or is_dtensor(weight) or is_dtensor(labels):
        raise TypeError(
            "hidden, labels or lm_head's weight are a DTensor, which the chunked loss does not take on "
            "MindSpore: pass "
            "this rank's own tensors and CrossEntropyLoss(tp_group=...)."
        )
    check_dtypes(hidden, labels, "hidden", "labels")
    if hidden.ndim < 2:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, expected [..., H] with at least one dimension of "
            f"tokens."
        )
    if tuple(labels.shape) != tuple(hidden.shape[:-1]):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected {tuple(hidden.shape[:-1])}: one for each "
            f"token of "
            f"the hidden states {tuple(hidden.shape)}."
        )
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and lm_head's weight {tuple(weight.shape)}: their last "
            "dimensions must be equal."
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype != hidden.dtype:
            raise TypeError(
                f"hidden has dtype {hidden.dtype} and lm_head's {name} {parameter.dtype}: cast one of them."
            )
