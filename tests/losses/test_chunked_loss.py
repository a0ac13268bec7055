"""ChunkedLossWrapper on one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from dense import Problem, all_terms, assert_close, assert_number, reference
from poison import poisoned_empty
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss
from megatron_ce_adaptor.chunked import walk


def linear(p: Problem) -> nn.Linear:
    layer = nn.Linear(p.weight.shape[1], p.weight.shape[0], bias=p.bias is not None, dtype=p.weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(p.weight)
        if p.bias is not None:
            layer.bias.copy_(p.bias)
    return layer


def criterion(layer: nn.Module, chunks: int, **terms):
    options = {key: terms.pop(key) for key in ("accumulation_dtype",) if key in terms}
    return ChunkedLossWrapper(CrossEntropyLoss(**terms), num_chunks=chunks, **options).set_lm_head(layer)


def upstream_of(seed: int) -> float:
    return float(torch.empty(()).uniform_(-2, 2, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("chunks", [1, 4, 10, 40])
@pytest.mark.parametrize("shape", [(3, 7), (21,), (2, 2, 5)])
def test_equals_dense_for_every_term(shape, chunks):
    # HAZARDS 34: 21 tokens in 4 chunks leave a tail
    for i, bias in itertools.product(range(5), (False, True)):
        p = Problem.make(shape, 6, 11, bias=bias, seed=i)
        terms = all_terms(p)[i]
        upstream = upstream_of(i + chunks)
        layer, hidden = linear(p), p.hidden.clone().requires_grad_()
        expected = reference(p, divisor=p.valid, upstream=upstream, **terms)
        with poisoned_empty():
            call = criterion(layer, chunks, report_metrics=True, **terms)
            loss, metrics = call(hidden, p.labels, p.valid)
            (loss * upstream).backward()
        assert loss.shape == () and loss.dtype == torch.float64
        assert_number(loss, expected.loss, "loss")
        assert_close(hidden.grad, expected.hidden, "hidden")
        assert_close(layer.weight.grad, expected.weight, "weight")
        if bias:
            assert_close(layer.bias.grad, expected.bias, "bias")
        assert metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert_number(metrics[name], value, name)


def test_sizes_of_chunks(monkeypatch):
    sizes = []
    original = walk.dispatch.forward_pass

    def spy(module, logits, *rest):
        sizes.append(len(logits))
        return original(module, logits, *rest)

    monkeypatch.setattr(walk.dispatch, "forward_pass", spy)
    for tokens, chunks, expected in (
        (21, 4, [6, 6, 6, 3]),
        (3, 8, [1, 1, 1]),
        (8192, 4, [2048] * 4),
        (8192, 3, [2816, 2816, 2560]),  # multiples of 128
        (8200, 8, [1152] * 7 + [136]),
    ):
        p = Problem.make((tokens,), 2, 3, dtype=torch.float32)
        criterion(linear(p), chunks)(p.hidden, p.labels)
        assert sizes == expected
        sizes.clear()


def test_without_a_count_it_is_the_sum():
    p = Problem.make((4, 5), 6, 11)
    loss, metrics = criterion(linear(p), 3, report_metrics=True)(p.hidden, p.labels)
    assert_number(loss, reference(p, divisor=1).loss, "loss")
    for name, value in reference(p, divisor=p.valid).metrics.items():
        assert_number(metrics[name], value, name)


def test_unequal_micro_batches_add_up_to_the_global_mean():
    # HAZARDS 17
    p = Problem.make((2, 9), 6, 11, seed=3)
    p.labels[0, :7] = -100
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()
    call = criterion(layer, 4)
    total = 0.0
    for i in range(2):
        loss, _ = call(hidden[i], p.labels[i], torch.tensor(p.valid))
        loss.backward()  # the second adds to existing .grad
        total += loss.detach()
    expected = reference(p, divisor=p.valid)
    assert_number(total, expected.loss, "loss")
    assert_close(hidden.grad, expected.hidden, "hidden")
    assert_close(layer.weight.grad, expected.weight, "weight")
    assert_close(layer.bias.grad, expected.bias, "bias")


def test_all_labels_ignored():
    # HAZARDS 28
    p = Problem.make((2, 3), 4, 5, ignored=2.0)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()
    loss, metrics = criterion(layer, 2, report_metrics=True)(hidden, p.labels, 0)
    loss.backward()
    assert not loss.any() and not hidden.grad.any() and not layer.weight.grad.any()
    assert all(float(v) == 0 for v in metrics.values())


def test_no_tokens_on_this_rank():
    p = Problem.make((0, 3), 4, 5)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()
    with poisoned_empty():
        loss, _ = criterion(layer, 2)(hidden, p.labels, 7)
        loss.backward()
    assert not loss.any() and hidden.grad.shape == (0, 3, 4) and not layer.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulation_dtype", [None, torch.float32])
def test_low_precision(dtype, accumulation_dtype):
    p = Problem.make((4, 64), 32, 101, dtype=dtype, bias=True)
    p.weight.mul_(0.2)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()
    upstream = 1 / 3
    expected = reference(p, divisor=p.valid, upstream=upstream)
    loss, _ = criterion(layer, 8, accumulation_dtype=accumulation_dtype)(hidden, p.labels, p.valid)
    (loss * upstream).backward()
    eps = torch.finfo(dtype).eps
    assert loss.dtype == torch.float32
    assert_number(loss, expected.loss, "loss", 2 * eps)
    assert hidden.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    assert_close(hidden.grad, expected.hidden, "hidden", 3 * eps)
    assert_close(layer.weight.grad, expected.weight, "weight", 3 * eps)
    assert_close(layer.bias.grad, expected.bias, "bias", 3 * eps)


def test_accumulating_in_fp32_loses_less():
    p = Problem.make((1, 1024), 16, 31, dtype=torch.bfloat16, bias=False)
    expected = reference(p, divisor=p.valid)
    errors = []
    for accumulation_dtype in (None, torch.float32):
        layer = linear(p)
        loss, _ = criterion(layer, 64, accumulation_dtype=accumulation_dtype)(p.hidden, p.labels, p.valid)
        loss.backward()
        errors.append(float((layer.weight.grad.double() - expected.weight).norm() / expected.weight.norm()))
    assert errors[1] < 0.5 * errors[0]


def test_fp16_with_a_grad_scaler_does_not_underflow():
    """1/N of a probability is no fp16 number, but 65536 times it is."""
    p = Problem.make((1, 4096), 8, 512, dtype=torch.float16, bias=False, ignored=0.0)
    p.weight.mul_(0.05)
    scale = 65536.0
    expected = reference(p, divisor=p.valid, upstream=scale)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()
    loss, _ = criterion(layer, 4)(hidden, p.labels, p.valid)
    (loss * scale).backward()
    assert_close(hidden.grad, expected.hidden, "hidden", 2e-3)
    assert_close(layer.weight.grad, expected.weight, "weight", 2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    p = Problem.make((2, 40), 16, 37, dtype=torch.float32)
    p.weight.mul_(0.3)
    expected = reference(p, divisor=p.valid)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        loss, _ = criterion(layer, 4)(hidden, p.labels, p.valid)
    loss.backward()
    eps = torch.finfo(dtype).eps
    assert hidden.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert_number(loss, expected.loss, "loss", eps)
    assert_close(hidden.grad, expected.hidden, "hidden", 2 * eps)
    assert_close(layer.weight.grad, expected.weight, "weight", 2 * eps)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "both"])
def test_what_is_frozen_gets_no_gradient(frozen, monkeypatch):
    p = Problem.make((2, 9), 6, 11)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_(frozen not in ("hidden",))
    layer.weight.requires_grad_(frozen not in ("weight", "both"))
    layer.bias.requires_grad_(frozen not in ("bias", "both"))
    buffers = []
    original = walk.Gradients.__init__
    monkeypatch.setattr(
        walk.Gradients,
        "__init__",
        lambda self, *a: (buffers.append([x is not None for x in a]), original(self, *a))[1],
    )
    expected = reference(p, divisor=p.valid)
    loss, _ = criterion(layer, 4)(hidden, p.labels, p.valid)
    loss.backward()
    wanted = [hidden.requires_grad, layer.weight.requires_grad, layer.bias.requires_grad]
    assert buffers == [wanted]
    for x, want, value in zip(
        (hidden, layer.weight, layer.bias),
        wanted,
        (expected.hidden, expected.weight, expected.bias),
        strict=True,
    ):
        if want:
            assert_close(x.grad, value, "gradient")
        else:
            assert x.grad is None


def test_no_gradient_is_computed_without_need(monkeypatch):
    p = Problem.make((2, 9), 6, 11)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()

    def refuse(*args, **kwargs):
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(walk.Gradients, "__init__", refuse)
    call = criterion(layer, 4, report_metrics=True)
    expected = reference(p, divisor=p.valid)
    with torch.no_grad():
        loss, metrics = call(hidden, p.labels, p.valid)
    assert not loss.requires_grad
    assert_number(loss, expected.loss, "loss")
    assert_number(metrics["entropy/mean"], expected.metrics["entropy/mean"], "entropy")
    with torch.inference_mode():
        assert_number(call(hidden, p.labels, p.valid)[0], expected.loss, "loss")
    layer.requires_grad_(False)
    assert not call(hidden.detach(), p.labels, p.valid)[0].requires_grad
    with pytest.raises(AssertionError, match="a gradient was computed"):
        call(hidden, p.labels, p.valid)


def test_tied_weight_and_earlier_layers():
    p = Problem.make((2, 9), 6, 11, bias=False)
    tokens = p.labels.clamp(min=0)
    embedding = nn.Embedding(11, 6, dtype=torch.float64)
    layer = nn.Linear(6, 11, bias=False, dtype=torch.float64)
    layer.weight = embedding.weight
    middle = nn.Linear(6, 6, dtype=torch.float64)
    loss, _ = criterion(layer, 4)(middle(embedding(tokens)).tanh(), p.labels, p.valid)
    loss.backward()
    grads = [embedding.weight.grad.clone(), middle.weight.grad.clone()]
    embedding.weight.grad = middle.weight.grad = None
    dense, _ = CrossEntropyLoss()(layer(middle(embedding(tokens)).tanh()), p.labels, p.valid)
    dense.backward()
    assert_close(grads[0], embedding.weight.grad, "embedding")
    assert_close(grads[1], middle.weight.grad, "middle")


def test_autograd_grad_and_hooks_see_the_parameters():
    # HAZARDS 23
    p = Problem.make((2, 9), 6, 11)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()
    expected = reference(p, divisor=p.valid)
    loss, _ = criterion(layer, 4)(hidden, p.labels, p.valid)
    grads = torch.autograd.grad(loss, [hidden, layer.weight, layer.bias])
    for actual, wanted in zip(grads, (expected.hidden, expected.weight, expected.bias), strict=True):
        assert_close(actual, wanted, "gradient")
    assert layer.weight.grad is None
    calls = []
    layer.weight.register_post_accumulate_grad_hook(lambda w: calls.append(w.grad.clone()))
    criterion(layer, 4)(hidden, p.labels, p.valid)[0].backward()
    assert len(calls) == 1
    assert_close(calls[0], expected.weight, "weight in the hook")


def test_the_gradient_is_handed_over_without_a_copy(monkeypatch):
    p = Problem.make((2, 9), 6, 11, bias=False)
    layer = linear(p)
    kept = []
    original = walk.Gradients.__init__
    monkeypatch.setattr(
        walk.Gradients, "__init__", lambda self, *a: (kept.append(a[1].data_ptr()), original(self, *a))[1]
    )
    loss, _ = criterion(layer, 4)(p.hidden, p.labels, p.valid)
    (loss * 0.5).backward()
    assert layer.weight.grad.data_ptr() == kept[0]
    assert_close(layer.weight.grad, reference(p, divisor=p.valid, upstream=0.5).weight, "weight")


def test_second_backward_and_second_derivatives_are_refused():
    p = Problem.make((2, 9), 6, 11)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()
    loss, _ = criterion(layer, 4)(hidden, p.labels, p.valid)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    with pytest.raises(RuntimeError, match="has given them away in the first backward"):
        loss.backward()
    assert torch.equal(hidden.grad, once)
    loss, _ = criterion(layer, 4)(hidden, p.labels, p.valid)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_activation_checkpointing(use_reentrant):
    p = Problem.make((2, 9), 6, 11)
    layer, hidden = linear(p), p.hidden.clone().requires_grad_()
    call = criterion(layer, 4)
    loss = checkpoint(lambda h: call(h.sin(), p.labels, p.valid)[0], hidden, use_reentrant=use_reentrant)
    (loss * 0.25).backward()
    p.hidden = hidden.detach().sin()
    expected = reference(p, divisor=p.valid, upstream=0.25)
    assert_number(loss, expected.loss, "loss")
    assert_close(hidden.grad, expected.hidden * hidden.detach().cos(), "hidden")
    assert_close(layer.weight.grad, expected.weight, "weight")


def test_strided_hidden_and_labels():
    p = Problem.make((6, 10), 6, 11)
    layer = linear(p)
    wide = torch.randn(10, 6, 12, dtype=torch.float64)
    hidden = wide[..., ::2].transpose(0, 1).requires_grad_()
    p.hidden = hidden.detach()
    labels = p.labels.to(torch.int32).t().contiguous().t()
    expected = reference(p, divisor=p.valid)
    loss, _ = criterion(layer, 4)(hidden, labels, p.valid)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert_number(loss, expected.loss, "loss")
    assert_close(grad, expected.hidden, "hidden")


def test_compiled_heads_and_callers():
    p = Problem.make((2, 9), 6, 11)
    expected = reference(p, divisor=p.valid)
    compiled = torch.compile(linear(p), backend="eager")
    in_place = linear(p)
    in_place.compile(backend="eager")
    for layer in (compiled, in_place):
        hidden = p.hidden.clone().requires_grad_()
        loss, _ = criterion(layer, 4)(hidden, p.labels, p.valid)
        loss.backward()
        assert_close(hidden.grad, expected.hidden, "hidden")
    call = criterion(linear(p), 4)
    hidden = p.hidden.clone().requires_grad_()
    step = torch.compile(lambda h: call(h * 1.0, p.labels, p.valid)[0] * 2.0, backend="eager")
    loss = step(hidden)
    loss.backward()
    assert_number(loss, 2 * expected.loss, "loss")
    assert_close(hidden.grad, 2 * expected.hidden, "hidden")


def test_bare_and_module_stays_as_it_was():
    p = Problem.make((2, 9), 6, 11)
    layer = linear(p)
    seen = []
    layer.register_forward_pre_hook(lambda m, args: seen.append("before"))
    layer.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)))
    call = ChunkedLossWrapper(CrossEntropyLoss(bare=True), num_chunks=4)
    assert call.set_lm_head(layer) is call
    with pytest.warns(UserWarning, match=r"does not run lm_head's forward hooks \(.*<lambda>\)"):
        loss = call(p.hidden, p.labels, p.valid)
    assert isinstance(loss, torch.Tensor) and seen == ["before"]
    with pytest.raises(ValueError, match="labels"), pytest.warns(UserWarning, match="forward hooks"):
        call(p.hidden, p.labels[:1], p.valid)
    layer(p.hidden)  # after the error, too
    assert seen[-1] == (2, 9, 11) and "forward" not in vars(layer)
    copy.deepcopy(layer)
