"""What is decided once for calls that are alike: that they are valid, their columns, who computes them.

Finding a plan takes one look into a dictionary; making one takes several times as long as a small kernel.
"""

from __future__ import annotations

import math
import weakref
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_ce_adaptor.dispatch import Terms
from megatron_ce_adaptor.implementations import choose
from megatron_ce_adaptor.implementations.memo import Memo
from megatron_ce_adaptor.settings import switch, watch
from megatron_ce_adaptor.vocab_shard import VocabShard

_LOGITS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# All that a plan depends on in the environment.
_settings = watch("MCE_IMPLEMENTATION", "TE_PARALLEL_CE_FORCE_TRITON", "MCE_CHECK_LABELS")
# Logits and gradients are read and written in vectors of so many bytes.
_VECTOR_BYTES = 16


class Plan:
    """
    Attributes:
        terms: with a shard without its group, which a plan does not keep alive.
        statistics: whether they are asked for.
        module, name: the implementation.
        checks_labels: MCE_CHECK_LABELS, None where it is unset.
        contiguous: the logits are.
        memo: the implementation's, about calls that have this plan.
    """

    __slots__ = (
        "_group",
        "_split",
        "checks_labels",
        "contiguous",
        "memo",
        "module",
        "name",
        "statistics",
        "terms",
    )

    def __init__(
        self, device_type: str, group: Any, terms: Terms, statistics: bool, contiguous: bool
    ) -> None:
        shard = terms.shard
        self._group = None if group is None else weakref.ref(group)
        self._split = shard.group is not None  # a group of one rank splits nothing
        choice = choose(device_type, shard.columns, self._split)
        self.terms = Terms(VocabShard(None, *shard[1:]), *terms[1:]) if self._split else terms
        self.statistics = statistics
        self.module: ModuleType = choice.module
        self.name = choice.name
        self.checks_labels = switch("MCE_CHECK_LABELS")
        self.contiguous = contiguous
        self.memo = Memo()

    def is_of(self, group: Any) -> bool:
        """Whether it was made for this group: the number that a plan is found by may be another's by now."""
        return group is (None if self._group is None else self._group())

    def terms_on(self, group: Any) -> Terms:
        """The terms with their group."""
        if not self._split:
            return self.terms
        return Terms(VocabShard(group, *self.terms.shard[1:]), *self.terms[1:])


_plans: dict[tuple[Any, ...], Plan] = {}
# Cleared when a run with ever new shapes has filled it.
_MOST_PLANS = 4096


def plan_of(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
    group: Any = None,
    shard: VocabShard | None = None,
) -> Plan:
    """The plan of a call.

    Args:
        group: ranks that hold equal shards, None for an unsplit vocabulary.
        shard: the columns that the logits are, instead of a group.

    Raises:
        TypeError, ValueError, RuntimeError: see `parallel_cross_entropy`.
    """
    group = group if shard is None else shard.group
    try:
        try:
            address = logits.data_ptr()
        except RuntimeError:  # traced, or inside a transform of torch.func
            address = 0
        lead = address % _VECTOR_BYTES if address else None
        key = (
            logits.shape, logits.stride(), logits.dtype, logits.device,
            lead, min(logits.storage_offset(), _VECTOR_BYTES) if lead else 0,
            target.shape, target.stride(), target.dtype, target.device,
            ignore_index, label_smoothing, z_loss_weight, statistics,
            id(group), None if shard is None else shard[1:], _settings(),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no tensors, no numbers: `validate` says which
        validate(logits, target, ignore_index, label_smoothing, z_loss_weight)
        if _are_numbers(label_smoothing, z_loss_weight):
            raise
        plan = None
    if plan is not None and plan.is_of(group):
        return plan
    validate(logits, target, ignore_index, label_smoothing, z_loss_weight)
    # An option that is an array has no hash; that of a tensor stays when its value changes.
    if not _are_numbers(label_smoothing, z_loss_weight):
        numbers = float(label_smoothing), float(z_loss_weight)
        return plan_of(logits, target, ignore_index, *numbers, statistics, group, shard)
    if shard is None:
        shard = VocabShard.of_equal_shards(group, logits.shape[-1])
    terms = Terms(shard, ignore_index, float(label_smoothing), float(z_loss_weight))
    plan = Plan(logits.device.type, group, terms, statistics, logits.is_contiguous())
    if not address and logits.numel() and plan.module.READS_ADDRESSES:
        raise RuntimeError(
            f"inp is a {type(logits).__name__} without memory (fake, traced, or inside a transform of "
            f"torch.func), and the kernels of {plan.name!r} need its address: call the loss outside, under "
            "torch.compile, or set MCE_IMPLEMENTATION=reference."
        )
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _are_numbers(*options: object) -> bool:
    return all(isinstance(option, (int, float)) for option in options)


def validate(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss_weight: float
) -> None:
    """Checks that need no other rank."""
    for name, value in (("inp", logits), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor.")
    if logits.dtype not in _LOGITS_DTYPES:
        raise TypeError(
            f"inp has dtype {logits.dtype}, expected float16, bfloat16, float32 or float64 logits."
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"target has dtype {target.dtype}, expected int64 or int32 class ids (not probabilities)."
        )
    if logits.dim() not in (2, 3):
        raise ValueError(
            f"inp has shape {tuple(logits.shape)}, expected [N, V], [b, s, V] or [s, b, V], vocabulary last."
        )
    leading = logits.shape[:-1]
    if target.numel() != leading.numel():
        raise ValueError(
            f"target has shape {tuple(target.shape)} = {target.numel()} labels, expected one for each of the "
            f"{leading.numel()} rows of inp {tuple(logits.shape)}."
        )
    if target.device != logits.device:
        raise ValueError(f"target is on {target.device} and inp on {logits.device}: move both to one device.")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 <= label_smoothing < 1.")
    if not math.isfinite(z_loss_weight):
        raise ValueError(f"z_loss_weight is {z_loss_weight}, expected a finite number.")
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_idx is {ignore_index!r}, expected an int.")
