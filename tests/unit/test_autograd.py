"""How the operation behaves in autograd: retained graphs, overwriting, memory, host synchronisation,
gradcheck, AMP."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Device
from oracle import dense_cross_entropy
from tolerances import assert_gradient_close, assert_loss_close

from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def example(
    device: Device, *leading: int, vocab: int = 80, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (a leaf) and labels on `device`."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*leading, vocab, generator=generator).to(dtype).to(device.type).requires_grad_()
    target = torch.randint(0, vocab, leading, generator=generator).to(device.type)
    return logits, target


# --- more than one backward ---------------------------------------------------------------------------------


def test_two_backwards_on_a_retained_graph_are_equal(device: Device) -> None:
    """HAZARDS 8."""
    logits, target = example(device, 5)
    loss = parallel_cross_entropy(logits, target, 0.1)
    upstream = torch.randn(5, device=device.type)
    (first,) = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
    (doubled,) = torch.autograd.grad(loss, logits, 2 * upstream)
    assert torch.equal(first, kept)
    assert torch.equal(first, second)
    assert torch.equal(doubled, 2 * first)


def test_second_backward_after_overwriting_is_a_clear_error(device: Device) -> None:
    logits, target = example(device, 5)
    loss = parallel_cross_entropy(logits * 1, target, overwrite_input=True)
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwrite_input"):
        loss.sum().backward()


def test_two_losses_over_the_same_logits(device: Device) -> None:
    """Out of place both are right; when the first one overwrites, the second one's backward fails loudly."""
    leaf, target = example(device, 5)
    other_target = target.roll(1)
    logits = leaf * 1
    first = parallel_cross_entropy(logits, target)
    second = parallel_cross_entropy(logits, other_target)
    (first.sum() + second.sum()).backward()
    expected = dense_cross_entropy(leaf, target).gradient + dense_cross_entropy(leaf, other_target).gradient
    torch.testing.assert_close(leaf.grad.double().cpu(), expected, rtol=1e-5, atol=1e-6)

    logits = leaf * 1
    first = parallel_cross_entropy(logits, target, overwrite_input=True)
    second = parallel_cross_entropy(logits, other_target)
    first.sum().backward()
    with pytest.raises(RuntimeError):
        second.sum().backward()


@pytest.mark.parametrize("overwrite", [False, True])
def test_second_order_is_a_clear_error(device: Device, overwrite: bool) -> None:
    """HAZARDS 8: `create_graph=True` fails, in backward or where the gradient is differentiated, with a
    reason."""
    logits, target = example(device, 5)
    loss = parallel_cross_entropy(logits * 1, target, overwrite_input=overwrite)
    with pytest.raises(RuntimeError, match=r"(?i)once_differentiable|second|create_graph|twice"):
        (gradient,) = torch.autograd.grad(loss.sum(), logits, create_graph=True)
        assert gradient.requires_grad, "create_graph=True silently returned a detached gradient"
        gradient.sum().backward()


# --- overwrite_input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_overwriting_returns_the_logits_storage(device: Device, dtype: torch.dtype, transposed: bool) -> None:
    leaf, target = example(device, 3, 4, dtype=dtype)
    reference = dense_cross_entropy(leaf, target)
    logits = leaf.clone()
    inp, labels = (logits.transpose(0, 1), target.t()) if transposed else (logits, target)
    loss = parallel_cross_entropy(inp, labels, overwrite_input=True)
    (gradient,) = torch.autograd.grad(loss.sum(), inp if transposed else logits)
    assert gradient.data_ptr() == logits.data_ptr()
    assert gradient.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    assert gradient.stride() == inp.stride()
    assert_gradient_close(gradient.transpose(0, 1) if transposed else gradient, reference, dtype)


def test_overwriting_is_visible_to_later_readers(device: Device) -> None:
    """The version is bumped: a backward that saved the logits raises instead of reading gradients."""
    leaf, target = example(device, 4)
    logits = leaf * 1
    squares = logits.square().sum()  # saves the logits
    loss = parallel_cross_entropy(logits, target, overwrite_input=True)
    version = logits._version
    loss.sum().backward()
    assert logits._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_overwriting_is_refused_when_the_logits_changed_after_forward(device: Device) -> None:
    leaf, target = example(device, 4)
    for overwrite in (False, True):
        logits = leaf * 1
        loss = parallel_cross_entropy(logits, target, overwrite_input=overwrite)
        logits.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.view(2, 2, -1),
        lambda w: w[:2],
        lambda w: w[:, :-1],
        lambda w: w.t().contiguous().t().t().t(),
    ],
    ids=["view", "rows", "columns", "transposed_copy"],
)
def test_a_view_of_a_leaf_is_not_overwritten(
    device: Device, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    leaf, _ = example(device, 4)
    before = leaf.detach().clone()
    logits = view(leaf)
    target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=device.type)
    if logits._base is leaf:
        with pytest.raises(ValueError, match="leaf"):
            parallel_cross_entropy(logits, target, overwrite_input=True)
    else:  # a copy: may be overwritten
        parallel_cross_entropy(logits, target, overwrite_input=True).sum().backward()
        assert leaf.grad is not None
    assert torch.equal(leaf.detach(), before)


