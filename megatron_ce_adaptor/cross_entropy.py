"""`parallel_cross_entropy`: cross entropy of logits whose vocabulary is split over the ranks of a group."""

from __future__ import annotations

import math
import warnings
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ce_adaptor import dispatch
from megatron_ce_adaptor.dispatch import Terms
from megatron_ce_adaptor.implementations import choose, note_use
from megatron_ce_adaptor.implementations.class_weights import ClassWeights
from megatron_ce_adaptor.implementations.rows import empty_gradient, has_overlapping_elements
from megatron_ce_adaptor.settings import switch
from megatron_ce_adaptor.vocab_shard import VocabShard

__all__ = ["CrossEntropyStatistics", "parallel_cross_entropy"]

_LOGITS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CrossEntropyStatistics(NamedTuple):
    """Per-token statistics, each of the target's shape (2-D inp: [N]), without gradient.

    Attributes:
        log_sum_exp: log of the sum of exp over the whole vocabulary, in the loss's dtype.
        target_log_prob: log-probability of the target; 0 where the label is ignored or no class.
        entropy: entropy of the predicted distribution, in nats.
        correct: bool, the target's logit is at least every other logit; False where ignored or no class.
    """

    log_sum_exp: Tensor
    target_log_prob: Tensor
    entropy: Tensor
    correct: Tensor


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    z_loss_weight: float = 0.0,
    return_statistics: bool = False,
    _input: Tensor | None = None,
) -> Tensor | tuple[Tensor, CrossEntropyStatistics]:
    """Cross entropy over a vocabulary split across tensor-parallel ranks, with TransformerEngine 2.17's
    signature.

    loss = (1 - ls) * -log p[target] + ls * mean over classes of -log p + z_loss_weight * lse^2, lse = log sum
    exp: PyTorch's label smoothing over the whole vocabulary (Szegedy et al. 2016), PaLM's z-loss (Chowdhery
    et al. 2022). Computed in fp32 (fp64 for fp64 logits), gradients rounded once to the logits' dtype.
    Deterministic, no host synchronisation on devices, usable in captured CUDA graphs and, out of place, under
    torch.compile.

    Collectives: one all_gather_into_tensor of 3 to 5 numbers a token in forward if the group has several
        ranks, none
    in backward. The loss is bitwise the same on every rank of the group.

    Args:
        inp: logits [N, V/W], [b, s, V/W] or [s, b, V/W] of this rank's columns, fp16, bf16, fp32 or fp64, any
            strides; rank r of W holds columns r * V/W to (r + 1) * V/W. Forward never writes them.
        target: class ids of the whole vocabulary, int32 or int64, as many as inp has rows, in the order of
            its rows.
        label_smoothing: in [0, 1).
        reduce_loss: return the sum over this call's tokens divided by max(1, number of targets other than
            ignore_idx).
        dist_process_group: the group the vocabulary is split over; None for an unsplit one.
        ignore_idx: label whose rows have loss 0 and gradient 0; may be a class.
        is_cg_capturable: accepted for TransformerEngine's callers; every call is capturable.
        overwrite_input: write the gradient into the logits' memory in backward: no logits-sized allocation.
            The logits' version is bumped, so a later backward that needs their values raises instead of
            reading gradients.
        z_loss_weight: weight of lse^2 on rows that are not ignored.
        return_statistics: also return `CrossEntropyStatistics`.
        _input: deprecated name of inp (FutureWarning); overrides it.

    Returns:
        The loss, fp32 (fp64 for fp64 logits), of inp's leading shape, or 0-d with reduce_loss; or (loss,
        statistics).

    Raises:
        TypeError: a tensor is of an unsupported dtype.
        ValueError: shapes that do not fit; label_smoothing out of range; a label that is neither a class nor
            ignore_idx (checked on CPU outside torch.compile, on a device with MCE_CHECK_LABELS=1; unchecked,
            its loss is lse - max of the row and its gradient the softmax); shards of unequal sizes (on all
            ranks); overwrite_input with logits that are a leaf or overlap in memory; an unknown
            MCE_IMPLEMENTATION.
        RuntimeError: the requested implementation cannot run here; a second backward after overwrite_input;
            second derivatives (create_graph=True).
    """
    if _input is not None:
        warnings.warn(
            "parallel_cross_entropy: the argument '_input' is deprecated, pass 'inp'.",
            FutureWarning,
            stacklevel=2,
        )
        inp = _input
    result = cross_entropy(
        inp,
        target,
        group=dist_process_group,
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
        overwrite_input=overwrite_input,
        return_statistics=return_statistics,
        check_labels=None,
    )
    if not reduce_loss:
        return result
    # on this rank's tokens; no host synchronisation: the count stays where the labels are
    valid = (target != ignore_idx).sum().clamp(min=1)
    if isinstance(result, Tensor):
        return result.sum() / valid
    return result[0].sum() / valid, result[1]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    overwrite_input: bool,
    return_statistics: bool,
    check_labels: bool | None,
    group: Any = None,
    shard: VocabShard | None = None,
    class_weight: Tensor | None = None,
) -> Tensor | tuple[Tensor, CrossEntropyStatistics]:
    """What `parallel_cross_entropy` does, for the package's doors, never reduced.

    Args:
        check_labels: raise for labels that are no class; None: on CPU yes, on devices no.
            MCE_CHECK_LABELS=0|1 wins.
        group: the group whose ranks hold equal shards, None for an unsplit vocabulary.
        shard: the columns that the logits are, instead of a group.
        class_weight: [V], floating, of the whole vocabulary and the same on every rank: PyTorch's weighted
            loss (see `ClassWeights`). No gradient flows into it.
    """
    compiling = torch.compiler.is_compiling()
    terms = _valid_terms(compiling, logits, target, ignore_index, label_smoothing, z_loss_weight)
    if shard is None and group is not None:
        shard = VocabShard.of_equal_shards(group, logits.shape[-1])
    if shard is not None:
        terms = Terms(shard, *terms[1:])
    labels = target if target.dim() == 1 else target.reshape(-1)
    if overwrite_input and logits.requires_grad and torch.is_grad_enabled():
        obstacle = overwrite_obstacle(logits)
        if obstacle is not None:
            raise ValueError(f"overwrite_input=True {obstacle}: pass overwrite_input=False.")
    weights: tuple[Tensor, ...] = ()
    if class_weight is not None:
        weights = _class_weights(class_weight, logits, labels, terms.shard)
    if compiling:
        result = _CompiledCrossEntropy.apply(logits, labels, terms, return_statistics, *weights)
    else:
        choice = choose(logits.device.type, terms.shard.columns, terms.shard.group is not None)
        note_use(choice.name)
        how = (choice.module, terms, return_statistics, overwrite_input)
        result = _apply(logits, labels, how, *weights)
        if _labels_are_checked(check_labels, logits):
            # Only now: before the shards' sizes are compared, ranks may disagree about what a class is, and
            # one that raised would leave the others waiting in the collective.
            _check_labels(target, terms.shard.total_columns, ignore_index)
    if not return_statistics:
        return result
    loss, stats = result
    lse, target_log_prob, entropy, correct = (row.view(loss.shape) for row in stats)
    return loss, CrossEntropyStatistics(lse, target_log_prob, entropy, correct != 0)


