"""Output layers that the chunked loss understands, and what is computed on this rank with each.

A linear layer is computed here, not by calling it: `torch.nn.Linear` with plain or DTensor parameters (after
`parallelize_module`, `fully_shard` or both) and Megatron's `ColumnParallelLinear`. Anything that computes
something else (LoRA, fp8, soft-capped logits) is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megatron_ce_adaptor.chunked.exchange import (
    HiddenExchange,
    NoExchange,
    ReplicatedHidden,
    SequenceParallelHidden,
)
from megatron_ce_adaptor.losses import is_dtensor
from megatron_ce_adaptor.vocab_shard import VocabShard

_COLUMN_PARALLEL = (
    "output_size_per_partition",
    "gather_output",
    "skip_bias_add",
    "sequence_parallel",
    "allreduce_dgrad",
    "tp_group",
)


@dataclasses.dataclass(frozen=True)
class LocalProblem:
    """This rank's part of the work, as plain tensors; hidden, weight and bias are differentiable.

    Attributes:
        hidden: [n, H]; weight: [C, H]; bias: [C] or None; labels: [N].
        shard: the columns that the weight's rows are.
        exchange: what happens to the hidden states between the ranks.
        wrap: makes a sum over this rank's tokens what the caller gets: a plain tensor or a DTensor.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    shard: VocabShard
    exchange: HiddenExchange
    wrap: Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """How the caller describes plain shards: see `CrossEntropyLoss` and `ChunkedLossWrapper`."""

    tp_group: Any = None
    global_vocab_size: int | None = None
    reduce_hidden_gradient: bool | None = None


def unwrapped(lm_head: Any) -> nn.Module:
    """The module behind torch.compile's wrapper.

    Raises:
        TypeError: it is no output layer that the chunked loss understands.
    """
    lm_head = getattr(lm_head, "_orig_mod", lm_head)
    if not isinstance(lm_head, nn.Module):
        raise TypeError(f"lm_head is a {type(lm_head).__name__}, expected a torch.nn.Module.")
    if is_column_parallel(lm_head):
        _check_column_parallel(lm_head)
    elif not _is_linear(lm_head):
        raise TypeError(
            f"lm_head is a {type(lm_head).__name__}, whose forward may compute something else than "
            "hidden @ weight.T + bias; expected a torch.nn.Linear that keeps Linear's forward, or Megatron's "
            "ColumnParallelLinear."
        )
    return lm_head


def _is_linear(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
    )


def is_column_parallel(module: nn.Module) -> bool:
    """Megatron's ColumnParallelLinear, known by its attributes so that Megatron is not imported."""
    return all(hasattr(module, name) for name in _COLUMN_PARALLEL)


def _check_column_parallel(head: Any) -> None:
    if getattr(head, "gradient_accumulation_fusion", False):
        raise ValueError(
            "lm_head adds its weight's gradient to main_grad itself (gradient_accumulation_fusion), which "
            "the chunked loss does not: build it with --no-gradient-accumulation-fusion."
        )
    if getattr(head.config, "defer_embedding_wgrad_compute", False):
        raise ValueError(
            "lm_head defers its weight's gradient (defer_embedding_wgrad_compute), which the chunked loss "
            "does not: turn it off."
        )


def local_problem(
    head: Any, weight: Tensor | None, hidden: Tensor, labels: Tensor, vocabulary: Vocabulary
) -> LocalProblem:
    """What this rank computes, from the hidden states that the head's forward would get.

    Args:
        weight: used instead of the head's own, or None.

    Raises:
        TypeError, ValueError: what does not fit together.
    """
    if weight is None:
        weight = head.weight
    if weight is None:
        raise ValueError(
            "lm_head has no weight of its own (skip_weight_param_allocation): pass the one that it shares, "
            "set_lm_head(lm_head, weight=...)."
        )
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels are a {type(labels).__name__}, expected a torch.Tensor.")
    if labels.is_floating_point():
        raise TypeError(
            f"labels have dtype {labels.dtype}, expected int64 or int32 class ids (not probabilities)."
        )
    bias = None if getattr(head, "skip_bias_add", False) else head.bias
    if is_dtensor(weight) or is_dtensor(hidden):
        if not (is_dtensor(weight) and is_dtensor(hidden)):
            raise TypeError(_mixed(weight, hidden))
        from megatron_ce_adaptor.chunked.dtensor_head import dtensor_problem

        return dtensor_problem(hidden, weight, bias, labels, vocabulary)
    if is_dtensor(labels):
        raise TypeError(
            "labels are a DTensor and hidden states a plain tensor: pass both as DTensors, or "
            "labels.to_local()."
        )
    if is_column_parallel(head):
        return _column_parallel_problem(head, hidden, weight, bias, labels, vocabulary)
    return _plain_problem(hidden, weight, bias, labels, vocabulary)