def test_overwriting_a_leaf_is_refused(device: Device) -> None:
    logits, target = example(device, 4)
    before = logits.detach().clone()
    with pytest.raises(ValueError, match="leaf"):
        parallel_cross_entropy(logits, target, overwrite_input=True)
    assert torch.equal(logits.detach(), before)


def test_overwriting_overlapping_logits_is_refused(device: Device) -> None:
    logits, target = example(device, 1)
    expanded = (logits * 1).expand(4, -1)
    with pytest.raises(ValueError, match=r"(?i)overlap|expand|stride"):
        parallel_cross_entropy(expanded, target.expand(4), overwrite_input=True)


def test_out_of_place_gives_a_gradient_of_its_own(device: Device) -> None:
    leaf, target = example(device, 4)
    logits = leaf * 1
    before = logits.detach().clone()
    version = logits._version
    (gradient,) = torch.autograd.grad(parallel_cross_entropy(logits, target).sum(), logits)
    assert gradient.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()
    assert torch.equal(logits.detach(), before)
    assert logits._version == version


# --- memory -------------------------------------------------------------------------------------------------


def peak_extra_bytes(device: Device, function: Callable[[], Any]) -> int:
    """The most memory that `function` held beyond what was allocated before it, as the allocator saw it."""
    if device.type == "cuda":
        gc.collect()  # not in the midst of it what earlier tests left behind
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    allocations = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, size in sorted(allocations, key=lambda event: event[0]):
        held += size
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("transposed", [False, True], ids=["s_b_V", "b_s_V_view"])
def test_megatron_logits_are_never_copied(device: Device, transposed: bool) -> None:
    """HAZARDS 19: [s, b, V] and a transposed view of it, without a logits-sized allocation."""
    sizes = (64, 4, 32_000) if device.name != "interpreter" else (2, 2, 8_000)
    leaf, target = example(device, *sizes[:2], vocab=sizes[2])

    def run() -> None:
        logits, labels = made
        loss = parallel_cross_entropy(logits, labels, overwrite_input=True)
        torch.autograd.grad(loss.sum(), logits)

    for _ in range(2):  # what is compiled or cached on first use is not the operation's
        logits = leaf * 1
        made = (logits.transpose(0, 1), target.t()) if transposed else (logits, target)
        extra = peak_extra_bytes(device, run)
    assert extra < 0.3 * leaf.numel() * leaf.element_size()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_overwriting_needs_no_memory_of_the_logits_size(device: Device, dtype: torch.dtype) -> None:
    """Forward and backward together hold less than 30 % of the logits at any moment; out of place needs
    100 %."""
    leaf, target = example(device, 256 if device.name != "interpreter" else 2, vocab=32_000)
    logits_bytes = leaf.numel() * dtype.itemsize

    def step(overwrite: bool) -> Callable[[], None]:
        logits = leaf.detach().to(dtype, copy=True).requires_grad_() * 1

        def run() -> None:
            loss = parallel_cross_entropy(logits, target, reduce_loss=True, overwrite_input=overwrite)
            torch.autograd.grad(loss, logits)

        return run

    step(True)()  # what is compiled or cached on first use is not the operation's
    step(False)()
    out_of_place = peak_extra_bytes(device, step(False))
    assert out_of_place >= logits_bytes, "the measurement sees no gradient"
    assert out_of_place < 1.3 * logits_bytes
    assert peak_extra_bytes(device, step(True)) < 0.3 * logits_bytes


def test_forward_alone_needs_no_memory_of_the_logits_size(device: Device) -> None:
    leaf, target = example(
        device, 256 if device.name != "interpreter" else 2, vocab=32_000, dtype=torch.bfloat16
    )

    def run() -> None:
        parallel_cross_entropy(leaf, target, 0.1, return_statistics=True)

    run()
    assert peak_extra_bytes(device, run) < 0.3 * leaf.numel() * leaf.element_size()


# --- host synchronisation -----------------------------------------------------------------------------------

SYNCHRONISING = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "equal",
    "allclose",
)