class _CrossEntropy(torch.autograd.Function):
    """Logits [..., C], labels [N], how to go about it and the two tensors of `ClassWeights` or none, to
    loss [...], or (loss, statistics [4, N]) where asked for.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, how: tuple[ModuleType, Terms, bool, bool], *weights: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.overwritten = False
        module, terms, statistics, _ = how
        class_weights = ClassWeights(*weights) if weights else None
        loss, saved, stats = dispatch.forward_pass(module, logits, labels, terms, class_weights, statistics)
        ctx.save_for_backward(logits, labels, saved, *weights)
        if logits.dim() != 2:
            loss = loss.view(logits.shape[:-1])
        if stats is None:
            return loss
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "parallel_cross_entropy has no second derivative: call backward() or torch.autograd.grad() "
                "without create_graph=True."
            )
        if ctx.overwritten:
            raise RuntimeError(
                "parallel_cross_entropy(overwrite_input=True) has already replaced the logits by "
                "their gradient in the first backward; pass overwrite_input=False to go backward twice "
                "(retain_graph=True)."
            )
        module, terms, _, overwrite = ctx.how
        logits, labels, saved, *weights = ctx.saved_tensors
        class_weights = ClassWeights(*weights) if weights else None
        grad_rows = grad_loss if grad_loss.dim() == 1 else grad_loss.reshape(-1)
        if overwrite:
            logits = grad = logits.detach()
        else:
            grad = empty_gradient(logits)
        dispatch.backward_pass(module, logits, labels, saved, grad_rows, grad, terms, class_weights)
        if overwrite:
            torch.autograd.graph.increment_version(grad)
            ctx.overwritten = True
        return (grad, None, None, *(None for _ in weights))


# What `Function.apply` does beyond calling its base class is for the transforms of torch.func, and takes as
# long as a small kernel.
_apply_without_transforms = super(torch.autograd.Function, _CrossEntropy).apply


def _apply(*arguments: Any) -> Any:
    if torch._C._are_functorch_transforms_active():
        return _CrossEntropy.apply(*arguments)
    return _apply_without_transforms(*arguments)


class _CompiledCrossEntropy(torch.autograd.Function):
    """The same under torch.compile: opaque operators, never in place."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, terms: Terms, statistics: bool, *weights: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        shard, ignore_index, label_smoothing, z_loss_weight = terms
        loss, saved, stats = dispatch.forward_operator(
            logits,
            labels,
            *(weights or (None, None)),
            shard.group.group_name if shard.group is not None else "",
            shard.first_column,
            shard.total_columns,
            shard.equal,
            ignore_index,
            label_smoothing,
            z_loss_weight,
            statistics,
        )
        if logits.dim() != 2:
            loss = loss.view(logits.shape[:-1])
        ctx.save_for_backward(logits, labels, saved, *weights)
        ctx.terms = terms
        if not statistics:
            return loss
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        logits, labels, saved, *weights = ctx.saved_tensors
        shard, ignore_index, label_smoothing, z_loss_weight = ctx.terms
        grad = dispatch.backward_operator(
            logits,
            labels,
            saved,
            grad_loss.reshape(-1),
            *(weights or (None, None)),
            shard.group is not None,
            shard.first_column,
            shard.total_columns,
            ignore_index,
            label_smoothing,
            z_loss_weight,
        )
        return (grad, None, None, None, *(None for _ in weights))


