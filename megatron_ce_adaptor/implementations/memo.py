"""What an implementation keeps about calls that are alike in all but what their tensors hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# (logits, target) -> what the implementation's `forward` gives without class weights; None, and nothing done,
# if this call has to go the long way after all
Forward = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor, Tensor | None] | None"]
# (logits, target, saved, grad_loss, overwrite) -> the gradient, written into the logits or a tensor of its
# own; None as above, for instance where hooks for saved tensors brought back others than forward's
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, bool], "Tensor | None"]


class Memo:
    """
    Attributes:
        calls: the implementation's own.
        forward, gradient: what a repeated call of an unsplit vocabulary, and the backward of any, may run
            instead of the implementation's functions: the same without another look at what is known to be
            alike, because the way there takes longer than the launch of a small kernel. None: go that way.
    """

    __slots__ = ("calls", "forward", "gradient")

    def __init__(self) -> None:
        self.calls: dict[Any, Any] = {}
        self.forward: Forward | None = None
        self.gradient: Gradient | None = None
