"""`CrossEntropyLoss`: TorchTitan's (loss, metrics) form over sharded and unsharded logits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ce_adaptor.cross_entropy import CrossEntropyStatistics

__all__ = ["CrossEntropyLoss", "LossAndMetrics"]

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


class CrossEntropyLoss:
    """Cross entropy, summed over the tokens and divided by the number of valid ones in the global batch.

    ```python
    loss, metrics = CrossEntropyLoss()(logits, labels, global_valid_tokens=n)
    ```

    As TorchTitan 0.3.0's: `global_valid_tokens` is the number of labels other than `ignore_index` over all
    data- and context-parallel ranks and micro-batches of a step, so that gradients only have to be summed;
    without it the loss is the plain sum. Per token the loss is that of `loss_parallel_cross_entropy` (label
    smoothing, z-loss and class weights included), in fp32 (fp64 for fp64 logits). Class weights do not
    change what is divided by.

    Whether the vocabulary is split is seen from the logits: DTensors say it themselves, inside and outside
    of a `loss_parallel` context; plain shards need `tp_group`. The loss is a plain tensor for plain labels.
    For DTensor labels it is a 0-d DTensor: Replicate where all ranks of a mesh dimension have the same
    tokens, Partial where they are split (`full_tensor()` adds them up).

    Args:
        ignore_index: label of tokens that do not count.
        label_smoothing: in [0, 1).
        z_loss_weight: weight of lse^2, lse = log sum exp of the logits.
        weight: class weights [V], floating, the whole vocabulary's on every rank.
        tp_group: for plain logits, the group their vocabulary is split over; None: not split.
        global_vocab_size: for plain shards of `torch.chunk`'s sizes (uneven ones, too), the size of the whole
            vocabulary; None: all ranks have as many columns.
        report_metrics: put "accuracy/mean" (fraction of valid tokens whose label has the largest logit) and
            "entropy/mean" (nats) into the metrics, and "z_loss/mean" if there is a z-loss: like the loss,
            sums over this call's tokens divided by `global_valid_tokens`, to be summed over ranks and calls;
            without `global_valid_tokens` divided by this call's own number of valid tokens (of DTensors, the
            whole batch's, which takes an all-reduce). 0-d, detached, of the loss's kind (plain or DTensor);
            nothing waits for the device.
        bare: return the loss alone.

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
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise TypeError(f"ignore_index is {ignore_index!r}, expected an int.")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 <= label_smoothing < 1.")
        if not math.isfinite(z_loss_weight):
            raise ValueError(f"z_loss_weight is {z_loss_weight}, expected a finite number.")
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
            global_valid_tokens: see the class; a number or a tensor of one element. 0 counts as 1: without
                valid tokens the sum is 0.
        """
        per_token, statistics = self._per_token(logits, labels)
        count = valid_token_count(global_valid_tokens, per_token)
        if is_dtensor(per_token) and not is_dtensor(labels):  # all ranks have all tokens
            per_token = _plain(per_token)
            statistics = statistics and CrossEntropyStatistics(*map(_plain, statistics))
        loss = per_token.sum()
        if count is not None:
            loss = loss / count
        if self.bare:
            return loss
        metrics = {}
        if statistics is not None:
            metrics = self.metrics_of(statistics, labels, count, _same)
        return loss, metrics

    def metrics_of(
        self,
        statistics: CrossEntropyStatistics,
        labels: Tensor,
        count: Tensor | float | None,
        to_caller: Callable[[Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """The metrics of these tokens; labels of the statistics' shape.

        Args:
            count: what sums are divided by; None: the labels' own number of valid ones.
            to_caller: makes a sum over this rank's tokens what the caller gets.
        """
        with torch.no_grad():
            valid = labels != self.ignore_index
            sums = {
                "accuracy/mean": (statistics.correct & valid).to(statistics.entropy.dtype).sum(),
                "entropy/mean": torch.where(valid, statistics.entropy, 0.0).sum(),
            }
            if self.z_loss_weight:
                squared = torch.where(valid, statistics.log_sum_exp.square(), 0.0)
                sums["z_loss/mean"] = self.z_loss_weight * squared.sum()
            divisor = to_caller(valid.sum()) if count is None else count
            if count is None:
                divisor = _whole(divisor).clamp(min=1)  # type: ignore[arg-type]
            return {name: to_caller(total) / divisor for name, total in sums.items()}

    def _per_token(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, CrossEntropyStatistics | None]:
        from megatron_ce_adaptor.dtensor import loss as direct

        terms = direct.LossTerms(
            self.ignore_index,
            self.label_smoothing,
            self.z_loss_weight,
            "none",
            self.report_metrics,
        )
        if is_dtensor(logits):
            from megatron_ce_adaptor.dtensor.layout import check_described, logits_layout

            layout = logits_layout(logits, -1, require_sharded_vocab=False)  # type: ignore[arg-type]
            if layout.tp_dim is not None:
                check_described(layout, self.tp_group, self.global_vocab_size)
            result = direct.dtensor_cross_entropy(logits, labels, layout, self.weight, terms)
        else:
            result = direct.loss_parallel_cross_entropy(
                logits,
                labels,
                tp_group=self.tp_group,
                global_vocab_size=self.global_vocab_size,
                weight=self.weight,
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
                z_loss_weight=self.z_loss_weight,
                reduction="none",
                return_statistics=self.report_metrics,
            )
        return result if isinstance(result, tuple) else (result, None)


def valid_token_count(value: Tensor | float | None, like: Tensor) -> Tensor | float | None:
    """What sums are divided by: the given number of valid tokens, 1 where it is 0, None where none is given.

    Raises:
        TypeError, ValueError: it is no number of tokens. Tensors on a device are not looked at.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"global_valid_tokens has shape {tuple(value.shape)}, expected a single number of tokens."
            )
        value = _whole(value.detach()).reshape(())
        if value.device.type == "cpu":
            value = value.item()
        else:
            if value.device != like.device:
                raise ValueError(
                    f"global_valid_tokens is on {value.device} and the loss on {like.device}: move it there."
                )
            return torch.where(value == 0, 1, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"global_valid_tokens is {value!r}, expected a number or a tensor of one element.")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"global_valid_tokens is {value}, expected a number of tokens (at least 0).")
    return value if value != 0 else 1


def is_dtensor(value: Any) -> bool:
    """Whether the value is a DTensor, without importing DTensor where nobody has."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined]


def _plain(value: Tensor) -> Tensor:
    """A DTensor of replicated tokens as a plain tensor."""
    return value.to_local()  # type: ignore[attr-defined]


def _same(value: Tensor) -> Tensor:
    return value