# The terms of a call over an unsplit vocabulary by all that `_validate` looks at: a call like an earlier one
# is valid, and finding that out takes less time than checking.
_terms: dict[tuple[Any, ...], Terms] = {}
_MOST_TERMS = 4096


def _valid_terms(
    compiling: bool,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
) -> Terms:
    """The terms of a call over an unsplit vocabulary, after `_validate`."""
    key = None
    if not compiling:
        try:
            key = (
                logits.shape, logits.dtype, logits.device, target.shape, target.dtype, target.device,
                ignore_index, label_smoothing, z_loss_weight,
            )  # fmt: skip
            terms = _terms.get(key)
        except (AttributeError, TypeError):  # no tensors, no numbers: `_validate` says which
            terms = None
        if terms is not None:
            return terms
    _validate(logits, target, ignore_index, label_smoothing, z_loss_weight)
    shard = VocabShard.of_equal_shards(None, logits.shape[-1])
    terms = Terms(shard, ignore_index, float(label_smoothing), float(z_loss_weight))
    if key is not None:
        if len(_terms) >= _MOST_TERMS:
            _terms.clear()
        _terms[key] = terms
    return terms


def _class_weights(class_weight: Tensor, logits: Tensor, labels: Tensor, shard: VocabShard) -> ClassWeights:
    if not isinstance(class_weight, Tensor) or not class_weight.is_floating_point():
        found = class_weight.dtype if isinstance(class_weight, Tensor) else type(class_weight).__name__
        raise TypeError(f"the class weight is {found}, expected a floating-point tensor [V].")
    if class_weight.shape != (shard.total_columns,):
        raise ValueError(
            f"the class weight has shape {tuple(class_weight.shape)}, expected ({shard.total_columns},): one "
            "weight for each class of the whole vocabulary, on every rank."
        )
    if class_weight.device != logits.device:
        raise ValueError(
            f"the class weight is on {class_weight.device} and the logits on {logits.device}: move both to "
            "one device."
        )
    dtype = dispatch.accumulation_dtype(logits)
    return ClassWeights.of(class_weight, labels, shard.first_column, shard.columns, dtype)


def _validate(
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


def _labels_are_checked(check_labels: bool | None, logits: Tensor) -> bool:
    setting = switch("MCE_CHECK_LABELS")
    if setting is not None:
        return setting
    return logits.is_cpu if check_labels is None else check_labels


def _check_labels(target: Tensor, classes: int, ignore_index: int) -> None:
    bad = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bool(bad.any()):
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"target[{', '.join(map(str, where))}] is {int(target[where])}, expected a class in "
            f"[0, {classes}) or ignore_idx {ignore_index}; mark tokens without a target by ignore_idx."
        )


def overwrite_obstacle(logits: Tensor) -> str | None:
    """Why the gradient cannot be written over these logits, as the end of a sentence; None if it can."""
    if torch.compiler.is_compiling():
        return "does not work under torch.compile"
    base = logits._base if logits._is_view() else logits
    owner = logits if base is None else base
    if logits.is_leaf or (owner.is_leaf and owner.requires_grad):
        return (
            "needs logits that are an intermediate result, and these are a leaf or share its memory: the "
            "leaf's values would be lost to their own gradient"
        )
    if not logits.is_contiguous() and has_overlapping_elements(logits):
        return (
            f"needs logits whose elements do not share memory, and these have strides {logits.stride()} for "
            f"shape {tuple(logits.shape)}"
        )
    return None
