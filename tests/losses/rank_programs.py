"""What each rank of a distributed test of the losses runs; imported on the ranks by name.

Every program asserts on its rank against the dense fp64 reference and returns the collectives that it
counted.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dense import Problem, Reference, all_terms, assert_close, assert_number, reference
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from tp_cases import CollectiveCounter

from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss
from megatron_ce_adaptor.chunked.exchange import SequenceParallelHidden
from megatron_ce_adaptor.chunked.linear_loss import LinearLossOptions, loss_per_token
from megatron_ce_adaptor.vocab_shard import VocabShard

UPSTREAM = 0.6875

Counts = dict[str, int]


def counted(forward: Callable[[], Tensor]) -> tuple[Tensor, Counts, Counts]:
    """(loss, collectives of forward, those of (loss * UPSTREAM).backward())."""
    with CollectiveCounter() as before:
        loss = forward()
    with CollectiveCounter() as after:
        (loss * UPSTREAM).backward()
    return loss, names_of(before.calls), names_of(after.calls)


def names_of(calls: Counter[str]) -> Counts:
    """By kind of collective, without what only waits for one."""
    found: Counter[str] = Counter()
    for name, count in calls.items():
        kind = name.rpartition("::")[2].strip("_")
        if kind in ("wait_tensor", "wrap_tensor_autograd", "barrier"):
            continue
        kind = {
            "allgather_base": "all_gather",
            "all_gather_into_tensor": "all_gather",
            "reduce_scatter_base": "reduce_scatter",
            "reduce_scatter_tensor": "reduce_scatter",
            "allreduce": "all_reduce",
        }.get(kind.rstrip("_"), kind)
        found[kind] += count
    return dict(found)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(
    expected: Reference, loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, what: str
) -> None:
    assert_number(whole(loss), expected.loss, f"{what}: loss")
    assert_close(whole(hidden), expected.hidden, f"{what}: hidden")
    assert_close(whole(weight), expected.weight, f"{what}: weight")
    if bias is not None:
        assert expected.bias is not None
        assert_close(whole(bias), expected.bias, f"{what}: bias")


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(
        weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device="meta"
    )
    layer.weight = nn.Parameter(weight.clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


def chunk_of(tensor: Tensor, rank: int, world: int) -> Tensor:
    """As torch.chunk, with empty ones at the end."""
    size = -(-tensor.shape[0] // world)
    return tensor[rank * size : (rank + 1) * size]


# --- plain shards -------------------------------------------------------------------------------------------


def plain_shards(rank: int) -> Counts:
    """Every term on shards of even, uneven and empty vocabularies, chunked and not."""
    world = dist.get_world_size()
    group = dist.group.WORLD
    forward = backward = {}
    for i, vocab in enumerate((8, 9, 10, 13, 3)):
        p = Problem.make((3, 7), 6, vocab, seed=i, bias=i % 2 == 0)
        terms = all_terms(p)[i]
        expected = reference(p, divisor=p.valid, upstream=UPSTREAM, **terms)
        even = vocab % world == 0
        loss_of = CrossEntropyLoss(
            tp_group=group, global_vocab_size=None if even else vocab, report_metrics=True, **terms
        )
        own = [None if x is None else chunk_of(x, rank, world) for x in (p.weight, p.bias)]
        assert own[0] is not None
        for chunked in (True, False):
            layer, hidden = linear(own[0], own[1]), p.hidden.clone().requires_grad_()
            if chunked:
                call = ChunkedLossWrapper(loss_of, num_chunks=4, reduce_hidden_gradient=True)
                call.set_lm_head(layer)
                loss, metrics = call(hidden, p.labels, p.valid)
                with CollectiveCounter() as counter:
                    (loss * UPSTREAM).backward()
                backward = names_of(counter.calls)
                assert backward == {"all_reduce": 1}, backward
                grad = hidden.grad
            else:
                with CollectiveCounter() as counter:
                    loss, metrics = loss_of(layer(hidden), p.labels, p.valid)
                forward = names_of(counter.calls)
                (loss * UPSTREAM).backward()
                assert hidden.grad is not None
                grad = hidden.grad.clone()
                dist.all_reduce(grad)
            assert grad is not None
            what = f"vocab {vocab}, {'chunked' if chunked else 'whole'}, rank {rank}"
            assert_number(loss, expected.loss, what)
            assert_close(grad, expected.hidden, f"{what}: hidden")
            assert_close(layer.weight.grad, chunk_of(expected.weight, rank, world), f"{what}: weight")
            if own[1] is not None:
                assert_close(layer.bias.grad, chunk_of(expected.bias, rank, world), f"{what}: bias")
            for name, value in expected.metrics.items():
                assert_number(metrics[name], value, f"{what}: {name}")
    return forward


def partial_hidden_gradient(rank: int) -> None:
    """reduce_hidden_gradient=False leaves what F.linear leaves: this rank's part."""
    world = dist.get_world_size()
    p = Problem.make((2, 5), 6, 8, bias=False)
    hidden = p.hidden.clone().requires_grad_()
    call = ChunkedLossWrapper(
        CrossEntropyLoss(tp_group=dist.group.WORLD), num_chunks=3, reduce_hidden_gradient=False
    ).set_lm_head(linear(chunk_of(p.weight, rank, world), None))
    _, forward, backward = counted(lambda: call(hidden, p.labels, p.valid)[0])
    assert forward == {"all_gather": 3} and backward == {}, (forward, backward)
    assert hidden.grad is not None
    dist.all_reduce(hidden.grad)
    assert_close(hidden.grad, reference(p, divisor=p.valid, upstream=UPSTREAM).hidden, "hidden")


