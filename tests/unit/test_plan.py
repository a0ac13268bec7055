"""Calls that are alike share a plan: each still gets its own numbers, whatever was called before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Device
from oracle import dense_cross_entropy
from poison import poisoned_empty
from tolerances import assert_gradient_close, assert_loss_close
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ce_adaptor import parallel_cross_entropy, plan
from megatron_ce_adaptor.implementations import last_used
from megatron_ce_adaptor.plan import plan_of

VOCAB = 40


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    plan._plans.clear()
    yield
    plan._plans.clear()


def check(logits: Tensor, target: Tensor, **options: Any) -> None:
    """Loss and gradient of logits that are an intermediate result, against the dense ones."""
    upstream = torch.randn(logits.shape[:-1], generator=torch.Generator().manual_seed(3)).double()
    upstream = upstream.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    known = {k: v for k, v in options.items() if k not in ("overwrite_input", "return_statistics")}
    expected = dense_cross_entropy(logits, target, upstream=upstream, **known)
    result = parallel_cross_entropy(logits, target, **options)
    loss = result if isinstance(result, Tensor) else result[0]
    assert_loss_close(loss, expected, logits.dtype)
    (gradient,) = torch.autograd.grad(loss, logits, upstream.to(logits.device))
    assert_gradient_close(gradient, expected, logits.dtype)


def intermediate(device: Device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device.type, dtype)
    return values.requires_grad_() * 2


def labels(device: Device, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    drawn = torch.randint(0, VOCAB - 8, shape, generator=torch.Generator().manual_seed(5))
    return drawn.to(device.type, dtype)


def behind_the_boundary(device: Device) -> Tensor:
    """Logits whose storage itself begins between two 16-byte boundaries."""
    raw = np.zeros(4 * VOCAB + 8, dtype=np.float32)
    skip = (-raw.ctypes.data // 4) % 4 + 1
    values = torch.from_numpy(raw[skip : skip + 4 * VOCAB]).view(4, VOCAB)
    values.copy_(torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(8)))
    assert device.type != "cpu" or (values.data_ptr() % 16 == 4 and values.storage_offset() == 0)
    return _Through.apply(values.to(device.type).requires_grad_())


class _Through(torch.autograd.Function):
    """The same memory as an intermediate result that is no view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


# Each is a call that differs from the first one in a thing or two.
CALLS: dict[str, Callable[[Device], None]] = {
    "plain": lambda d: check(intermediate(d, 4, VOCAB), labels(d, 4)),
    "column slice": lambda d: check(intermediate(d, 4, VOCAB + 24)[:, :VOCAB], labels(d, 4)),
    "transposed": lambda d: check(intermediate(d, VOCAB, 4).t(), labels(d, 4)),
    "offset of 4 bytes": lambda d: check(intermediate(d, 4 * VOCAB + 1)[1:].view(4, VOCAB), labels(d, 4)),
    "unaligned storage": lambda d: check(behind_the_boundary(d), labels(d, 4)),
    "int32 labels": lambda d: check(intermediate(d, 4, VOCAB), labels(d, 4, dtype=torch.int32)),
    "strided labels": lambda d: check(intermediate(d, 4, VOCAB), labels(d, 4, 3)[:, 1]),
    "expanded labels": lambda d: check(intermediate(d, 4, VOCAB), labels(d, 1).expand(4)),
    "smoothing": lambda d: check(intermediate(d, 4, VOCAB), labels(d, 4), label_smoothing=0.1),
    "more smoothing": lambda d: check(intermediate(d, 4, VOCAB), labels(d, 4), label_smoothing=0.3),
    "z-loss": lambda d: check(intermediate(d, 4, VOCAB), labels(d, 4), z_loss_weight=0.1),
    "ignored label": lambda d: check(
        intermediate(d, 4, VOCAB), labels(d, 4), ignore_idx=int(labels(d, 4)[1])
    ),
    "statistics": lambda d: check(intermediate(d, 4, VOCAB), labels(d, 4), return_statistics=True),
    "in place": lambda d: check(intermediate(d, 4, VOCAB), labels(d, 4), overwrite_input=True),
    "3-D": lambda d: check(intermediate(d, 2, 2, VOCAB), labels(d, 2, 2)),
    "3-D transposed": lambda d: check(intermediate(d, 2, 2, VOCAB).transpose(0, 1), labels(d, 2, 2)),
    "one row more": lambda d: check(intermediate(d, 5, VOCAB), labels(d, 5)),
    "bf16": lambda d: check(intermediate(d, 4, VOCAB, dtype=torch.bfloat16), labels(d, 4)),
}


@pytest.mark.parametrize("backwards", [False, True])
def test_calls_of_many_kinds_in_turn(device: Device, backwards: bool) -> None:
    """Twice, so that each kind makes its plan among the others' and then finds it."""
    for name in 2 * (list(CALLS)[::-1] if backwards else list(CALLS)):
        try:
            CALLS[name](device)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


