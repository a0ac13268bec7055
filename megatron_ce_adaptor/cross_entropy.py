"""`parallel_cross_entropy`: cross entropy of logits whose vocabulary is split over the ranks of a group."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ce_adaptor import dispatch
from megatron_ce_adaptor.dispatch import Terms
from megatron_ce_adaptor.implementations import note_use
from megatron_ce_adaptor.implementations.class_weights import ClassWeights
from megatron_ce_adaptor.implementations.dtypes import accumulation_dtype
from megatron_ce_adaptor.implementations.rows import empty_gradient, has_overlapping_elements
from megatron_ce_adaptor.labels import labels_are_checked, refuse_unknown_labels
from megatron_ce_adaptor.plan import Plan, plan_of, validate
from megatron_ce_adaptor.vocab_shard import VocabShard

__all__ = ["CrossEntropyStatistics", "parallel_cross_entropy"]


_increment_version = torch.autograd.graph.increment_version


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
    if torch.compiler.is_compiling():
        return _compiled(
            logits, target, ignore_index, label_smoothing, z_loss_weight, return_statistics, group, shard,
            class_weight, overwrite_input,
        )  # fmt: skip
    plan = plan_of(
        logits, target, ignore_index, label_smoothing, z_loss_weight, return_statistics, group, shard
    )
    if (
        overwrite_input
        and logits.requires_grad
        and torch.is_grad_enabled()
        # the usual logits are none of these, and need no closer look
        and (logits.is_leaf or logits._is_view() or not plan.contiguous)
    ):
        _refuse_to_overwrite(logits)
    if shard is not None:
        group = shard.group
    labels = target if target.dim() == 1 else target.reshape(-1)
    weights: tuple[Tensor, ...] = ()
    if class_weight is not None:
        weights = _class_weights(class_weight, logits, labels, plan.terms.shard)
    note_use(plan.name)
    # In torch.func's transforms the whole of it.
    apply = _CrossEntropy.apply if torch._C._are_functorch_transforms_active() else _apply_without_transforms
    result = apply(logits, labels, plan, group, overwrite_input, *weights)
    if labels_are_checked(plan.checks_labels, check_labels, logits):
        # Only now: before the shards' sizes are compared, ranks may disagree about what a class is, and one
        # that raised would leave the others waiting in the collective.
        refuse_unknown_labels(target, plan.terms.shard.total_columns, ignore_index)
    return _with_names(result) if return_statistics else result


def _with_names(result: tuple[Tensor, Tensor]) -> tuple[Tensor, CrossEntropyStatistics]:
    loss, stats = result
    lse, target_log_prob, entropy, correct = (row.view(loss.shape) for row in stats)
    return loss, CrossEntropyStatistics(lse, target_log_prob, entropy, correct != 0)


class _CrossEntropy(torch.autograd.Function):
    """Logits [..., C], labels [N], how to go about it and the two tensors of `ClassWeights` or none, to
    loss [...], or (loss, statistics [4, N]) where asked for.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, plan: Plan, group: Any, overwrite: bool, *weights: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.plan = plan
        ctx.overwrite = overwrite
        ctx.overwritten = False
        again = plan.memo.forward
        result = again(logits, labels) if again is not None and not weights else None
        if result is None:
            class_weights = ClassWeights(*weights) if weights else None
            result = dispatch.forward_pass(
                plan.module, logits, labels, plan.terms_on(group), class_weights, plan.statistics, plan.memo
            )
        loss, saved, stats = result
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
        plan: Plan = ctx.plan
        logits, labels, saved, *weights = ctx.saved_tensors
        grad_rows = grad_loss if grad_loss.dim() == 1 else grad_loss.reshape(-1)
        again = plan.memo.gradient
        grad = (
            again(logits, labels, saved, grad_rows, ctx.overwrite)
            if again is not None and not weights
            else None
        )
        if grad is None:
            if ctx.overwrite:
                logits = grad = logits.detach()
            else:
                grad = empty_gradient(logits)
            class_weights = ClassWeights(*weights) if weights else None
            dispatch.backward_pass(
                plan.module, logits, labels, saved, grad_rows, grad, plan.terms, class_weights, plan.memo
            )
        if ctx.overwrite:
            _increment_version(grad)
            ctx.overwritten = True
        if not weights:
            return grad, None, None, None, None
        return grad, None, None, None, None, None, None


# What `Function.apply` does beyond calling its base class is for the transforms of torch.func, and takes as
# long as a small kernel.
_apply_without_transforms = super(torch.autograd.Function, _CrossEntropy).apply


def _compiled(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
    group: Any,
    shard: VocabShard | None,
    class_weight: Tensor | None,
    overwrite: bool,
) -> Tensor | tuple[Tensor, CrossEntropyStatistics]:
    validate(logits, target, ignore_index, label_smoothing, z_loss_weight)
    if overwrite and logits.requires_grad and torch.is_grad_enabled():
        _refuse_to_overwrite(logits)
    if shard is None:
        shard = VocabShard.of_equal_shards(group, logits.shape[-1])
    labels = target.reshape(-1)
    weights: tuple[Tensor, ...] = ()
    if class_weight is not None:
        weights = _class_weights(class_weight, logits, labels, shard)
    terms = Terms(shard, ignore_index, float(label_smoothing), float(z_loss_weight))
    result = _CompiledCrossEntropy.apply(logits, labels, terms, statistics, *weights)
    return _with_names(result) if statistics else result


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
    dtype = accumulation_dtype(logits)
    return ClassWeights.of(class_weight, labels, shard.first_column, shard.columns, dtype)


def _refuse_to_overwrite(logits: Tensor) -> None:
    obstacle = overwrite_obstacle(logits)
    if obstacle is not None:
        raise ValueError(f"overwrite_input=True {obstacle}: pass overwrite_input=False.")


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
