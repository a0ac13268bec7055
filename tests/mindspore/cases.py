"""The cases that are run on several ranks, known to the ranks and to the tests that read their results."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOKENS = 6
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """One loss. `vocabulary` is split as torch.chunk splits; `described`: its size is given."""

    vocabulary: int
    described: bool
    reduction: str
    weighted: bool
    label_smoothing: float
    z_loss_weight: float
    ignored: str
    dtype: str = "float32"

    @property
    def name(self) -> str:
        parts = [self.dtype, f"V{self.vocabulary}", self.reduction, f"ignored {self.ignored}"]
        parts += ["weighted"] if self.weighted else []
        parts += [f"smoothing {self.label_smoothing}"] if self.label_smoothing else []
        parts += [f"z {self.z_loss_weight}"] if self.z_loss_weight else []
        return ", ".join(parts)


def cases() -> list[Case]:
    """Every reduction x shard shape x weight x smoothing x ignored pattern in fp32; a few of the other
    dtypes."""
    # on 2 and 4 ranks: equal, uneven, an empty last shard (9 on 4), fewer classes than ranks (3 on 4)
    shapes = [(16, False), (17, True), (9, True), (3, True)]
    found = [
        # a z-loss in every other case of each kind
        Case(v, described, reduction, weighted, smoothing, 0.01 * (k % 2), ignored)
        for k, ((v, described), reduction, weighted, smoothing, ignored) in enumerate(
            itertools.product(
                shapes, ("none", "sum", "mean"), (False, True), (0.0, 0.1), ("none", "some", "all")
            )
        )
    ]
    for dtype, reduction in itertools.product(("float64", "float16", "bfloat16"), ("none", "mean")):
        for smoothing, weighted in ((0.0, False), (0.1, True)):
            found.append(Case(17, True, reduction, weighted, smoothing, 0.01, "some", dtype))
    return found


@dataclass(frozen=True)
class Inputs:
    """logits [N, V] (unrounded), labels [N], upstream [N] (of "sum" and "mean": its first), weight [V] or
    None."""

    logits: NDArray[np.float64]
    labels: NDArray[np.int64]
    upstream: NDArray[np.float64]
    weight: NDArray[np.float64] | None


def inputs_of(case: Case, index: int) -> Inputs:
    """The same on every rank."""
    random = np.random.default_rng(index)
    logits = (random.standard_normal((TOKENS, case.vocabulary)) * 4).astype(np.float32).astype(np.float64)
    labels = random.integers(0, case.vocabulary, TOKENS)
    if case.ignored == "some":
        labels[[0, 3]] = IGNORED
    elif case.ignored == "all":
        labels[:] = IGNORED
    upstream = random.standard_normal(TOKENS).astype(np.float32).astype(np.float64)
    weight = random.random(case.vocabulary).astype(np.float32).astype(np.float64) + 0.5
    return Inputs(logits, labels, upstream, weight if case.weighted else None)
