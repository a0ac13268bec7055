"""The functions that ``patches/*.yaml`` puts into Megatron."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch

from megatron_ce_adaptor.cross_entropy import cross_entropy, overwrite_obstacle
from megatron_ce_adaptor.megatron.call_counter import count_call
from megatron_ce_adaptor.megatron.loss_chunks import TOKENS
from megatron_ce_adaptor.megatron.output_and_loss import refuse_whole_logits
from megatron_ce_adaptor.settings import setting, switch

_IGNORED_LABEL = -100


def te_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tp_group: torch.distributed.ProcessGroup | None,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """Per-token loss for ``--cross-entropy-fusion-impl te``; same signature as Megatron's own function.

    Args:
        logits: ``[s, b, V/tp]`` in fp16, bf16 or fp32, this rank's columns. Never written by the forward
            pass; the backward pass writes the gradient into their storage unless ``MCE_OVERWRITE=0``, or
            unless they are a leaf that requires grad.
        labels: ``[s, b]`` int64, indices into the whole vocabulary. A label out of range gives a finite
            loss, so that a loss mask of 0 makes it harmless, unless ``MCE_CHECK_LABELS=1``.
        tp_group: tensor-parallel group; ``None`` means Megatron's.
        is_cg_capturable: accepted for the signature; the operation never synchronises with the host.

    Returns:
        fp32 ``[s, b]``, the same on every rank of the group.

    Raises:
        RuntimeError: MCE_LOSS_CHUNK_TOKENS is set, but this model's logits came whole and want a gradient.
    """
    del is_cg_capturable
    if setting(TOKENS):
        refuse_whole_logits(logits)
    count_call("te")
    loss = cross_entropy(
        logits,
        labels,
        label_smoothing=0.0,
        group=tp_group if tp_group is not None else _megatron_tp_group(),
        ignore_index=_IGNORED_LABEL,
        overwrite_input=_may_overwrite(logits),
        z_loss_weight=0.0,
        return_statistics=False,
        # A label behind a loss mask of 0 may be out of range in Megatron; MCE_CHECK_LABELS=1 looks at it
        check_labels=False,
    )
    assert isinstance(loss, torch.Tensor)
    return loss


def _may_overwrite(logits: torch.Tensor) -> bool:
    if switch("MCE_OVERWRITE") is False:
        return False
    # Without a gradient nothing is written; out of place the numbers are the same.
    return not (torch.is_grad_enabled() and logits.requires_grad) or overwrite_obstacle(logits) is None


def _megatron_tp_group() -> torch.distributed.ProcessGroup | None:
    """Megatron's group, for callers that leave it out: a shard must not pass for the whole vocabulary."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None:
        return None
    group: torch.distributed.ProcessGroup | None = parallel_state.get_tensor_model_parallel_group(
        check_initialized=False
    )
    return group


# -------------------------------------------------------------- lifting Megatron's refusal of te


def allow_te_in_validate_args(validate_args: Callable[..., Any]) -> Callable[..., Any] | None:
    """Wraps ``megatron.training.arguments.validate_args`` where it refuses ``te`` (0.18.2 and later).

    The refusal is about TransformerEngine's kernel, which does not run here. The original sees ``native``
    instead of ``te``, and nothing else changes: every other check stays, among them
    ``--deterministic-mode``'s, which forbids any loss fusion. Returns ``None`` where nothing is refused.
    """
    if not _refuses_te(validate_args):
        return None

    @functools.wraps(validate_args)
    def validate_args_with_te(args: Any, *more: Any, **named: Any) -> Any:
        hides = _asks_for_te(args)
        with _shown_as_native(args):
            result = validate_args(args, *more, **named)
        if hides:
            if result is not args and getattr(result, "cross_entropy_fusion_impl", None) == "native":
                result.cross_entropy_fusion_impl = "te"
            if getattr(args, "rank", 0) == 0:  # Megatron has just printed its arguments
                print(
                    "megatron_ce_adaptor: cross_entropy_fusion_impl is te; it reads native in the list of "
                    "arguments because Megatron's own te is refused there",
                    flush=True,
                )
        return result

    return validate_args_with_te


def allow_te_in_post_init(post_init: Callable[..., None]) -> Callable[..., None] | None:
    """Wraps ``ModelParallelConfig.__post_init__`` in the few commits in which it asserts.

    Releases only warn there; their warning stays, and this returns ``None``.
    """
    if not _mentions(post_init, "disabled due to stability issues"):
        return None

    @functools.wraps(post_init)
    def post_init_with_te(self: Any, *more: Any, **named: Any) -> None:
        with _shown_as_native(self):
            post_init(self, *more, **named)

    return post_init_with_te


def _asks_for_te(config: Any) -> bool:
    return bool(
        getattr(config, "cross_entropy_loss_fusion", False)
        and getattr(config, "cross_entropy_fusion_impl", None) == "te"
    )


@contextmanager
def _shown_as_native(config: Any) -> Iterator[None]:
    """Inside, ``te`` reads ``native``; put back on the way out, also after an error."""
    if not _asks_for_te(config):
        yield
        return
    config.cross_entropy_fusion_impl = "native"
    try:
        yield
    finally:
        if config.cross_entropy_fusion_impl == "native":
            config.cross_entropy_fusion_impl = "te"


def _refuses_te(validate_args: Callable[..., Any]) -> bool:
    """Whether validate_args looks at the implementation at all; only the refusal does.

    If another package has wrapped it beyond recognition, yes: showing ``native`` to a function that does
    not look is harmless, being refused is not.
    """
    if getattr(inspect.unwrap(validate_args), "__module__", None) != "megatron.training.arguments":
        return True
    codes = [function.__code__ for function in _chain(validate_args) if hasattr(function, "__code__")]
    return not codes or any("cross_entropy_fusion_impl" in _names(code) for code in codes)


def _mentions(function: Callable[..., Any], text: str) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and any(
        text in constant for constant in code.co_consts if isinstance(constant, str)
    )


def _chain(function: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        function = getattr(function, "__wrapped__", None)


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
