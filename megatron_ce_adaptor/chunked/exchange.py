"""What happens between tensor-parallel ranks to the hidden states and to their gradient: once a step, for all
chunks together.

Each rank computes the part of the gradient that comes from its own columns of the vocabulary, so the parts
have to be added up over the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class HiddenExchange(Protocol):
    """How one rank's hidden states [n, H] become those that meet its weight [N, H], and the way back."""

    def gather(self, hidden: Tensor) -> Tensor:
        """[n, H] to [N, H]."""
        ...

    def reduce(self, gradient: Tensor) -> Tensor:
        """The gradient [N, H] from this rank's columns to that of this rank's hidden states [n, H]; may
        overwrite its argument."""
        ...


class NoExchange:
    """One rank, or somebody else adds the gradients up."""

    def gather(self, hidden: Tensor) -> Tensor:
        return hidden

    def reduce(self, gradient: Tensor) -> Tensor:
        return gradient


class ReplicatedHidden(NamedTuple):
    """All ranks hold all tokens: no collective forward, one all-reduce backward."""

    group: Any

    def gather(self, hidden: Tensor) -> Tensor:
        return hidden

    def reduce(self, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient, group=self.group)
        return gradient


class SequenceParallelHidden(NamedTuple):
    """Rank r holds the r-th of equal parts of the tokens: one all-gather forward, one reduce-scatter
    backward."""

    group: Any

    def gather(self, hidden: Tensor) -> Tensor:
        gathered = torch.empty(
            self.group.size() * hidden.shape[0], hidden.shape[1], dtype=hidden.dtype, device=hidden.device
        )
        dist.all_gather_into_tensor(gathered, hidden.contiguous(), group=self.group)
        return gathered

    def reduce(self, gradient: Tensor) -> Tensor:
        part = torch.empty(
            gradient.shape[0] // self.group.size(),
            gradient.shape[1],
            dtype=gradient.dtype,
            device=gradient.device,
        )
        dist.reduce_scatter_tensor(part, gradient, group=self.group)
        return part
