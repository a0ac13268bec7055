"""`CrossEntropyLoss`: the (loss, metrics) form over split and unsplit logits."""

from __future__ import annotations

import math
from typing import Any

from mindspore import Tensor, mint, ops

from megatron_ce_adaptor.mindspore import runtime
from megatron_ce_adaptor.mindspore.cross_entropy import CrossEntropyStatistics, check_options
from megatron_ce_adaptor.mindspore.layout import is_dtensor
from megatron_ce_adaptor.mindspore.loss import loss_parallel_cross_entropy

__all__ = ["CrossEntropyLoss", "LossAndMetrics"]

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


class CrossEntropyLoss:
    """Cross entropy, summed over the tokens and divided by the number of valid ones in the global batch.

    ```python
    loss, metrics = CrossEntropyLoss()(logits, labels, global_valid_tokens=n)
    ```

    `global_valid_tokens` is the number of labels other than `ignore_index` over all data- and
    context-parallel ranks and micro-batches of a step, so that gradients only have to be summed; without it
    the loss is the plain sum. Per token the loss is that of `loss_parallel_cross_entropy`, in fp32 (fp64 for
    fp64 logits). Class weights do not change what is divided by.

    Plain shards of a vocabulary need `tp_group`; HyperParallel's DTensors say themselves how they are split.
    The loss is a plain 0-d tensor of this rank's tokens.

    Args:
        ignore_index: label of tokens that do not count.
        label_smoothing: in [0, 1).
        z_loss_weight: weight of lse^2, lse = log sum exp of the logits.
        weight: class weights [V], floating, the whole vocabulary's on every rank.
        tp_group: for plain logits, the name of the group their vocabulary is split over; None: not split.
        global_vocab_size: V, where the shards are uneven; None: all ranks have as many columns.
        report_metrics: put "accuracy/mean" (fraction of valid tokens whose label has the largest logit) and
            "entropy/mean" (nats) into the metrics, and "z_loss/mean" if there is a z-loss: like the loss,
            sums over this call's tokens divided by `global_valid_tokens`, to be summed over ranks and calls;
            without it divided by this call's own number of valid tokens. 0-d, without gradient.
        bare: return the loss alone (also for gradient functions without `has_aux`).

    Raises (when called): TypeError, ValueError as `loss_parallel_cross_entropy`; ValueError for a
        `global_valid_tokens` that is negative, NaN or of several elements.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss_weight: float = 0.0,
        weight: Tensor | None = None,
        tp_group: Any = None,
        global_vocab_size: int | None = None,
        report_metrics: bool = False,
        bare: bool = False,
    ) -> None:
        check_options(ignore_index, label_smoothing, z_loss_weight)
        self.ignore_index = ignore_index
        self.label_smoothing = float(label_smoothing)
        self.z_loss_weight = float(z_loss_weight)
        self.weight = weight
        self.tp_group = tp_group
        self.global_vocab_size = global_vocab_size
        self.report_metrics = report_metrics
        self.bare = bare

    def __call__(
        self, logits: Tensor, labels: Tensor, global_valid_tokens: Tensor | float | None = None
    ) -> LossAndMetrics | Tensor:
        """The loss, with its metrics unless `bare`.

        Args:
            logits: [..., C], vocabulary last.
            labels: class ids, int32 or int64, of the logits' shape without the vocabulary.
            global_valid_tokens: see the class; a number or a tensor of one element. 0 counts as 1.
        """
        result = loss_parallel_cross_entropy(
            logits,
            labels,
            self.tp_group,
            self.global_vocab_size,
            self.weight,
            self.ignore_index,
            self.label_smoothing,
            self.z_loss_weight,
            "none",
            self.report_metrics,
        )
        per_token, statistics = result if isinstance(result, tuple) else (result, None)
        count = valid_token_count(global_valid_tokens, per_token)
        loss = runtime.total(per_token)
        if count is not None:
            loss = _divided(loss, count)
        if self.bare:
            return loss
        own = getattr(labels, "_local_tensor") if is_dtensor(labels) else labels  # noqa: B009
        return loss, {} if statistics is None else self.metrics_of(statistics, own, count)

    def metrics_of(
        self, statistics: CrossEntropyStatistics, labels: Tensor, count: Tensor | float | None
    ) -> dict[str, Tensor]:
        """The metrics of these tokens; labels of the statistics' shape.

        Args:
            count: what sums are divided by; None: the labels' own number of valid ones.
        """
        valid = labels != self.ignore_index
        dtype = statistics.entropy.dtype
        sums = {
            "accuracy/mean": ops.logical_and(statistics.correct, valid).astype(dtype).sum(),
            "entropy/mean": ops.where(valid, statistics.entropy, 0.0).sum(),
        }
        if self.z_loss_weight:
            squared = ops.where(valid, statistics.log_sum_exp * statistics.log_sum_exp, 0.0)
            sums["z_loss/mean"] = squared.sum() * runtime.number(self.z_loss_weight, dtype)
        if count is None:
            count = mint.clamp(valid.astype(dtype).sum(), min=1)
        return {name: ops.stop_gradient(_divided(total, count)) for name, total in sums.items()}


def _divided(total: Tensor, count: Tensor | float) -> Tensor:
    return total / (count if isinstance(count, Tensor) else runtime.number(count, total.dtype))


def valid_token_count(value: Tensor | float | None, like: Tensor) -> Tensor | float | None:
    """What sums are divided by: the given number of valid tokens, 1 where it is 0, None where none is given.

    Args:
        like: a tensor of the dtype to divide.

    Raises:
        TypeError, ValueError: it is no number of tokens. Tensors on a device are not looked at.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        if math.prod(value.shape) != 1:
            raise ValueError(
                f"global_valid_tokens has shape {tuple(value.shape)}, expected a single number of tokens."
            )
        if not runtime.is_on_cpu(value):
            number = ops.stop_gradient(value).reshape(()).astype(runtime.accumulation_dtype(like))
            return ops.where(number == 0, 1.0, number)
        value = value.asnumpy().reshape(()).item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"global_valid_tokens is {value!r}, expected a number or a tensor of one element.")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"global_valid_tokens is {value}, expected a number of tokens (at least 0).")
    return value if value != 0 else 1
