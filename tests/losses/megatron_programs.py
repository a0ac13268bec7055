"""ChunkedLossWrapper over the real Megatron-Core's ColumnParallelLinear, on the ranks of a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dense import Problem, assert_close, assert_number, reference
from rank_programs import UPSTREAM, Counts, chunk_of, counted, remember
from torch import Tensor, nn

from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss, parallel_cross_entropy

SEQUENCE, BATCH, HIDDEN, VOCAB = 8, 3, 6, 12


def head(p: Problem, rank: int, world: int, *, sequence_parallel: bool, **options: Any) -> Any:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = ModelParallelConfig(
        tensor_model_parallel_size=world,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=True,
        params_dtype=torch.float64,
        gradient_accumulation_fusion=False,
    )
    config._cpu_offloading_context = None
    layer = ColumnParallelLinear(
        HIDDEN,
        VOCAB,
        config=config,
        init_method=nn.init.zeros_,
        bias=p.bias is not None,
        tp_group=dist.group.WORLD,
        **options,
    )
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_(chunk_of(p.weight, rank, world))
        if p.bias is not None:
            layer.bias.copy_(chunk_of(p.bias, rank, world))
    return layer


def column_parallel(rank: int) -> list[tuple[Counts, Counts]]:
    """Gradients with and without sequence parallel, bias, and a shared weight; collectives of each call."""
    world = dist.get_world_size()
    counts = []
    for i, (sequence_parallel, bias, tied) in enumerate(
        [(False, True, False), (True, True, False), (True, False, True), (False, False, True)]
    ):
        p = Problem.make((SEQUENCE, BATCH), HIDDEN, VOCAB, seed=i, bias=bias)
        expected = reference(p, divisor=p.valid, upstream=UPSTREAM)
        labels = p.labels.t().contiguous()  # [b, s], as Megatron's get_batch gives them
        layer = head(p, rank, world, sequence_parallel=sequence_parallel, skip_weight_param_allocation=tied)
        shared = nn.Parameter(chunk_of(p.weight, rank, world).clone()) if tied else None
        own = chunk_of(p.hidden, rank, world) if sequence_parallel else p.hidden
        hidden = own.clone().requires_grad_()
        call = ChunkedLossWrapper(CrossEntropyLoss(report_metrics=True), num_chunks=5)
        call.set_lm_head(layer, weight=shared)
        loss, forward, backward = counted(remember(call, {}, hidden, labels, p.valid))
        counts.append((forward, backward))
        assert_number(loss, expected.loss, "loss")
        grad = chunk_of(expected.hidden, rank, world) if sequence_parallel else expected.hidden
        assert hidden.grad is not None
        assert_close(hidden.grad, grad, f"sequence parallel {sequence_parallel}: hidden")
        weight = shared if shared is not None else layer.weight
        assert_close(weight.grad, chunk_of(expected.weight, rank, world), "weight")
        if bias:
            assert_close(layer.bias.grad, chunk_of(expected.bias, rank, world), "bias")
    return counts


def own_forward_agrees(rank: int) -> None:
    """The same as Megatron's own layer and the loss of its logits; a skipped bias is not added by either."""
    world = dist.get_world_size()
    p = Problem.make((SEQUENCE, BATCH), HIDDEN, VOCAB, seed=9, ignored=0.0)
    layer = head(p, rank, world, sequence_parallel=False, skip_bias_add=True)
    labels = p.labels.t().contiguous()
    mine, theirs = (p.hidden.clone().requires_grad_() for _ in range(2))
    loss, _ = ChunkedLossWrapper(CrossEntropyLoss(), num_chunks=3).set_lm_head(layer)(mine, labels)
    loss.backward()
    assert layer.bias.grad is None
    weight, layer.weight.grad = layer.weight.grad, None
    logits, _ = layer(theirs)
    dense = parallel_cross_entropy(logits, p.labels, dist_process_group=dist.group.WORLD).sum()
    dense.backward()
    assert_number(loss, float(dense.detach()), "loss")
    assert mine.grad is not None and theirs.grad is not None
    assert_close(mine.grad, theirs.grad, "hidden")
    assert_close(weight, layer.weight.grad, "weight")


def refused(rank: int) -> list[str]:
    """What is said to heads and labels that do not fit, the same on every rank."""
    world = dist.get_world_size()
    p = Problem.make((SEQUENCE, BATCH), HIDDEN, VOCAB, bias=False)
    found = []

    def attempt(layer: Any, hidden: Tensor, labels: Tensor, **terms: Any) -> None:
        try:
            call = ChunkedLossWrapper(CrossEntropyLoss(**terms), num_chunks=2).set_lm_head(layer)
            call(hidden, labels)
            found.append("accepted")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    layer = head(p, rank, world, sequence_parallel=False)
    attempt(layer, p.hidden, p.labels)  # [s, b]
    attempt(layer, p.hidden.flatten(0, 1), p.labels.flatten())
    attempt(
        head(p, rank, world, sequence_parallel=False, skip_weight_param_allocation=True),
        p.hidden,
        p.labels.t(),
    )
    attempt(layer, p.hidden, p.labels.t(), tp_group=dist.new_group())
    attempt(layer, p.hidden, p.labels.t(), global_vocab_size=VOCAB - 1)
    layer.gradient_accumulation_fusion = True
    attempt(layer, p.hidden, p.labels.t())
    dist.barrier()
    return found