@contextlib.contextmanager
def no_host_synchronisation(monkeypatch: pytest.MonkeyPatch, allowed: tuple[str, ...]) -> Iterator[None]:
    """Everything through which Python reads a tensor's value raises; on a GPU PyTorch's own check is on as
    well.

    `allowed`: what Triton's interpreter does itself to hand tensors to a kernel.
    """

    def refuse(name: str) -> Callable[..., Any]:
        def synchronise(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"Tensor.{name} synchronises with the device")

        return synchronise

    with monkeypatch.context() as patch:
        for name in set(SYNCHRONISING) - set(allowed):
            patch.setattr(torch.Tensor, name, refuse(name))
        for name in ("equal", "allclose", "nonzero"):
            patch.setattr(torch, name, refuse(name))
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("reduce_loss", [False, True])
def test_no_host_synchronisation(
    kernel_device: Device, monkeypatch: pytest.MonkeyPatch, reduce_loss: bool, overwrite: bool
) -> None:
    """HAZARDS 14. Labels are not checked on a GPU; with the interpreter, on the CPU, the check is turned
    off."""
    device = kernel_device
    if device.name == "interpreter":
        monkeypatch.setenv("MCE_CHECK_LABELS", "0")
    leaf, target = example(device, 3, 4)
    target[0, 1] = -100
    upstream = torch.ones((), device=device.type) if reduce_loss else torch.randn(3, 4, device=device.type)
    reference = dense_cross_entropy(
        leaf, target, upstream=upstream, label_smoothing=0.1, reduce_loss=reduce_loss
    )
    logits = leaf * 1
    arguments = (logits, target, 0.1, reduce_loss)
    parallel_cross_entropy(*arguments)  # compiles the kernels
    torch.autograd.grad(parallel_cross_entropy(*arguments).sum(), logits)
    with no_host_synchronisation(monkeypatch, allowed=("cpu",) if device.name == "interpreter" else ()):
        loss, statistics = parallel_cross_entropy(
            *arguments, overwrite_input=overwrite, return_statistics=True
        )
        (gradient,) = torch.autograd.grad(loss, logits, upstream)
    assert statistics.entropy.shape == (3, 4)
    assert_loss_close(loss, reference, torch.float32)
    assert_gradient_close(gradient, reference, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_cuda_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAZARDS 14: forward and backward are captured; a replay computes from the buffers' new contents."""
    monkeypatch.setenv("MCE_IMPLEMENTATION", "triton")
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 1000, generator=generator).cuda().requires_grad_()
    target = torch.randint(0, 1000, (8,), generator=generator).cuda()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss = parallel_cross_entropy(logits, target, 0.1, True, is_cg_capturable=True)
        return loss, torch.autograd.grad(loss, logits)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradient = step()
    with torch.no_grad():
        logits.copy_(torch.randn(8, 1000, generator=generator))
        target.copy_(torch.randint(0, 1000, (8,), generator=generator))
    graph.replay()
    reference = dense_cross_entropy(logits, target, label_smoothing=0.1, reduce_loss=True)
    assert_loss_close(loss, reference, torch.float32)
    assert_gradient_close(gradient, reference, torch.float32)


# --- gradcheck and contexts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"reduce_loss": True, "label_smoothing": 0.3, "z_loss_weight": 0.05},
        {"z_loss_weight": 0.1},
    ],
    ids=str,
)
def test_gradcheck(device: Device, options: dict[str, Any]) -> None:
    # two calls for every element: few of them where calls are slow
    rows, vocab = (1, 2) if device.name == "interpreter" else (2, 5)
    logits, target = example(device, rows, 2, vocab=vocab, dtype=torch.float64)
    target[0, 1] = -100
    assert torch.autograd.gradcheck(lambda x: parallel_cross_entropy(x, target, **options), logits)


def test_statistics_are_not_differentiable(device: Device) -> None:
    logits, target = example(device, 4)
    loss, statistics = parallel_cross_entropy(logits, target, return_statistics=True)
    assert loss.requires_grad
    for name in ("log_sum_exp", "target_log_prob", "entropy", "correct"):
        assert not getattr(statistics, name).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_changes_nothing(device: Device, dtype: torch.dtype) -> None:
    leaf, target = example(device, 6, dtype=dtype)
    reference = dense_cross_entropy(leaf, target, label_smoothing=0.1)
    plain = parallel_cross_entropy(leaf, target, 0.1)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = parallel_cross_entropy(leaf, target, 0.1)
        total = loss.sum()
    assert torch.equal(loss, plain)
    (gradient,) = torch.autograd.grad(total, leaf)
    assert_gradient_close(gradient, reference, dtype)


def test_gradients_flow_through_a_projection(device: Device) -> None:
    """Hidden states and an output layer in front, as in a model; accumulation over two micro-batches."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 6, 8, generator=generator)
    weight = torch.randn(50, 8, generator=generator)
    target = torch.randint(0, 50, (2, 6), generator=generator)
    parameter = weight.clone().to(device.type).requires_grad_()
    for batch in range(2):
        logits = hidden[batch].to(device.type) @ parameter.t()
        parallel_cross_entropy(logits, target[batch].to(device.type), overwrite_input=True).sum().backward()
    exact = weight.double().requires_grad_()
    torch.nn.functional.cross_entropy(
        (hidden.double() @ exact.t()).flatten(0, 1), target.flatten(), reduction="sum"
    ).backward()
    torch.testing.assert_close(parameter.grad.double().cpu(), exact.grad, rtol=1e-4, atol=1e-4)
