"""`ChunkedLossWrapper`: the output layer and `CrossEntropyLoss`, chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ce_adaptor.chunked import heads
from megatron_ce_adaptor.chunked.linear_loss import LinearLossOptions, weighted_loss
from megatron_ce_adaptor.chunked.module_call import call_inside_hooks
from megatron_ce_adaptor.implementations.dtypes import accumulation_dtype
from megatron_ce_adaptor.losses import CrossEntropyLoss, LossAndMetrics, valid_token_count

__all__ = ["ChunkedLossWrapper"]


class ChunkedLossWrapper:
    """`loss(lm_head(hidden), labels)` without ever holding the logits of more than a chunk of the tokens.

    ```python
    criterion = ChunkedLossWrapper(CrossEntropyLoss(), num_chunks=4).set_lm_head(model.lm_head)
    loss, metrics = criterion(hidden, labels, global_valid_tokens=n)   # hidden: lm_head's input
    loss.backward()
    ```

    Loss, metrics and gradients are those of the unchunked call. All gradients are computed in the forward
    pass: in each chunk the logits, their loss, and the products with the logits' gradient, which takes the
    logits' memory: three matrix products, as without chunks. Backward multiplies them by the upstream scale
    (`(loss * 0.5).backward()`, a GradScaler's) and hands them to autograd as the gradients of the hidden
    states and of lm_head's parameters, so hooks, `torch.autograd.grad`, accumulation into an existing
    `.grad`, tied weights, DDP and FSDP see one ordinary backward. In between, the gradients are held: as many
    bytes as hidden and lm_head's parameters. Gradients that nobody wants (`no_grad`, frozen parameters) are
    neither computed nor held.

    lm_head may be
    - a `torch.nn.Linear`, plain, or after `fully_shard` (its parameters are gathered once and their gradients
      scattered once), or after `parallelize_module`/`distribute_tensor` with its weight's rows sharded over
      at most one mesh dimension (hidden's gradient is reduced once; sequence parallel included), or both;
    - a plain `torch.nn.Linear` that is this rank's shard, with `CrossEntropyLoss(tp_group=...)`;
    - Megatron's `ColumnParallelLinear`: hidden [s, b, h] (the rank's part of it with sequence parallel),
      labels [b, s] of the whole sequence. `tp_group` is the layer's.

    Collectives: those that lm_head itself would do, once a call, not once a chunk; and one all-gather of a
    few numbers a token for each chunk, forward, if the vocabulary is split.

    Args:
        loss: computes the loss of each token; its `bare` is this object's.
        num_chunks: into how many chunks of nearly the same number of tokens, at most one for each token; the
            last ones may be smaller or missing, as large chunks are a multiple of 128 tokens.
        accumulation_dtype: torch.float32 to add up the parameters' gradients over the chunks in fp32, with
            buffers of that size, and to round them once; None: in their own dtype (fp16: always in fp32).
        reduce_hidden_gradient: only for plain shards of a split vocabulary, where it must be said: True to
            add hidden's gradient up over tp_group, False if an operator before lm_head does.

    Raises (when called): what `CrossEntropyLoss` raises; TypeError and ValueError, with a sentence, for
        tensors that do not fit together or an lm_head that cannot be chunked; RuntimeError without lm_head,
        for a second backward of a loss, and for second derivatives.
    """

    def __init__(
        self,
        loss: CrossEntropyLoss,
        num_chunks: int = 8,
        *,
        accumulation_dtype: torch.dtype | None = None,
        reduce_hidden_gradient: bool | None = None,
    ) -> None:
        if not isinstance(loss, CrossEntropyLoss):
            raise TypeError(
                f"loss is a {type(loss).__name__}, expected megatron_ce_adaptor.CrossEntropyLoss: the "
                "chunks' gradients are computed by its own formulas."
            )
        if isinstance(num_chunks, bool) or not isinstance(num_chunks, int):
            raise TypeError(f"num_chunks is {num_chunks!r}, expected an int.")
        if num_chunks < 1:
            raise ValueError(f"num_chunks is {num_chunks}, expected at least 1.")
        if accumulation_dtype not in (None, torch.float32):
            raise ValueError(f"accumulation_dtype is {accumulation_dtype}, expected torch.float32 or None.")
        self.loss = loss
        self.num_chunks = num_chunks
        self.accumulation_dtype = accumulation_dtype
        self.reduce_hidden_gradient = reduce_hidden_gradient
        self._head: Any = None
        self._weight: Tensor | None = None

    def set_lm_head(self, lm_head: torch.nn.Module, weight: Tensor | None = None) -> ChunkedLossWrapper:
        """Sets the output layer; returns this object.

        Args:
            weight: used in place of lm_head.weight (Megatron's tied embeddings).

        Raises:
            TypeError, ValueError: a module that computes something else than hidden @ weight.T + bias, or
                that puts its gradients elsewhere.
        """
        self._head, self._weight = heads.unwrapped(lm_head), weight
        return self

    @torch.compiler.disable
    def __call__(
        self, hidden: Tensor, labels: Tensor, global_valid_tokens: Tensor | float | None = None
    ) -> LossAndMetrics | Tensor:
        """The loss, with its metrics unless `loss.bare`.

        Args:
            hidden: [..., H], what lm_head would be called with.
            labels: class ids, int32 or int64, of hidden's shape without H (Megatron's layer: [b, s]).
            global_valid_tokens: as for `CrossEntropyLoss`.
        """
        if self._head is None:
            raise RuntimeError("there is no lm_head yet: call set_lm_head(model.lm_head) first.")
        if not isinstance(hidden, Tensor):
            raise TypeError(f"hidden is a {type(hidden).__name__}, expected a torch.Tensor.")
        if hidden.dim() < 2:
            raise ValueError(
                f"hidden has shape {tuple(hidden.shape)}, expected [..., H] with at least one dimension of "
                "tokens."
            )
        count = valid_token_count(global_valid_tokens, hidden)
        heads.unwrapped(self._head)  # its forward may have been replaced since set_lm_head

        def inside(given: Tensor) -> tuple[Tensor, LossAndMetrics]:
            return self._compute(given, labels, count)

        loss, metrics = call_inside_hooks(self._head, hidden, inside)
        return loss if self.loss.bare else (loss, metrics)

    def _compute(
        self, hidden: Tensor, labels: Tensor, count: Tensor | float | None
    ) -> tuple[Tensor, LossAndMetrics]:
        """(what FSDP's hooks see, what the caller gets)."""
        terms = self.loss
        vocabulary = heads.Vocabulary(terms.tp_group, terms.global_vocab_size, self.reduce_hidden_gradient)
        problem = heads.local_problem(self._head, self._weight, hidden, labels, vocabulary)
        tokens = problem.labels.shape[0]
        shard = problem.shard if terms.weight is None else problem.shard.with_class_weight(terms.weight)
        options = LinearLossOptions(
            shard=shard,
            chunk_tokens=_chunk_tokens(tokens, self.num_chunks),
            ignore_index=terms.ignore_index,
            label_smoothing=terms.label_smoothing,
            z_loss_weight=terms.z_loss_weight,
            class_weight=terms.weight,
            exchange=problem.exchange,
            accumulation_dtype=self.accumulation_dtype,
            statistics=terms.report_metrics,
        )
        token_weight = _reciprocal(count, problem.hidden).expand(tokens)
        found = weighted_loss(
            problem.hidden, problem.weight, problem.labels, token_weight, options, problem.bias
        )
        metrics = {}
        if found.statistics is not None:
            metrics = terms.metrics_of(found.statistics, problem.labels, count, problem.wrap)
        loss = problem.wrap(found.total)
        return loss, (loss, metrics)


def _chunk_tokens(tokens: int, num_chunks: int) -> int:
    """Tokens of a chunk, fewer in the last: from 1024 on a multiple of 128, the tile of matrix products."""
    size = max(1, -(-tokens // num_chunks))
    return size if size < 1024 else -(-size // 128) * 128


def _reciprocal(count: Tensor | float | None, like: Tensor) -> Tensor:
    dtype = accumulation_dtype(like)
    if isinstance(count, Tensor):
        return count.to(dtype).reciprocal()
    return torch.full((), 1.0 if count is None else 1.0 / count, dtype=dtype, device=like.device)
