"""Loss and gradient against the fp64 reference over dtypes, shapes, layouts and options, with random
upstream gradients."""

from __future__ import annotations

import pytest
import torch
from conftest import Device
from layouts import LABEL_LAYOUTS, LAYOUTS, UPSTREAM_LAYOUTS, labels_in, upstream_in
from oracle import dense_cross_entropy
from tolerances import assert_gradient_close, assert_loss_close, compute_dtype

from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
VOCABULARIES = [1, 2, 3, 31, 127, 1000, 4097, 32001]


def random_logits(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)


def check(
    device: Device,
    logits: torch.Tensor,
    target: torch.Tensor,
    upstream: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    ignore_idx: int = -100,
) -> None:
    """Runs `logits` (a CPU tensor of any strides) forward and backward on `device` and compares with the
    reference."""
    reference = dense_cross_entropy(
        logits,
        target,
        upstream=upstream,
        label_smoothing=label_smoothing,
        reduce_loss=reduce_loss,
        ignore_idx=ignore_idx,
    )
    leaf = logits.to(device.type).detach().requires_grad_()
    loss = parallel_cross_entropy(
        leaf, target.to(device.type), label_smoothing, reduce_loss, None, ignore_idx
    )
    assert_loss_close(loss, reference, logits.dtype)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.to(device.type))
    assert_gradient_close(gradient, reference, logits.dtype)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vocabulary_sizes(device: Device, dtype: torch.dtype, vocab: int, label_smoothing: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = device.rows(3, vocab)
    logits = random_logits(rows, vocab, dtype=dtype, generator=generator)
    target = torch.randint(0, vocab, (rows,), generator=generator)
    target[0] = vocab - 1
    upstream = torch.randn(rows, generator=generator).to(compute_dtype(dtype))
    check(device, logits, target, upstream, label_smoothing=label_smoothing)


@pytest.mark.parametrize("reduce_loss", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_counts(device: Device, dtype: torch.dtype, rows: int, reduce_loss: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = random_logits(rows, 127, dtype=dtype, generator=generator)
    target = torch.randint(0, 127, (rows,), generator=generator)
    upstream = torch.randn(() if reduce_loss else (rows,), generator=generator).to(compute_dtype(dtype))
    check(device, logits, target, upstream, reduce_loss=reduce_loss)


def test_many_rows(device: Device) -> None:
    """More rows than one block of rows, or one wave of programs, takes."""
    generator = torch.Generator().manual_seed(7)
    rows = device.rows(5000, 200)
    logits = random_logits(rows, 37, dtype=torch.float32, generator=generator)
    target = torch.randint(0, 37, (rows,), generator=generator)
    check(device, logits, target, torch.randn(rows, generator=generator), label_smoothing=0.1)


@pytest.mark.parametrize("ignore", ["none", "default", "inside_vocabulary"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduce_loss", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_options(
    device: Device, dtype: torch.dtype, reduce_loss: bool, label_smoothing: float, ignore: str
) -> None:
    generator = torch.Generator().manual_seed(11)
    logits = random_logits(3, 11, 131, dtype=dtype, generator=generator)
    target = torch.randint(0, 131, (3, 11), generator=generator)
    ignore_idx = 5 if ignore == "inside_vocabulary" else -100
    if ignore != "none":
        target[torch.rand(3, 11, generator=generator) < 0.3] = ignore_idx
        target[0, :2] = ignore_idx
    upstream = torch.randn(() if reduce_loss else (3, 11), generator=generator)
    check(
        device,
        logits,
        target,
        upstream,
        label_smoothing=label_smoothing,
        reduce_loss=reduce_loss,
        ignore_idx=ignore_idx,
    )


def test_divisor_counts_only_targets_that_are_not_ignored(device: Device) -> None:
    """HAZARDS 4: 5 of 64 targets ignored; the loss is 0-d."""
    generator = torch.Generator().manual_seed(12)
    logits = random_logits(2, 32, 50, dtype=torch.float32, generator=generator)
    target = torch.randint(0, 50, (2, 32), generator=generator)
    target[0, 3:8] = -100
    check(device, logits, target, torch.tensor(1.0), reduce_loss=True)


def test_unreduced_gradient_carries_no_divisor(device: Device) -> None:
    """HAZARDS 1: with an upstream gradient of 1 the gradient of a row does not depend on how many rows
    there are."""
    generator = torch.Generator().manual_seed(13)
    logits = random_logits(8, 20, dtype=torch.float32, generator=generator).to(device.type)
    target = torch.randint(0, 20, (8,), generator=generator).to(device.type)
    gradients = []
    for rows in (8, 1):
        leaf = logits[:rows].clone().requires_grad_()
        parallel_cross_entropy(leaf, target[:rows]).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0][:1], gradients[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [37, 130])
def test_logits_layouts(device: Device, dtype: torch.dtype, layout: str, vocab: int) -> None:
    """HAZARDS 5: any strides; the parent stays bit-identical, its gradient is zero outside of the view."""
    generator = torch.Generator().manual_seed(17)
    spec = LAYOUTS[layout]
    parent = random_logits(*spec.parent_shape(vocab), dtype=dtype, generator=generator).to(device.type)
    before = parent.clone()
    parent.requires_grad_()
    logits = spec.view(parent)
    leading = tuple(logits.shape[:-1])
    target = labels_in("int64", leading, vocab, generator)
    upstream = upstream_in("first_is_zero", leading, torch.float32, generator)
    reference = dense_cross_entropy(logits, target, upstream=upstream, label_smoothing=0.1)

    loss = parallel_cross_entropy(logits, target.to(device.type), 0.1)
    assert_loss_close(loss, reference, dtype)
    view_gradient, parent_gradient = torch.autograd.grad(loss, [logits, parent], upstream.to(device.type))
    assert_gradient_close(view_gradient, reference, dtype)
    assert torch.equal(parent.detach(), before)
    if not spec.overlapping:
        assert torch.equal(spec.view(parent_gradient), view_gradient)
        spec.view(parent_gradient).zero_()
        assert not parent_gradient.any()


@pytest.mark.parametrize("layout", [name for name, spec in LAYOUTS.items() if not spec.overlapping])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_layouts_overwritten(device: Device, dtype: torch.dtype, layout: str) -> None:
    """With overwrite_input the gradient goes into the view's elements of the parent and nowhere else."""
    generator = torch.Generator().manual_seed(19)
    spec = LAYOUTS[layout]
    leaf = (
        random_logits(*spec.parent_shape(67), dtype=dtype, generator=generator)
        .to(device.type)
        .requires_grad_()
    )
    parent = leaf.clone()
    before = parent.detach().clone()
    logits = spec.view(parent)
    leading = tuple(logits.shape[:-1])
    target = labels_in("int64", leading, 67, generator)
    upstream = upstream_in("first_is_zero", leading, torch.float32, generator)
    reference = dense_cross_entropy(logits, target, upstream=upstream)

    loss = parallel_cross_entropy(logits, target.to(device.type), overwrite_input=True)
    assert_loss_close(loss, reference, dtype)
    assert torch.equal(parent.detach(), before)
    (leaf_gradient,) = torch.autograd.grad(loss, leaf, upstream.to(device.type))
    assert_gradient_close(spec.view(leaf_gradient), reference, dtype)

    after = parent.detach().clone()
    assert_gradient_close(spec.view(after), reference, dtype)
    spec.view(after).zero_()
    spec.view(before).zero_()
    assert torch.equal(after, before)
    spec.view(leaf_gradient).zero_()
    assert not leaf_gradient.any()


@pytest.mark.parametrize("layout", LABEL_LAYOUTS)
@pytest.mark.parametrize("leading", [(12,), (3, 4), (4, 1)], ids=str)
def test_label_layouts(device: Device, leading: tuple[int, ...], layout: str) -> None:
    generator = torch.Generator().manual_seed(23)
    logits = random_logits(*leading, 61, dtype=torch.float32, generator=generator)
    target = labels_in(layout, leading, 61, generator)
    reference = dense_cross_entropy(logits, target)
    labels = target.to(device.type)
    before = labels.clone()
    leaf = logits.to(device.type).requires_grad_()
    loss = parallel_cross_entropy(leaf, labels)
    assert_loss_close(loss, reference, torch.float32)
    loss.sum().backward()
    assert_gradient_close(leaf.grad, reference, torch.float32)
    assert torch.equal(labels, before)


@pytest.mark.parametrize("layout", UPSTREAM_LAYOUTS)
@pytest.mark.parametrize("leading", [(10,), (2, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("overwrite", [False, True])
def test_upstream_layouts(device: Device, leading: tuple[int, ...], layout: str, overwrite: bool) -> None:
    """HAZARDS 2 and 3: every row uses its own upstream gradient, however it is stored."""
    generator = torch.Generator().manual_seed(29)
    logits = random_logits(*leading, 43, dtype=torch.float32, generator=generator)
    target = torch.randint(0, 43, leading, generator=generator)
    upstream = upstream_in(layout, leading, torch.float32, generator)
    reference = dense_cross_entropy(logits, target, upstream=upstream)
    leaf = logits.to(device.type).requires_grad_()
    loss = parallel_cross_entropy(leaf * 1, target.to(device.type), overwrite_input=overwrite)
    on_device = upstream.to(device.type)
    if layout == "expanded":
        on_device = on_device.flatten()[0].expand(leading)
    (gradient,) = torch.autograd.grad(loss, leaf, on_device)
    assert_gradient_close(gradient, reference, torch.float32)


def test_mean_over_a_loss_mask(device: Device) -> None:
    """The loss of a training step: masked, summed, divided; the gradient of a masked row is exactly zero."""
    generator = torch.Generator().manual_seed(31)
    logits = random_logits(4, 6, 90, dtype=torch.bfloat16, generator=generator)
    target = torch.randint(0, 90, (4, 6), generator=generator)
    mask = (torch.rand(4, 6, generator=generator) > 0.4).float()
    mask[0, 0] = 0.0
    reference = dense_cross_entropy(logits, target, upstream=mask / mask.sum())
    leaf = logits.to(device.type).requires_grad_()
    on_device = mask.to(device.type)
    loss = parallel_cross_entropy(leaf.transpose(0, 1), target.t().to(device.type)).transpose(0, 1)
    ((loss * on_device).sum() / on_device.sum()).backward()
    assert_gradient_close(leaf.grad, reference, torch.bfloat16)
    assert not leaf.grad[on_device == 0].any()


@pytest.mark.parametrize("shape", [(0, 7), (0, 3, 7), (3, 0, 7)], ids=str)
@pytest.mark.parametrize("reduce_loss", [False, True])
def test_no_rows(device: Device, shape: tuple[int, ...], reduce_loss: bool) -> None:
    leaf = torch.zeros(shape, device=device.type, requires_grad=True)
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device.type)
    loss = parallel_cross_entropy(leaf, target, 0.1, reduce_loss)
    assert loss.shape == (() if reduce_loss else shape[:-1])
    loss.sum().backward()
    assert loss.sum().item() == 0.0
    assert leaf.grad.shape == shape


def test_without_gradient(device: Device) -> None:
    """Logits that need no gradient, and a call under no_grad: a loss that needs none either."""
    generator = torch.Generator().manual_seed(37)
    logits = random_logits(4, 50, dtype=torch.float32, generator=generator)
    target = torch.randint(0, 50, (4,), generator=generator)
    reference = dense_cross_entropy(logits, target)
    loss = parallel_cross_entropy(logits.to(device.type), target.to(device.type))
    assert not loss.requires_grad
    assert_loss_close(loss, reference, torch.float32)
    with torch.no_grad():
        loss = parallel_cross_entropy(logits.to(device.type).requires_grad_(), target.to(device.type))
    assert not loss.requires_grad
    assert_loss_close(loss, reference, torch.float32)


def test_uninitialised_memory_is_poisoned() -> None:
    """The guard that the other tests rely on."""
    for tensor in (
        torch.empty(3),
        torch.empty_like(torch.ones(3)),
        torch.empty_strided((3,), (1,)),
        torch.ones(3).new_empty(2),
    ):
        assert tensor.isnan().all()
    assert not torch.empty(3, dtype=torch.int64).is_floating_point()


def test_one_kernel_serves_every_alignment_and_label_dtype(kernel_device: Device) -> None:
    """A compiled kernel is kept by what it depends on: the same shape at another address, other labels."""
    buffer = torch.randn(6 * 64 + 8, generator=torch.Generator().manual_seed(3)).to(kernel_device.type)
    for offset in (0, 1, 4, 0, 3):
        for label_dtype in (torch.int64, torch.int32, torch.int64):
            logits = buffer[offset : offset + 6 * 64].view(6, 64)
            target = torch.arange(6, device=kernel_device.type).to(label_dtype)
            leaf = logits.detach().requires_grad_()
            loss = parallel_cross_entropy(leaf, target)
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
            reference = dense_cross_entropy(logits, target)
            assert_loss_close(loss, reference, torch.float32)
            assert_gradient_close(gradient, reference, torch.float32)
