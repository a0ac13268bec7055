"""Dense fp64 cross entropy in numpy: what the MindSpore losses are compared with. No code of the package."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Dense(NamedTuple):
    """loss [N] of each token; gradient [N, V] of sum(upstream * loss); lse, log-probability of the label,
    entropy, whether the label has the largest logit, each [N]."""

    loss: Array
    gradient: Array
    lse: Array
    target_log_prob: Array
    entropy: Array
    correct: NDArray[np.bool_]


def dense_cross_entropy(
    logits: Array,
    labels: NDArray[np.int64],
    upstream: Array,
    *,
    weight: Array | None = None,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    ignore_index: int = -100,
) -> Dense:
    n, classes = logits.shape
    w = np.ones(classes) if weight is None else weight
    kept = labels != ignore_index
    target = np.where(kept, labels, 0)
    row = np.arange(n)
    top = logits.max(1)
    share = np.tile(label_smoothing / classes * w, (n, 1))
    share[row, target] += (1 - label_smoothing) * w[target]
    with np.errstate(invalid="ignore", divide="ignore"):
        lse = top + np.log(np.exp(logits - top[:, None]).sum(1))
        log_prob = logits - lse[:, None]
        prob = np.exp(log_prob)
        terms = np.where(share == 0, 0.0, -share * log_prob)
        entropy = -np.where(prob == 0, 0.0, prob * log_prob).sum(1)
    loss = np.where(kept, terms.sum(1) + z_loss_weight * lse**2, 0.0)
    of_row = share.sum(1) + 2 * z_loss_weight * lse
    gradient = (prob * of_row[:, None] - share) * np.where(kept, upstream, 0.0)[:, None]
    gradient[~kept] = 0.0
    own = log_prob[row, target]
    return Dense(
        loss,
        gradient,
        lse,
        np.where(kept, own, 0.0),
        entropy,
        kept & (logits[row, target] >= top),
    )


def mean_divisor(labels: NDArray[np.int64], weight: Array | None, ignore_index: int = -100) -> float:
    """What a mean is divided by; 1 where that is 0."""
    kept = labels != ignore_index
    total = float(kept.sum()) if weight is None else float(weight[np.where(kept, labels, 0)][kept].sum())
    return total or 1.0


def chunk(columns: int, world_size: int, rank: int) -> slice:
    """The columns of a rank where ceil(V / W) go to each until none are left."""
    full = -(-columns // world_size)
    return slice(min(columns, rank * full), min(columns, (rank + 1) * full))
