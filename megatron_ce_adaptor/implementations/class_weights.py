"""Class weights as the implementations need them: by column of the shard, and by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ClassWeights(NamedTuple):
    """Weights of one call, in the accumulation dtype (fp64 for fp64 logits, else fp32).

    With weights w, the loss of a row with label y is, as PyTorch defines it for reduction="none",
    (1 - ls) * w[y] * -log p[y] + ls / V * sum over classes of w[c] * -log p[c], and z_loss_weight * lse^2 is
    not weighted.

    Attributes:
        columns: [C], of this shard's classes.
        rows: [N + 1], of each row's label (1 where it is no class), and then the sum over all V classes.
    """

    columns: Tensor
    rows: Tensor

    @classmethod
    def of(
        cls, class_weight: Tensor, labels: Tensor, first_column: int, columns: int, dtype: torch.dtype
    ) -> ClassWeights:
        """
        Args:
            class_weight: [V], of the whole vocabulary, the same on every rank.
            labels: [N] class ids.
        """
        weights = class_weight.detach().to(dtype)
        rows = torch.cat([weight_of_labels(weights, labels), weights.sum().view(1)])
        return cls(weights[first_column : first_column + columns].contiguous(), rows)


def weight_of_labels(weights: Tensor, labels: Tensor) -> Tensor:
    """weights[labels], of the labels' shape; 1 where a label is no class."""
    classes = weights.numel()
    known = (labels >= 0) & (labels < classes)
    return torch.where(known, weights[labels.clamp(0, classes - 1)], 1.0)