# --- DTensors -----------------------------------------------------------------------------------------------

MESHES: dict[int, list[tuple[tuple[int, ...], int, list[Any]]]] = {
    # shape, the vocabulary's mesh dimension, placements of hidden states [B, L, H]
    2: [
        ((2,), 0, [Replicate()]),
        ((2,), 0, [Shard(1)]),  # sequence parallel: made Replicate, once
        ((2,), -1, [Shard(0)]),  # unsplit vocabulary, split batch
    ],
    4: [
        ((4,), 0, [Replicate()]),
        ((2, 2), 1, [Shard(0), Replicate()]),
        ((2, 2), 0, [Replicate(), Shard(1)]),
        ((2, 2), 1, [Shard(1), Shard(1)]),
        ((2, 2, 1), 1, [Shard(1), Replicate(), Shard(0)]),
    ],
}


def dtensor_heads(rank: int) -> list[tuple[Counts, Counts]]:
    """Loss, metrics and gradients for every mesh and uneven sizes, chunked from hidden states and whole from
    logits."""
    counts = []
    for i, (shape, tp, placements) in enumerate(MESHES[dist.get_world_size()]):
        mesh = init_device_mesh("cpu", shape)
        label_placements = [Replicate() if d == tp else x for d, x in enumerate(placements)]
        weight_placements = [Shard(0) if d == tp else Replicate() for d in range(len(shape))]
        for j, vocab in enumerate((8, 9)):
            p = Problem.make((3, 7), 6, vocab, seed=i, bias=j == 0)
            terms = all_terms(p)[(i + j) % 5]
            expected = reference(p, divisor=p.valid, upstream=UPSTREAM, **terms)
            labels = distribute_tensor(p.labels, mesh, label_placements)
            what = f"{shape} tp {tp} {placements} vocab {vocab}"
            layer = linear(p.weight, p.bias)
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(distribute_tensor(parameter, mesh, weight_placements)))
            hidden = distribute_tensor(p.hidden, mesh, placements).requires_grad_()
            loss_of = CrossEntropyLoss(report_metrics=True, **terms)
            call = ChunkedLossWrapper(loss_of, num_chunks=4).set_lm_head(layer)
            metrics: dict[str, Tensor] = {}

            loss, forward, backward = counted(remember(call, metrics, hidden, labels, p.valid))
            counts.append((forward, backward))
            bias_grad = None if p.bias is None else layer.bias.grad
            check(expected, loss, hidden.grad, layer.weight.grad, bias_grad, what)
            _check_kind(loss, metrics, label_placements, expected, what)

            on_logits = [Shard(2) if d == tp else x for d, x in enumerate(label_placements)]
            logits = distribute_tensor(
                nn.functional.linear(p.hidden, p.weight, p.bias), mesh, on_logits
            ).requires_grad_()
            loss, metrics = loss_of(logits, labels, p.valid)
            (loss * UPSTREAM).backward()
            gradient = whole(logits.grad)
            _check_kind(loss, metrics, label_placements, expected, f"{what}, whole")
            assert_close(gradient @ p.weight, expected.hidden, f"{what}, whole: hidden")
            assert_close(
                gradient.flatten(0, 1).t() @ p.hidden.flatten(0, 1), expected.weight, f"{what}, whole"
            )
    return counts


