"""`parallel_cross_entropy`: cross entropy of logits whose vocabulary is split over the ranks of a group."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function

from megatron_ce_adaptor.mindspore import rows, runtime
from megatron_ce_adaptor.mindspore.rows import ClassWeights, Terms
from megatron_ce_adaptor.mindspore.vocab_shard import VocabShard, class_weight_error
from megatron_ce_adaptor.settings import switch

__all__ = ["CrossEntropyStatistics", "parallel_cross_entropy"]


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
    """Cross entropy over a vocabulary split across tensor-parallel ranks: the PyTorch door of the same name,
    on MindSpore in PyNative mode.

    loss = (1 - ls) * -log p[target] + ls * mean over classes of -log p + z_loss_weight * lse^2, lse = log sum
    exp. Computed in fp32 (fp64 for fp64 logits), gradients rounded once to the logits' dtype. No host
    synchronisation on devices but for the check of the shards' sizes in a group's first call.

    Collectives: one all_gather of 3 to 5 numbers a token in forward if the group has several ranks, none in
    backward. The loss is bitwise the same on every rank of the group.

    Args:
        inp: logits [N, V/W], [b, s, V/W] or [s, b, V/W] of this rank's columns, fp16, bf16, fp32 or fp64, any
            strides (3-D ones that are no view of [N, V/W] are copied); rank r of W holds columns r * V/W to
            (r + 1) * V/W. Never written.
        target: class ids of the whole vocabulary, int32 or int64, as many as inp has rows, in their order.
        label_smoothing: in [0, 1).
        reduce_loss: return the sum over this call's tokens divided by max(1, number of targets other than
            ignore_idx).
        dist_process_group: the name of the group the vocabulary is split over; None for an unsplit one.
        ignore_idx: label whose rows have loss 0 and gradient 0; may be a class.
        is_cg_capturable: accepted for callers of the PyTorch door.
        overwrite_input: must be False: gradients are computed out of place here.
        z_loss_weight: weight of lse^2 on rows that are not ignored.
        return_statistics: also return `CrossEntropyStatistics`.
        _input: deprecated name of inp (FutureWarning); overrides it.

    Returns:
        The loss, fp32 (fp64 for fp64 logits), of inp's leading shape, or 0-d with reduce_loss; or (loss,
        statistics).

    Raises:
        TypeError: no tensors, or tensors of an unsupported dtype; a group that is no name.
        ValueError: shapes that do not fit; label_smoothing out of range; a label that is neither a class nor
            ignore_idx (checked on CPU, on a device with MCE_CHECK_LABELS=1; unchecked, its loss is lse - max
            of the row and its gradient the softmax); shards of unequal sizes (on all ranks); this process is
            not in the group.
        NotImplementedError: overwrite_input=True.
        RuntimeError: second derivatives (when the gradient is taken).
    """
    if _input is not None:
        warnings.warn(
            "parallel_cross_entropy: the argument '_input' is deprecated, pass 'inp'.",
            FutureWarning,
            stacklevel=2,
        )
        inp = _input
    refuse_overwriting(overwrite_input)
    check_options(ignore_idx, label_smoothing, z_loss_weight, "ignore_idx")
    _check_dimensions(inp, target)
    shard = VocabShard.of_equal_shards(dist_process_group, inp.shape[-1])
    result = cross_entropy(
        inp, target, shard, None, ignore_idx, label_smoothing, z_loss_weight, return_statistics
    )
    if not reduce_loss:
        return result
    count = mint.clamp(runtime.total((target != ignore_idx).astype(ms.int64)), min=1)
    if isinstance(result, Tensor):
        return runtime.total(result) / count.astype(result.dtype)
    return runtime.total(result[0]) / count.astype(result[0].dtype), result[1]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    shard: VocabShard,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    return_statistics: bool,
) -> Tensor | tuple[Tensor, CrossEntropyStatistics]:
    """What `parallel_cross_entropy` does, for the package's doors, never reduced.

    Args:
        logits: [..., C], the shard's columns (as many as were given, see `VocabShard.fitted`).
        target: as many labels as there are rows.
        class_weight: [V] of the whole vocabulary, without gradient: PyTorch's weighted loss.
    """
    labels = target.reshape(-1)
    terms = terms_of(
        shard, labels, class_weight, ignore_index, label_smoothing, z_loss_weight, return_statistics, logits
    )
    leading = logits.shape[:-1]
    matrix = shard.fitted(logits).reshape(labels.shape[0], shard.columns) if labels.shape[0] else logits
    found = _CrossEntropy.apply(matrix, labels, _Call(shard, terms)) if labels.shape[0] else None
    if labels_are_checked(logits):
        # Only now: before the shards' sizes are compared, ranks may disagree about what a class is, and one
        # that raised would leave the others waiting in the collective.
        refuse_unknown_labels(target, shard.total_columns, ignore_index)
    if found is None:
        nothing = mint.zeros(leading, dtype=runtime.accumulation_dtype(logits))
        # connected to the logits, so that a gradient function finds them
        loss = nothing + (logits.astype(nothing.dtype) * 0).sum(-1)
        return loss if not return_statistics else (loss, _named([nothing] * 4, leading))
    if not return_statistics:
        return found.reshape(leading)
    loss, *statistics = found
    return loss.reshape(leading), _named(statistics, leading)


def _named(statistics: list[Tensor], leading: tuple[int, ...]) -> CrossEntropyStatistics:
    lse, target_log_prob, entropy, correct = (kind.reshape(leading) for kind in statistics)
    return CrossEntropyStatistics(lse, target_log_prob, entropy, correct != 0)


class _Call:
    """The arguments that are no tensors, as one object that autograd does not look into."""

    __slots__ = ("shard", "terms")

    def __init__(self, shard: VocabShard, terms: Terms) -> None:
        self.shard, self.terms = shard, terms


class _CrossEntropy(_Function):  # type: ignore[misc, unused-ignore]
    """Logits [N, C], labels [N] and a `_Call` to loss [N], or (loss, four statistics [N])."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, call: _Call) -> Tensor | tuple[Tensor, ...]:
        merged = forward_pass(logits, labels, call.shard, call.terms)
        ctx.save_for_backward(logits, labels, *merged.saved)
        ctx.terms = call.terms
        if merged.statistics is None:
            return merged.loss
        # one dtype, as the outputs of a function are taken to have
        *numbers, correct = merged.statistics
        statistics = (*numbers, correct.astype(merged.loss.dtype))
        ctx.mark_non_differentiable(*statistics)
        return (merged.loss, *statistics)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        logits, labels, peak, log_total, grad_target = ctx.saved_tensors

        def gradient() -> Tensor:
            return rows.gradient(logits, labels, (peak, log_total, grad_target), grad_loss, ctx.terms)

        return runtime.differentiable_once("parallel_cross_entropy", gradient, logits, grad_loss), None, None