KINDS: dict[str, Callable[[Device], tuple[Tensor, Tensor]]] = {
    "strided logits": lambda d: (intermediate(d, 4, 2 * VOCAB)[:, :VOCAB], labels(d, 4)),
    "strided labels": lambda d: (intermediate(d, 4, VOCAB), labels(d, 4, 3)[:, 1]),
    "transposed logits": lambda d: (intermediate(d, 2, 3, VOCAB).transpose(0, 1), labels(d, 3, 2)),
    "logits at an offset": lambda d: (intermediate(d, 4 * VOCAB + 1)[1:].view(4, VOCAB), labels(d, 4)),
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_tensors_that_come_back_elsewhere(device: Device, kind: str, overwrite: bool) -> None:
    """Hooks that offload or pack what is saved give back tensors of their own strides and alignment, after
    and before a call without hooks."""

    def packed(x: Tensor) -> Tensor:
        return x.detach().clone(memory_format=torch.contiguous_format)

    for hooked in (False, True, False):
        logits, target = KINDS[kind](device)
        if not hooked:
            check(logits, target, overwrite_input=overwrite)
            continue
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x):
            check(logits, target, overwrite_input=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("statistics", [False, True])
def test_later_calls_are_as_the_first(device: Device, overwrite: bool, statistics: bool) -> None:
    """Where an implementation has a shorter way for them: with other contents and upstream gradients."""
    options = {"overwrite_input": overwrite, "return_statistics": statistics, "z_loss_weight": 0.1}
    target = labels(device, 4)
    for seed in range(3):
        with poisoned_empty():
            check(intermediate(device, 4, VOCAB, seed=seed), target, **options)
    (only,) = plan._plans.values()
    shorter = device.name != "reference" and only.module.__name__.endswith(".cuda")
    assert (only.memo.forward is not None) == (only.memo.gradient is not None) == shorter
    # one upstream gradient for all: another stride, hence not the shorter way
    logits = intermediate(device, 4, VOCAB)
    first = torch.autograd.grad(parallel_cross_entropy(logits, target).sum(), logits)[0]
    check(intermediate(device, 4, VOCAB, seed=9), target, **options)
    logits = intermediate(device, 4, VOCAB)
    last = torch.autograd.grad(parallel_cross_entropy(logits, target).sum(), logits)[0]
    assert torch.equal(first, last)


class OneOfMany:
    """As much of a process group as a plan asks for."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


def test_a_group_at_a_dead_ones_address() -> None:
    logits, target = torch.randn(2, VOCAB), torch.zeros(2, dtype=torch.int64)

    def found(group: OneOfMany) -> plan.Plan:
        return plan_of(logits, target, -100, 0.0, 0.0, False, group)

    group = OneOfMany(2)
    address, gone = id(group), weakref.ref(group)
    assert found(group).terms.shard.total_columns == 2 * VOCAB
    del group
    assert gone() is None, "a plan keeps its group alive"
    kept = []
    for _ in range(1000):
        kept.append(OneOfMany(4))
        if id(kept[-1]) == address:
            break
    else:
        pytest.skip("no object was put where the dead one was")
    assert found(kept[-1]).terms.shard.total_columns == 4 * VOCAB


def test_plans_keep_no_tensor_alive(device: Device) -> None:
    logits, target = intermediate(device, 4, VOCAB), labels(device, 4)
    alive = [weakref.ref(logits), weakref.ref(target)]
    parallel_cross_entropy(logits, target, return_statistics=True)[0].sum().backward()
    assert len(plan._plans) == 1
    del logits, target
    assert [ref() for ref in alive] == [None, None]


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MOST_PLANS", 3)
    for rows in range(1, 9):
        parallel_cross_entropy(torch.randn(rows, VOCAB), torch.zeros(rows, dtype=torch.int64))
        assert len(plan._plans) <= 3


@pytest.mark.parametrize("number", [torch.tensor, np.array, np.float32], ids=["tensor", "array", "scalar"])
@pytest.mark.parametrize("option", ["label_smoothing", "z_loss_weight"])
def test_an_option_that_is_changed_in_place(device: Device, option: str, number: Any) -> None:
    logits, target = intermediate(device, 4, VOCAB), labels(device, 4)
    value = number(0.25)
    first = parallel_cross_entropy(logits, target, **{option: value})
    value += 0.25
    second = parallel_cross_entropy(logits, target, **{option: value})
    assert torch.equal(first, parallel_cross_entropy(logits, target, **{option: 0.25}))
    assert torch.equal(second, parallel_cross_entropy(logits, target, **{option: 0.5}))


def test_settings_that_change_between_calls(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = intermediate(device, 4, VOCAB), labels(device, 4)
    unknown = target.clone()
    unknown[1] = VOCAB
    parallel_cross_entropy(logits, target)
    monkeypatch.setenv("MCE_CHECK_LABELS", "0")
    assert parallel_cross_entropy(logits, unknown).isfinite().all()
    monkeypatch.setenv("MCE_CHECK_LABELS", "1")
    with pytest.raises(ValueError, match=r"target\[1\] is 40"):
        parallel_cross_entropy(logits, unknown)
    monkeypatch.setenv("MCE_IMPLEMENTATION", "reference")
    parallel_cross_entropy(logits, target)
    assert last_used() == "reference"
    monkeypatch.setenv("MCE_IMPLEMENTATION", "refrence")
    with pytest.raises(ValueError, match="refrence"):
        parallel_cross_entropy(logits, target)


def test_tensors_without_memory(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a call like it has a plan: a kernel would read address 0."""
    monkeypatch.setenv("MCE_CHECK_LABELS", "0")
    logits, target = torch.randn(4, VOCAB, device=device.type), labels(device, 4)
    parallel_cross_entropy(logits, target)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(logits), mode.from_tensor(target)
        if device.name == "reference":
            assert parallel_cross_entropy(*fake).shape == (4,)
            return
        with pytest.raises(RuntimeError, match="FakeTensor without memory"):
            parallel_cross_entropy(*fake)


def test_transforms_are_refused(device: Device) -> None:
    target = labels(device, 4)
    parallel_cross_entropy(intermediate(device, 4, VOCAB), target)
    with pytest.raises(RuntimeError, match=r"functorch transforms|torch\.func"):
        torch.func.grad(lambda x: parallel_cross_entropy(x, target).sum())(
            torch.randn(4, VOCAB).to(target.device)
        )
