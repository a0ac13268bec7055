"""Runs something in place of a module's forward, inside of what its hooks do around it.

So FSDP gathers the parameters before and scatters their gradients after, and tensor parallelism brings the
input where it has to be, once for all chunks.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def call_inside_hooks(module: nn.Module, hidden: Tensor, body: Callable[[Tensor], tuple[Tensor, T]]) -> T:
    """What `body` returns as its second, called with the hidden states that the module's forward would get.

    The module's forward pre-hooks run, then `body`, then FSDP's forward hooks on the loss that `body` returns
    as its first. Other forward hooks are left out: they expect logits, which do not exist. Those of
    PyTorch's distribution (`parallelize_module`) only change the logits' layout; any others are warned of,
    because they may have changed the logits.

    A module that FSDP2 manages keeps its gathered parameters until backward, so that they are gathered once.
    Its settings are back when this returns or raises; should `body` raise, FSDP's hooks run all the same, so
    that its state is that after any forward without a backward.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    with contextlib.ExitStack() as inside:
        inside.enter_context(_only_fsdp_hooks(module))
        settings_back = inside.enter_context(_gathered_once(module))

        def forward(given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            try:
                loss, result = body(given)
            except BaseException as error:
                failed.append(error)
                settings_back()
                return given.new_zeros(())
            found.append(result)
            return loss

        inside.enter_context(_forward_is(module, forward))
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._call_impl(hidden)  # not the compiled one
        else:
            module(hidden)
    if failed:
        raise failed[0]
    return found[0]


@contextlib.contextmanager
def _forward_is(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


@contextlib.contextmanager
def _only_fsdp_hooks(module: nn.Module) -> Iterator[None]:
    hooks = module._forward_hooks
    left_out = [_name(hook) for hook in hooks.values() if not _is_pytorch_distributed(hook)]
    if left_out:
        warnings.warn(
            f"the chunked loss does not run lm_head's forward hooks ({', '.join(left_out)}): there are no "
            "logits to show them. What they do to the logits is not in the loss.",
            stacklevel=2,
        )
    module._forward_hooks = OrderedDict((key, hook) for key, hook in hooks.items() if _is_fsdp(hook))
    try:
        yield
    finally:
        module._forward_hooks = hooks


def _is_fsdp(hook: Any) -> bool:
    """Whether a hook is a method of FSDP's, or a function around one (hooks of a group of modules are)."""
    while hook is not None:
        if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp."):
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False


def _is_pytorch_distributed(hook: Any) -> bool:
    return _is_fsdp(hook) or str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@contextlib.contextmanager
def _gathered_once(module: Any) -> Iterator[Callable[[], None]]:
    """FSDP2 does not reshard after this forward, whose backward follows at once, if there will be one.

    Gives a function that puts the module's own setting back, as leaving the context does.
    """
    if not is_fsdp_module(module):
        yield lambda: None
        return
    state = module._get_fsdp_state()
    # what set_reshard_after_forward sets, which has no counterpart to read it
    automatic = state._auto_reshard_after_forward
    targets = [(group, group.post_forward_mesh_info) for group in _parameter_groups(state)]

    def settings_back() -> None:
        state._auto_reshard_after_forward = automatic
        for group, target in targets:
            group.post_forward_mesh_info = target

    if torch.is_grad_enabled():
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield settings_back
    finally:
        settings_back()


def _parameter_groups(state: Any) -> list[Any]:
    """The parameters that FSDP gathers together: one group or none, in newer torch possibly several."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]
