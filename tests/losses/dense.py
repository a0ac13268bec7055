"""Dense fp64 reference of the losses: PyTorch's own cross entropy, of the whole vocabulary and all tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
TIGHT = 1e-12  # relative, of norms, in fp64


@dataclasses.dataclass
class Problem:
    """Hidden states [..., H], the output layer's weight [V, H] and bias, labels [...], some ignored."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    class_weight: Tensor

    @classmethod
    def make(
        cls,
        shape: tuple[int, ...],
        hidden: int,
        vocab: int,
        *,
        bias: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        ignored: float = 0.25,
    ) -> Problem:
        g = torch.Generator().manual_seed(seed * 7919 + vocab)
        labels = torch.randint(0, vocab, shape, generator=g)
        labels[torch.rand(shape, generator=g) < ignored] = IGNORED
        draw = {"generator": g, "dtype": torch.float64}
        return cls(
            torch.randn(*shape, hidden, **draw).to(dtype),
            torch.randn(vocab, hidden, **draw).to(dtype),
            torch.randn(vocab, **draw).to(dtype) if bias else None,
            labels,
            torch.rand(vocab, **draw) + 0.5,
        )

    @property
    def valid(self) -> int:
        return int((self.labels != IGNORED).sum())


@dataclasses.dataclass
class Reference:
    loss: float
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    metrics: dict[str, float]


def reference(p: Problem, *, divisor: float, upstream: float = 1.0, **terms: Any) -> Reference:
    """sum of the losses / divisor, and its gradients times `upstream`; terms as CrossEntropyLoss's."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (p.hidden, p.weight))
    bias = None if p.bias is None else p.bias.detach().double().requires_grad_()
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    labels = p.labels.flatten()
    class_weight = terms.get("weight")
    loss = F.cross_entropy(
        logits,
        labels,
        weight=None if class_weight is None else class_weight.double(),
        label_smoothing=terms.get("label_smoothing", 0.0),
        ignore_index=IGNORED,
        reduction="sum",
    )
    kept = labels != IGNORED
    squared = logits[kept].logsumexp(-1).square().sum()
    z_loss = terms.get("z_loss_weight", 0.0) * squared
    loss = (loss + z_loss) / divisor
    wanted = [x for x in (hidden, weight, bias) if x is not None]
    grads = list(torch.autograd.grad(loss * upstream, wanted)) + [None]
    log_prob = logits.detach()[kept].log_softmax(-1)
    hits = logits.detach()[kept].argmax(-1) == labels[kept]
    metrics = {
        "accuracy/mean": float(hits.sum()) / divisor,
        "entropy/mean": float(-(log_prob.exp() * log_prob).sum()) / divisor,
    }
    if terms.get("z_loss_weight"):
        metrics["z_loss/mean"] = float(z_loss.detach()) / divisor
    return Reference(float(loss.detach()), grads[0], grads[1], grads[2], metrics)


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TIGHT) -> None:
    """Relative error of the norm."""
    assert tuple(actual.shape) == tuple(expected.shape), f"{what}: shape {tuple(actual.shape)}"
    error = float((actual.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error <= tolerance, f"{what}: relative error {error:.3g}, allowed {tolerance:.3g}"


def assert_number(actual: Any, expected: float, what: str, tolerance: float = TIGHT) -> None:
    actual = float(actual.detach() if isinstance(actual, Tensor) else actual)
    assert abs(actual - expected) <= tolerance * (1 + abs(expected)), f"{what}: {actual}, expected {expected}"


def all_terms(p: Problem) -> list[dict[str, Any]]:
    """Terms of CrossEntropyLoss, none and each and all."""
    return [
        {},
        {"label_smoothing": 0.1},
        {"z_loss_weight": 0.02},
        {"weight": p.class_weight},
        {"label_smoothing": 0.2, "z_loss_weight": 0.01, "weight": p.class_weight},
    ]
