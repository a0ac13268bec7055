"""What stands for the logits that are not computed: everything that their loss needs, chunk by chunk."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from megatron_ce_adaptor.megatron import loss_chunks
from megatron_ce_adaptor.megatron.call_counter import count_call
from megatron_ce_adaptor.megatron.chunk_rule import choose_chunk_tokens
from megatron_ce_adaptor.megatron.speaker import say_once

_IGNORED_LABEL = -100


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredLogits:
    """``output_layer(hidden)``, not computed.

    Attributes:
        head: Megatron's ColumnParallelLinear; weight: its own or the shared one, [V/tp, h].
        hidden: [s, b, h], this rank's part of the sequence under sequence parallelism.
        chunk: tokens of a chunk, or ``"auto"``.
    """

    head: Any
    weight: Tensor
    hidden: Tensor
    chunk: int | str

    def __mul__(self, factor: float) -> DeferredLogits:
        """The logits times a number (MuP's): the hidden states are multiplied in their place."""
        if not isinstance(factor, int | float):
            return NotImplemented
        return dataclasses.replace(self, hidden=self.hidden * factor)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the logits are not there (their {name} was asked for): with {loss_chunks.TOKENS} output layer "
            "and loss are computed in chunks of tokens. Unset it for what needs logits."
        )

    def loss(self, labels: Tensor, loss_mask: Tensor | None, recompute: bool) -> Tensor:
        """Loss of each token, fp32 [b, s], the same on every rank of the tensor-parallel group.

        Args:
            labels: [b, s] of the whole sequence. One out of range has a finite loss, as at Megatron's te
                door, unless MCE_CHECK_LABELS=1.
            loss_mask: [b, s], what the losses are going to be multiplied by, if it is known; the gradients
                are then computed here (see `loss_per_token`'s `foreseen`).
            recompute: they are computed in backward in any case.

        Collectives: hidden's all-gather under sequence parallelism and an all-gather of 3 numbers a token for
        each chunk; backward one reduce-scatter or all-reduce, and an all-reduce of one number or, where
        logits are computed again, hidden's all-gather.
        """
        from megatron_ce_adaptor.chunked import heads
        from megatron_ce_adaptor.chunked.linear_loss import LinearLossOptions, loss_per_token

        problem = heads.local_problem(self.head, self.weight, self.hidden, labels, heads.Vocabulary())
        tokens = problem.labels.shape[0]
        size = self.chunk
        if isinstance(size, str):
            size = _chosen(self.hidden, tokens, self.weight.shape[0], problem.shard.group)
        size = min(size, max(1, tokens))
        count_call("te", chunk_tokens=size)
        main_grad = getattr(self.weight, "main_grad", None)
        wide = self.hidden.element_size() < 4 and main_grad is not None and main_grad.dtype == torch.float32
        options = LinearLossOptions(
            shard=problem.shard,
            chunk_tokens=size,
            ignore_index=_IGNORED_LABEL,
            exchange=problem.exchange,
            accumulation_dtype=torch.float32 if wide and size < tokens else None,
            accumulate_hidden=False,
            check_labels=False,
            weight_gradient=_main_grad(self.head, self.weight),
        )
        foreseen = None
        if loss_mask is not None and not recompute and loss_mask.shape == labels.shape:
            foreseen = loss_mask.t().reshape(-1)
        loss, _ = loss_per_token(
            problem.hidden, problem.weight, problem.labels, options, problem.bias, foreseen
        )
        return loss.view(labels.shape[1], labels.shape[0]).t().contiguous()


class MainGrad:
    """Megatron's buffer for a weight's gradient, which its output layer adds to by itself
    (``--gradient-accumulation-fusion``), with what it tells the data-parallel hooks by that.

    The same as ``LinearWithGradAccumulationAndAsyncCommunication`` in megatron/core/tensor_parallel/layers.py
    does: the flag ``grad_added_to_main_grad``, and a tensor for autograd whose content nobody reads, or zeros
    if the weight's other users give their gradient to autograd (``zero_out_wgrad``).
    """

    def __init__(self, weight: Any) -> None:
        self._weight = weight
        self._main_grad: Tensor = weight.main_grad

    def buffer(self) -> Tensor:
        return self._main_grad

    def stand_in(self) -> Tensor | None:
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        weight.grad_added_to_main_grad = True
        return make(weight, requires_grad=False)


def _main_grad(head: Any, weight: Tensor) -> MainGrad | None:
    adds_itself = getattr(head, "gradient_accumulation_fusion", False) and weight.requires_grad
    return MainGrad(weight) if adds_itself and getattr(weight, "main_grad", None) is not None else None


def _chosen(hidden: Tensor, tokens: int, columns: int, group: Any) -> int:
    key = (tokens, hidden.shape[-1], columns, hidden.element_size())
    return _chosen_for(key, hidden.device, group)


@functools.lru_cache(maxsize=1024)
def _chosen_for(key: tuple[int, int, int, int], device: torch.device, group: Any) -> int:
    """Asked once for each size, on all ranks of the group alike: they must cut alike."""
    tokens, hidden, columns, element_size = key
    choice = choose_chunk_tokens(tokens, hidden, columns, element_size, _free_bytes(device, group))
    say_once(
        f"loss chunks of {choice.tokens} tokens for {tokens} tokens, hidden size {hidden}, {columns} columns "
        f"on this rank: {choice.reason}",
        group,
    )
    return choice.tokens


def _free_bytes(device: torch.device, group: Any) -> int | None:
    """The least of any rank, what PyTorch's allocator holds in reserve included; None on a CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    reserve = module.memory_reserved(device) - module.memory_allocated(device)
    free = torch.tensor(module.mem_get_info(device)[0] + reserve, dtype=torch.int64, device=device)
    if group is not None:
        torch.distributed.all_reduce(free, torch.distributed.ReduceOp.MIN, group=group)
    return int(free)