def remember(call: Any, metrics: dict[str, Tensor], *args: Any) -> Callable[[], Tensor]:
    """A call for `counted`, whose metrics go to `metrics`."""

    def run() -> Tensor:
        loss, found = call(*args)
        metrics.update(found)
        return loss

    return run


def _check_kind(
    loss: Tensor, metrics: dict[str, Tensor], label_placements: list[Any], expected: Reference, what: str
) -> None:
    """0-d DTensors that are Partial where the tokens are split, of the right whole values."""
    wanted = tuple(Partial() if x.is_shard() else Replicate() for x in label_placements)
    assert metrics.keys() == expected.metrics.keys()
    for name, value in {"loss": expected.loss, **expected.metrics}.items():
        actual = loss if name == "loss" else metrics[name]
        assert isinstance(actual, DTensor) and actual.shape == () and actual.placements == wanted, what
        assert_number(whole(actual), value, f"{what}: {name}")


def colwise_head(rank: int) -> list[tuple[Counts, Counts]]:
    """parallelize_module with ColwiseParallel: input of every layout, plain labels give a plain loss."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    counts = []
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for vocab, sequence_parallel, output in itertools.product(
        (8, 10), (False, True), (Shard(-1), Replicate())
    ):
        p = Problem.make((3, 8), 6, vocab, seed=vocab)
        expected = reference(p, divisor=p.valid, upstream=UPSTREAM)
        layer = parallelize_module(
            linear(p.weight, p.bias),
            mesh,
            ColwiseParallel(
                input_layouts=Shard(1) if sequence_parallel else Replicate(),
                output_layouts=output,
                use_local_output=False,
            ),
        )
        own = p.hidden.chunk(world, 1)[rank] if sequence_parallel else p.hidden
        hidden = own.clone().requires_grad_()
        call = ChunkedLossWrapper(CrossEntropyLoss(), num_chunks=4).set_lm_head(layer)
        with warnings.catch_warnings():  # parallelize_module's forward hook is no reason to warn
            warnings.simplefilter("error", UserWarning)
            loss, forward, backward = counted(remember(call, {}, hidden, p.labels, p.valid))
        assert type(loss) is Tensor
        grad = expected.hidden.chunk(world, 1)[rank] if sequence_parallel else expected.hidden
        assert hidden.grad is not None
        assert_close(hidden.grad, grad, f"vocab {vocab}, sp {sequence_parallel}: hidden")
        expected.hidden = hidden.grad
        check(expected, loss, hidden.grad, layer.weight.grad, layer.bias.grad, "colwise")
        counts.append((forward, backward))
        logits = layer(hidden)  # the module's own forward and hooks are back
        assert isinstance(logits, DTensor) and logits.shape == (3, 8, vocab)
        whole_loss, metrics = CrossEntropyLoss(report_metrics=True)(logits, p.labels, p.valid)
        assert type(whole_loss) is Tensor
        assert_number(whole_loss, expected.loss, "plain labels, whole")
        assert all(type(value) is Tensor for value in metrics.values())
        for name, value in expected.metrics.items():
            assert_number(metrics[name], value, f"plain labels, whole: {name}")
        whole_loss.backward()
    return counts


# --- the core -----------------------------------------------------------------------------------------------


def sequence_parallel_per_token(rank: int) -> tuple[Counts, Counts]:
    """loss_per_token with any upstream gradient, hidden states split over the ranks of the vocabulary."""
    world, group = dist.get_world_size(), dist.group.WORLD
    p = Problem.make((12,), 6, 8)
    upstream = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    inputs = [x.clone().requires_grad_() for x in (p.hidden, p.weight, p.bias) if x is not None]
    dense = nn.functional.cross_entropy(nn.functional.linear(*inputs), p.labels, reduction="none")
    dense.backward(upstream)
    own = [chunk_of(x.detach(), rank, world).clone().requires_grad_() for x in inputs]
    options = LinearLossOptions(
        shard=VocabShard.of_equal_shards(group, 8 // world),
        chunk_tokens=4,
        exchange=SequenceParallelHidden(group),
    )
    with CollectiveCounter() as forward:
        loss, _ = loss_per_token(own[0], own[1], p.labels, options, own[2])
    with CollectiveCounter() as backward:
        loss.backward(upstream)
    assert_close(loss, dense.detach(), "loss")
    for mine, x in zip(own, inputs, strict=True):
        assert_close(mine.grad, chunk_of(x.grad, rank, world), "gradient")
    return names_of(forward.calls), names_of(backward.calls)
