"""What Megatron's checkpoints need so that a resumed run is the uninterrupted one, bit for bit.

Defects of Megatron-Core 0.18, each shown by a test that fails without its fix:

* The distributed optimizer cannot load into torch's Adam or AdamW (what Megatron trains with where neither
  TransformerEngine nor apex is installed): it asks an optimizer that has not stepped yet for its step, and
  fails.  Here the state is allocated first.
* It then leaves all parameters of a group with one and the same ``step`` tensor, which every parameter's
  update increments, and overwrites its value with that of the freshly allocated state.  The bias correction
  of Adam is then wrong, and the loss drifts without a word.  Here every parameter gets the saved step.
* The random state is loaded before the data loaders are built, and building them draws from the CPU's
  generator.  Here the state is put back when training begins.  (Only the CPU draws dropout from it.)
* The first line that ``training_log`` prints does not clear the sums it is made from, so the second line of
  every start shows the mean of two steps.  Where the first step has a line of its own, it is cleared.

Beside them, every rank prints its cross-entropy calls before a checkpoint is saved (:mod:`.call_counter`), so
that the sum over all starts covers every step, whatever ended them.

Optimizers of TransformerEngine, apex and Megatron's CPU offloading keep their step elsewhere and are left
alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_ce_adaptor.megatron import call_counter


def _is_torch_adam(optimizer: Any) -> bool:
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


@torch.no_grad()
def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer` allocate its state as its first step does, without changing a parameter.

    A step of zero gradient at learning rate 0 leaves every parameter as it was, decoupled weight decay
    included.  Does nothing if there is state already.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient in gradients:
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def saved_step(state_dict: dict[str, Any]) -> float | None:
    """The number of optimizer steps in a distributed optimizer's checkpoint, None if it holds none."""
    groups = state_dict.get("optimizer", {}).get("param_groups", [])
    return next((float(group["step"]) for group in groups if group.get("step") is not None), None)


def restore_step(optimizer: torch.optim.Optimizer, step: float) -> None:
    """Give every parameter's state a ``step`` of its own with this value."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], step)


def allocate_before_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer.sharded_state_dict``."""

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any = (), is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if is_loading and _is_torch_adam(self.optimizer):
            allocate_state(self.optimizer)
        return original(self, model_sharded_state_dict or {}, is_loading, *args, **kwargs)

    return sharded_state_dict


def restore_step_after_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer.load_state_dict``."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        if not _is_torch_adam(getattr(self, "optimizer", None)):
            original(self, state_dict)
            return
        step = saved_step(state_dict)
        with torch.no_grad():  # the parameters are copied into, and they require gradients
            original(self, state_dict)
        if step is not None:
            restore_step(self.optimizer, step)

    return load_state_dict


def one_line_one_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``training_log``: the first step's line clears the sums where every line does."""
    if "is_first_iteration" not in inspect.signature(original).parameters:
        return original  # before 0.18 there is no such line
    bind = inspect.signature(original).bind

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        call = bind(*args, **kwargs)
        if call.arguments.get("is_first_iteration"):
            from megatron.training import get_args

            call.arguments["is_first_iteration"] = call.arguments["iteration"] % get_args().log_interval != 0
        return original(*call.args, **call.kwargs)

    return training_log


_State = tuple[Any, Any, torch.Tensor]
_state_after_loading: list[_State] = []


def remember_random_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_checkpoint``: keep the random state that it leaves."""

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result[0] > 0:  # the iteration
            _state_after_loading[:] = [(random.getstate(), np.random.get_state(), torch.get_rng_state())]
        return result

    return load_checkpoint


def begin_with_that_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``train``: begin with the random state that was loaded, if any was."""

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        if _state_after_loading:
            python_state, numpy_state, torch_state = _state_after_loading.pop()
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            torch.set_rng_state(torch_state)
        return original(*args, **kwargs)

    return train


def counts_before_saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_checkpoint``: the counts are in the log before Megatron says that it is saved."""

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        call_counter.print_and_restart()
        return original(*args, **kwargs)

    return save_checkpoint


def _wrap(holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(holder, name, None)
    if original is not None and not getattr(original, "mce_resume_fix", False):
        wrapped = wrapper(original)
        if wrapped is not original:
            wrapped.mce_resume_fix = True
            setattr(holder, name, wrapped)


def apply() -> None:
    """Apply the fixes to the Megatron that can be imported; calling it again changes nothing."""
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    _wrap(optimizer, "sharded_state_dict", allocate_before_loading)
    _wrap(optimizer, "load_state_dict", restore_step_after_loading)
    if importlib.util.find_spec("megatron.training") is not None:
        training = importlib.import_module("megatron.training.training")
        _wrap(training, "training_log", one_line_one_step)
        _wrap(training, "save_checkpoint", counts_before_saving)
        _wrap(training, "load_checkpoint", remember_random_state)
        _wrap(training, "train", begin_with_that_state)
