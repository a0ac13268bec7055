"""DTensors on meshes of one and two dimensions, and HyperParallel's context, with the stand-in for
HyperParallel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense
import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

sys.path.insert(0, str(Path(__file__).parent / "stand_in"))

from hyper_parallel import DeviceMesh, DTensor, Partial, Replicate, Shard
from hyper_parallel.core import dispatch
from hyper_parallel.core.tensor_parallel.loss_parallel import loss_parallel
from hyper_parallel.platform.mindspore import loss_parallel_ops

from megatron_ce_adaptor.mindspore import (
    gather_tensor_parallel_logits,
    loss_parallel_cross_entropy,
    register_with_hyper_parallel,
    unregister_from_hyper_parallel,
)

TOKENS, CLASSES = 8, 12


class Problem:
    """Logits [8, 12] and labels, with an ignored label in the first rows only, on a mesh."""

    def __init__(self, mesh: DeviceMesh, logits_placements: Any, labels_placements: Any) -> None:
        random = np.random.default_rng(21)
        self.logits = random.standard_normal((TOKENS, CLASSES)).astype(np.float32) * 3
        self.labels = random.integers(0, CLASSES, TOKENS)
        self.labels[[0, 1, 5]] = -100
        self.weight = (random.random(CLASSES) + 0.5).astype(np.float32)
        self.mesh, self.placements = mesh, logits_placements
        self.own = self._own(self.logits.shape, logits_placements)
        self.local = Tensor(self.logits[self.own].copy())
        own_labels = self.labels[self._own(self.labels.shape, labels_placements)]
        self.target = DTensor(Tensor(own_labels.copy()), mesh, labels_placements)

    def _own(self, shape: Any, placements: Any) -> tuple[slice, ...]:
        found = [slice(0, size) for size in shape]
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                place, size = self.mesh.get_local_rank(dim), self.mesh.mesh_shape[dim]
                found[placement.dim] = dense.chunk(shape[placement.dim], size, place)
        return tuple(found)

    def dtensor(self, local: Tensor) -> DTensor:
        return DTensor(local, self.mesh, self.placements)

    def compare(self, loss: Callable[[DTensor], Tensor], reduction: str, **options: Any) -> dict[str, Any]:
        """The loss [] or [n], its right parts, and the error of its gradient."""
        value, gradient = ms.value_and_grad(lambda x: loss(self.dtensor(x)).sum())(self.local)
        weight = options.pop("weight", None)
        right = dense.dense_cross_entropy(
            self.logits.astype(np.float64), self.labels, np.ones(TOKENS), weight=weight, **options
        )
        divisor = dense.mean_divisor(self.labels, weight) if reduction == "mean" else 1.0
        difference = gradient.asnumpy() - right.gradient[self.own] / divisor
        return {
            "value": float(value.asnumpy()),
            "part": float(right.loss[self.own[0]].sum() / divisor),
            "gradient": float(np.abs(difference).max()),
        }


def meshes(rank: int, world_size: int) -> dict[str, Any]:
    tp = DeviceMesh(list(range(world_size)), ("tp",))
    reversed_tp = DeviceMesh(list(range(world_size))[::-1], ("tp",))
    problems = {
        "1-D": Problem(tp, [Shard(1)], [Replicate()]),
        "reversed": Problem(reversed_tp, [Shard(1)], [Replicate()]),
    }
    if world_size == 4:
        grid = [[0, 1], [2, 3]]
        problems["dp, tp"] = Problem(
            DeviceMesh(grid, ("dp", "tp")), [Shard(0), Shard(1)], [Shard(0), Replicate()]
        )
        problems["tp, dp"] = Problem(
            DeviceMesh(grid, ("tp", "dp")), [Shard(1), Shard(0)], [Replicate(), Shard(0)]
        )
    found: dict[str, Any] = {"direct": {}, "errors": {}, "routed": {}}
    for name, problem in problems.items():
        for reduction in ("none", "sum", "mean"):
            found["direct"][name, reduction] = problem.compare(
                lambda x, p=problem, r=reduction: loss_parallel_cross_entropy(
                    x, p.target, weight=Tensor(p.weight), reduction=r, label_smoothing=0.1
                ),
                reduction, weight=problem.weight.astype(np.float64), label_smoothing=0.1,
            )  # fmt: skip
        rows = gather_tensor_parallel_logits(problem.dtensor(problem.local))
        found["direct"][name, "gather"] = bool((rows.asnumpy() == problem.logits[problem.own[0]]).all())
    found["errors"] = _errors(problems["1-D"], tp)
    found["routed"] = _routed(problems)
    return found


def _errors(problem: Problem, mesh: DeviceMesh) -> dict[str, tuple[str, str]]:
    def on(placements: Any) -> DTensor:
        return DTensor(problem.local, mesh, placements)

    odd = problem.local if mesh.get_local_rank(0) else mint.cat([problem.local, problem.local[:, :1]], -1)
    calls = {
        "weights and unequal shards": lambda: loss_parallel_cross_entropy(
            DTensor(odd, mesh, [Shard(1)]), problem.target, weight=Tensor(problem.weight)
        ),
        "not split": lambda: loss_parallel_cross_entropy(on([Replicate()]), problem.target),
        "the batch split": lambda: loss_parallel_cross_entropy(on([Shard(0)]), problem.target),
        "partial": lambda: loss_parallel_cross_entropy(on([Partial()]), problem.target),
        "labels split": lambda: loss_parallel_cross_entropy(
            on([Shard(1)]), DTensor(problem.target._local_tensor, mesh, [Shard(0)])
        ),
        "another group": lambda: loss_parallel_cross_entropy(on([Shard(1)]), problem.target, "another"),
        "plain logits, labels a DTensor": lambda: loss_parallel_cross_entropy(problem.local, problem.target),
        "weights split": lambda: loss_parallel_cross_entropy(
            on([Shard(1)]), problem.target, weight=DTensor(Tensor(problem.weight), mesh, [Shard(0)])
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = ("nothing", "")
        except Exception as error:
            found[name] = (type(error).__name__, str(error).split("\n")[0])
    return found


def _routed(problems: dict[str, Problem]) -> dict[Any, Any]:
    """HyperParallel's context before, during and after the registration."""
    found: dict[Any, Any] = {}
    one = problems["1-D"]

    def own_is_called() -> bool:
        try:
            with loss_parallel():
                dispatch.cross_entropy(one.dtensor(one.local), one.target)
        except loss_parallel_ops.OwnWasCalled:
            return True
        return False

    found["before"] = own_is_called()
    originals = ops.cross_entropy, mint.nn.functional.cross_entropy, mint.nn.cross_entropy
    register_with_hyper_parallel()
    register_with_hyper_parallel()  # once is enough
    try:
        variants = {
            "dispatched": dispatch.cross_entropy,
            "mint.nn.functional": mint.nn.functional.cross_entropy,
            "ops": ops.cross_entropy,
        }
        for name, problem in problems.items():
            for variant, function in variants.items():
                for reduction in ("none", "sum", "mean"):
                    with loss_parallel():
                        found[name, variant, reduction] = problem.compare(
                            lambda x, f=function, p=problem, r=reduction: f(
                                x, p.target, weight=Tensor(p.weight), reduction=r, label_smoothing=0.1
                            ),
                            reduction, weight=problem.weight.astype(np.float64), label_smoothing=0.1,
                        )  # fmt: skip
        narrow = DTensor(one.target._local_tensor.astype(ms.int32), one.mesh, one.target.placements)
        layers = {
            "mint.nn": (mint.nn.CrossEntropyLoss(), one.target),
            "nn": (nn.CrossEntropyLoss(), narrow),  # whose labels must be int32
        }
        for variant, (layer, target) in layers.items():
            with loss_parallel():
                found["1-D", variant, "mean"] = one.compare(lambda x, f=layer, t=target: f(x, t), "mean")
        plain = Tensor(one.logits), Tensor(np.where(one.labels < 0, 0, one.labels), ms.int32)
        with loss_parallel():
            inside = ops.cross_entropy(*plain)
        found["plain tensors are MindSpore's own"] = bool(inside.asnumpy() == originals[0](*plain).asnumpy())
    finally:
        unregister_from_hyper_parallel()
    restored = ops.cross_entropy, mint.nn.functional.cross_entropy, mint.nn.cross_entropy
    found["after"] = own_is_called() and restored == originals
    return found