def _mixed(weight: Tensor, hidden: Tensor) -> str:
    if is_dtensor(weight):
        placements = weight.placements  # type: ignore[attr-defined]
        return (
            f"lm_head's weight is a DTensor with placements {placements} and its input a plain tensor: pass "
            "hidden states that are a DTensor, or apply parallelize_module to lm_head; if fully_shard has "
            "sharded the weight, apply it to lm_head itself, too, so that it is gathered for this call."
        )
    return (
        "hidden states are a DTensor and lm_head's weight is a plain tensor: pass hidden.to_local(), or "
        "distribute lm_head."
    )


def check_labels_shape(labels: Tensor, leading: tuple[int, ...], of_what: str) -> None:
    if tuple(labels.shape) != tuple(leading):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected {tuple(leading)}: one for each token of "
            f"{of_what}."
        )


def _plain_problem(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocabulary: Vocabulary
) -> LocalProblem:
    check_labels_shape(labels, hidden.shape[:-1], f"the hidden states {tuple(hidden.shape)}")
    group, total = vocabulary.tp_group, vocabulary.global_vocab_size
    if total is None:
        shard = VocabShard.of_equal_shards(group, weight.shape[0])
    else:
        from megatron_ce_adaptor.dtensor.chunked_shard import chunked_shard

        shard = chunked_shard(group, weight.shape[0], total)
    exchange: HiddenExchange = NoExchange()
    if shard.group is not None:
        if vocabulary.reduce_hidden_gradient is None:
            raise ValueError(
                f"lm_head is a plain layer whose vocabulary is split over {shard.world_size} ranks: say "
                "ChunkedLossWrapper(..., reduce_hidden_gradient=True) to add the hidden states' gradient up "
                "over tp_group, or False if something before lm_head already does."
            )
        if vocabulary.reduce_hidden_gradient:
            exchange = ReplicatedHidden(shard.group)
    return LocalProblem(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), shard, exchange, _as_it_is
    )


def _column_parallel_problem(
    head: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocabulary: Vocabulary,
) -> LocalProblem:
    if hidden.dim() != 3:
        raise ValueError(
            f"hidden states have shape {tuple(hidden.shape)}, expected [s, b, h] for Megatron's lm_head."
        )
    shard = VocabShard.of_equal_shards(head.tp_group, weight.shape[0])
    if vocabulary.tp_group not in (None, head.tp_group):
        raise ValueError("tp_group is not lm_head's own: leave tp_group out for Megatron's layer.")
    if vocabulary.global_vocab_size not in (None, shard.total_columns):
        raise ValueError(
            f"global_vocab_size is {vocabulary.global_vocab_size}, but lm_head has {shard.total_columns} "
            "columns on all ranks together: leave it out for Megatron's layer."
        )
    exchange: HiddenExchange = NoExchange()
    s, b, h = hidden.shape
    if shard.group is not None:
        if head.sequence_parallel:
            exchange = SequenceParallelHidden(shard.group)
            s *= shard.world_size
        elif not getattr(head, "disable_grad_reduce", False):
            exchange = ReplicatedHidden(shard.group)
    check_labels_shape(labels, (b, s), f"[b, s], as in Megatron, for hidden states [s, b, h] = {(s, b, h)}")
    return LocalProblem(
        hidden.reshape(-1, h), weight, bias, labels.t().reshape(-1), shard, exchange, _as_it_is
    )


def _as_it_is(value: Tensor) -> Tensor:
    return value