def forward_pass(
    logits: Tensor, labels: Tensor, shard: VocabShard, terms: Terms, *, last: bool = True
) -> rows.Merged:
    """Loss and what backward needs, of logits [N, C] with N > 0. One all_gather if the vocabulary is split;
    last: of the call's."""
    statistics = rows.row_statistics(logits, labels, terms)
    if shard.group is None:
        return rows.merge([statistics], labels, terms)
    gathered, agree = shard.gather(statistics, last=last)
    return rows.merge(gathered, labels, terms, agree)


def terms_of(
    shard: VocabShard,
    labels: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    statistics: bool,
    logits: Tensor,
) -> Terms:
    """The terms of a call on this shard; labels [N]."""
    weights = None
    if class_weight is not None:
        class_weight_error(class_weight, shard.total_columns)
        whole = ops.stop_gradient(class_weight).astype(runtime.accumulation_dtype(logits))
        own = whole[shard.first_column : shard.first_column + shard.columns]
        weights = ClassWeights(own, weight_of_labels(whole, labels), whole.sum())
    return Terms(
        shard.first_column,
        shard.total_columns,
        ignore_index,
        float(label_smoothing),
        float(z_loss_weight),
        weights,
        statistics,
    )


def weight_of_labels(weights: Tensor, labels: Tensor) -> Tensor:
    """weights[labels], of the labels' shape [N]; 1 where a label is no class."""
    known = ops.logical_and(labels >= 0, labels < weights.shape[0])
    found = mint.gather(weights, 0, ops.where(known, labels.astype(ms.int64), 0))
    return ops.where(known, found, 1.0)


def labels_are_checked(logits: Tensor) -> bool:
    """MCE_CHECK_LABELS; unset, on the CPU yes, and on devices, where looking waits for them, no."""
    setting = switch("MCE_CHECK_LABELS")
    return runtime.is_on_cpu(logits) if setting is None else setting


def refuse_unknown_labels(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raises ValueError naming the first label that is none of the classes."""
    labels = target.asnumpy()
    bad = (labels != ignore_index) & ((labels < 0) | (labels >= classes))
    if bad.any():
        where = tuple(int(i[0]) for i in bad.nonzero())
        raise ValueError(
            f"target[{', '.join(map(str, where))}] is {int(labels[where])}, expected a class in "
            f"[0, {classes}) or ignore_idx {ignore_index}; mark tokens without a target by ignore_idx."
        )


def refuse_overwriting(overwrite_input: bool) -> None:
    """Raises NotImplementedError for overwrite_input=True."""
    if overwrite_input:
        raise NotImplementedError(
            "overwrite_input=True is not supported on MindSpore, which does not notice that a tensor was "
            "overwritten: pass overwrite_input=False."
        )


def check_dtypes(logits: Any, target: Any, name: str = "inp", target_name: str = "target") -> None:
    """Raises TypeError unless both are tensors, of floats and of class ids."""
    for called, value in ((name, logits), (target_name, target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{called} is a {type(value).__name__}, expected a mindspore.Tensor.")
    if logits.dtype not in runtime.LOGITS_DTYPES:
        raise TypeError(
            f"{name} has dtype {logits.dtype}, expected float16, bfloat16, float32 or float64 logits."
        )
    if target.dtype not in runtime.LABEL_DTYPES:
        raise TypeError(
            f"{target_name} has dtype {target.dtype}, expected int64 or int32 class ids (not probabilities)."
        )


def check_options(
    ignore_index: Any, label_smoothing: float, z_loss_weight: float, name: str = "ignore_index"
) -> None:
    """Raises for options that no call can have; name: the door's name of `ignore_index`."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{name} is {ignore_index!r}, expected an int.")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 <= label_smoothing < 1.")
    if not math.isfinite(z_loss_weight):
        raise ValueError(f"z_loss_weight is {z_loss_weight}, expected a finite number.")


def _check_dimensions(logits: Any, target: Any) -> None:
    check_dtypes(logits, target)
    if logits.ndim not in (2, 3):
        raise ValueError(
            f"inp has shape {tuple(logits.shape)}, expected [N, V], [b, s, V] or [s, b, V], vocabulary last."
        )
    tokens = math.prod(logits.shape[:-1])
    labels = math.prod(target.shape)
    if labels != tokens:
        raise ValueError(
            f"target has shape {tuple(target.shape)} = {labels} labels, expected one for each of the "
            f"{tokens} "
            f"rows of inp {tuple(logits.shape)}."
        )
