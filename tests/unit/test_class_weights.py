"""Class weights in the core, as PyTorch defines them for reduction="none", on one rank and on shards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import Device
from layouts import LAYOUTS
from tolerances import compute_dtype, storage_error

from megatron_ce_adaptor.cross_entropy import cross_entropy
from megatron_ce_adaptor.dispatch import Terms, backward_pass
from megatron_ce_adaptor.implementations import choose
from megatron_ce_adaptor.implementations.class_weights import ClassWeights
from megatron_ce_adaptor.vocab_shard import VocabShard

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def inputs(vocab: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """logits, labels with two ignored ones, weights with zeros among them, upstream gradients."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3).to(dtype)
    target = torch.randint(0, vocab, (rows,), generator=generator)
    target[0] = vocab - 1
    target[1::4] = -100
    weight = torch.rand(vocab, generator=generator, dtype=torch.float64) * 2
    weight[::7] = 0.0
    upstream = torch.randn(rows, generator=generator).to(compute_dtype(dtype))
    return logits, target, weight, upstream


def dense(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    upstream: torch.Tensor,
    smoothing: float,
    z: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 (loss, gradient): PyTorch's own weights and smoothing, and z * lse^2 without weights."""
    leaf = logits.detach().double().clone().requires_grad_()
    loss = F.cross_entropy(leaf, target, weight=weight, label_smoothing=smoothing, reduction="none")
    loss = loss + z * torch.where(target == -100, 0.0, leaf.logsumexp(-1).square())
    loss.backward(upstream.double())
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def assert_near(actual: torch.Tensor, expected: torch.Tensor, stored_as: torch.dtype) -> None:
    computed = 1e-13 if stored_as == torch.float64 else 3e-6
    allowed = (1.5 * storage_error(stored_as) + computed) * expected.abs() + computed
    error = (actual.double().cpu() - expected).abs()
    assert bool((error <= allowed).all()), f"off by {(error / allowed).max():.1f} times what is allowed"


@pytest.mark.parametrize("options", [(0.0, 0.0), (0.1, 0.0), (0.1, 1e-3)], ids=str)
@pytest.mark.parametrize("vocab", [3, 1000, 4099])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rank(device: Device, dtype: torch.dtype, vocab: int, options: tuple[float, float]) -> None:
    smoothing, z = options
    logits, target, weight, upstream = inputs(vocab, device.rows(9, vocab), dtype)
    expected_loss, expected_gradient = dense(logits, target, weight, upstream, smoothing, z)
    leaf = logits.to(device.type, copy=True).requires_grad_()
    loss = call(leaf, target.to(device.type), weight.to(device.type), smoothing, z)
    assert_near(loss.detach(), expected_loss, compute_dtype(dtype))
    loss.backward(upstream.to(device.type))
    assert leaf.grad is not None
    assert_near(leaf.grad, expected_gradient, dtype)


def call(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, smoothing: float, z: float
) -> torch.Tensor:
    loss = cross_entropy(
        logits,
        target,
        ignore_index=-100,
        label_smoothing=smoothing,
        z_loss_weight=z,
        overwrite_input=False,
        return_statistics=False,
        check_labels=None,
        class_weight=weight,
    )
    assert isinstance(loss, torch.Tensor)
    return loss


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts(device: Device, layout: str) -> None:
    vocab = 131
    parent = torch.randn(LAYOUTS[layout].parent_shape(vocab), generator=torch.Generator().manual_seed(1))
    leaf = LAYOUTS[layout].view(parent.to(device.type)).detach().requires_grad_()
    classes = leaf.shape[-1]
    _, target, weight, upstream = inputs(classes, leaf.shape[:-1].numel(), torch.float32)
    flat = leaf.detach().cpu().reshape(-1, classes)
    expected_loss, expected_gradient = dense(flat, target, weight, upstream, 0.2, 0.0)
    loss = call(leaf, target.to(device.type), weight.to(device.type), 0.2, 0.0)
    assert_near(loss.detach().reshape(-1), expected_loss, torch.float32)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.to(device.type).view(loss.shape))
    assert_near(gradient.reshape(-1, classes), expected_gradient, torch.float32)


@pytest.mark.parametrize("sizes", [[500, 500], [700, 0, 300], [1, 998, 1]], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shards(device: Device, sizes: list[int], smoothing: float) -> None:
    """The shards of a group one after the other in this process: statistics, merge, gradient."""
    logits, target, weight, upstream = (t.to(device.type) for t in inputs(sum(sizes), 8, torch.float32))
    expected_loss, expected_gradient = dense(
        logits.cpu(), target.cpu(), weight.cpu(), upstream.cpu(), smoothing, 1e-3
    )
    module = choose(device.type, max(sizes), True).module
    firsts = [sum(sizes[:k]) for k in range(len(sizes))]
    weights = [
        ClassWeights.of(weight, target, first, size, torch.float32)
        for first, size in zip(firsts, sizes, strict=True)
    ]
    payloads = [
        module.row_statistics(
            logits[:, first : first + size],
            target,
            first_column=first,
            ignore_index=-100,
            smooth=smoothing > 0,
            statistics=False,
            weights=w,
        )
        for first, size, w in zip(firsts, sizes, weights, strict=True)
    ]
    loss, saved, _ = module.merge(
        torch.stack(payloads),
        target,
        total_columns=sum(sizes),
        ignore_index=-100,
        label_smoothing=smoothing,
        z_loss_weight=1e-3,
        statistics=False,
        equal_shards=False,
        weights=weights[0],
    )
    assert_near(loss, expected_loss, torch.float32)
    for first, size, w in zip(firsts, sizes, weights, strict=True):
        shard = VocabShard(None, 0, 1, first, size, sum(sizes), False)
        terms = Terms(shard, -100, smoothing, 1e-3)
        part = logits[:, first : first + size]
        out = torch.empty_like(part)
        backward_pass(module, part, target, saved, upstream, out, terms, w)
        assert_near(out, expected_gradient[:, first : first + size], torch.float32)


def test_compiled_whole(device: Device) -> None:
    if device.name == "interpreter":
        pytest.skip("operators under torch.compile are the same for the interpreter")
    logits, target, weight, upstream = (t.to(device.type) for t in inputs(130, 5, torch.float32))
    _, expected = dense(logits.cpu(), target.cpu(), weight.cpu(), upstream.cpu(), 0.1, 0.0)
    leaf = logits.requires_grad_()
    torch.compile(call, fullgraph=True)(leaf, target, weight, 0.1, 0.0).backward(upstream)
    assert leaf.grad is not None
    assert_near(leaf.grad, expected, torch.float32)


@pytest.mark.parametrize(
    ("weight", "error", "names"),
    [
        (torch.ones(16), ValueError, r"shape \(16,\), expected \(17,\)"),
        (torch.ones(17, dtype=torch.int64), TypeError, "int64"),
        ([1.0] * 17, TypeError, "list"),
        (torch.ones(17, device="meta"), ValueError, "on meta"),
    ],
    ids=["length", "dtype", "list", "device"],
)
def test_bad_weights(weight: torch.Tensor, error: type[Exception], names: str) -> None:
    with pytest.raises(error, match=names):
        call(torch.randn(3, 17), torch.zeros(3, dtype=torch.int64), weight, 0.0, 0.0)
