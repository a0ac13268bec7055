"""What `loss_parallel` does around the call: nesting, threads, exceptions, what it leaves or refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable

import compiled
import mesh_checks
import pytest
import torch
import torch.nn.functional as F
from mesh_cases import FOUR, Case

import megatron_ce_adaptor
from megatron_ce_adaptor import is_loss_parallel_active, loss_parallel


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_nesting_exceptions_and_backward_outside(
    run_ranks: Callable, no_failures: Callable, reduction: str
) -> None:
    """HAZARDS 32."""
    no_failures(run_ranks(4, mesh_checks.same_loss_in_every_position, Case(FOUR[1], (9, 17), reduction)))


def test_refusals(run_ranks: Callable, no_failures: Callable) -> None:
    """HAZARDS 33: with vocabulary shards inside; outside, and over other dimensions, PyTorch's own works."""
    no_failures(run_ranks(4, mesh_checks.refusals_of_the_context))


def test_strict_torch(run_ranks: Callable, no_failures: Callable) -> None:
    no_failures(run_ranks(4, mesh_checks.strict_torch))


def test_under_torch_compile(run_ranks: Callable, no_failures: Callable) -> None:
    no_failures(run_ranks(4, compiled.compiled_callers, Case(FOUR[1], (9, 17), "mean", weighted=True)))


def test_another_thread_sees_nothing() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[object] = []

    def other() -> None:
        inside.wait()
        seen.append(is_loss_parallel_active())
        seen.append(torch._C._len_torch_function_stack())
        with loss_parallel():
            seen.append(is_loss_parallel_active())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with loss_parallel():
        inside.set()
        assert done.wait(10)
        assert is_loss_parallel_active(), "the other thread's exit ended this one's context"
    thread.join()
    assert seen == [False, 0, True]


def test_leaving_it_on_another_thread() -> None:
    context = loss_parallel()
    errors: list[str] = []

    def leave() -> None:
        try:
            context.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with context:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert is_loss_parallel_active()
    assert errors == ["loss_parallel is left on another thread or task than it was entered on."]


@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_plain_tensors_are_pytorchs_own() -> None:
    logits, target = torch.randn(5, 7), torch.tensor([0, 6, -100, 3, 2])
    weight = torch.rand(7)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: F.cross_entropy(logits, target, weight, label_smoothing=0.1),
        lambda: F.cross_entropy(logits, target, reduce=False),
        lambda: torch.nn.CrossEntropyLoss(reduction="sum")(logits, logits.softmax(-1)),
        lambda: F.nll_loss(F.log_softmax(logits, -1), target),
        lambda: torch.log_softmax(logits, dim=0, dtype=torch.float64),
        lambda: logits.log_softmax(1),
    ]
    for call in calls:
        with loss_parallel():
            inside = call()
        assert torch.equal(inside, call())


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"strict is 'yes', expected True, False or 'torch'"):
        loss_parallel(strict="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh is a str"):
        loss_parallel(mesh="tp")  # type: ignore[arg-type]
    assert not is_loss_parallel_active()


def test_public_names_are_exported() -> None:
    for name in (
        "loss_parallel",
        "is_loss_parallel_active",
        "loss_parallel_cross_entropy",
        "gather_tensor_parallel_logits",
    ):
        assert name in megatron_ce_adaptor.__all__
        assert callable(getattr(megatron_ce_adaptor, name))
