"""Runs something in place of a module's forward, inside of what its hooks do around it.

So FSDP gathers the parameters before and scatters their gradients after, and tensor parallelism brings the
input where it has to be, once for all chunks.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def call_inside_hooks(module: nn.Module, hidden: Tensor, body: Callable[[Tensor], tuple[Tensor, T]]) -> T:
    """What `body` returns as its second, called with the hidden states that the module's forward would get.

    The module's forward pre-hooks run, then `body`, then FSDP's forward hooks on the loss that `body` returns
    as its first. Other forward hooks are left out: they expect logits, which do not exist (those of
    `parallelize_module` only change the logits' layout).

    A module that FSDP2 manages keeps its gathered parameters until backward, so that they are gathered once;
    its settings are back when this returns or raises.
    """
    found: list[T] = []

    def forward(given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss, result = body(given)
        found.append(result)
        return loss

    with _only_fsdp_hooks(module), _forward_is(module, forward), _gathered_once(module):
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._call_impl(hidden)  # not the compiled one
        else:
            module(hidden)
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
    module._forward_hooks = OrderedDict((key, hook) for key, hook in hooks.items() if _is_fsdp(hook))
    try:
        yield
    finally:
        module._forward_hooks = hooks


def _is_fsdp(hook: Callable[..., Any]) -> bool:
    owner = getattr(inspect.unwrap(hook), "__self__", None)  # hooks of a group of modules are wrapped
    return type(owner).__module__.startswith("torch.distributed.fsdp.")


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@contextlib.contextmanager
def _gathered_once(module: Any) -> Iterator[None]:
    """FSDP2 does not reshard after this forward, whose backward follows at once, if there will be one."""
    if not is_fsdp_module(module):
        yield
        return
    state = module._get_fsdp_state()
    group = state._fsdp_param_group
    # what set_reshard_after_forward sets, which has no counterpart to read it
    automatic = state._auto_reshard_after_forward
    target = group.post_forward_mesh_info if group is not None else None
    try:
        if torch.is_grad_enabled():
            module.set_reshard_after_forward(False, recurse=False)
        yield
    except BaseException:
        # FSDP's own forward hook did not run
        module.reshard()
        if state._state_ctx.iter_forward_root is state:
            state._state_ctx.iter_forward_root = None
        raise
    finally:
        state._auto_reshard_after_forward = automatic
        if group is not None:
            group.post_forward_mesh_info = target
