"""Whether an upstream gradient is what it was expected to be, but for a factor.

The gradients by the hidden states and the weight are linear in the tokens' upstream gradient. So those that
were computed for a loss mask, say, are right for every multiple of it, and for nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Of the dtype's precision: a mask of 0 and 1 comes back exactly, other weights with a few roundings.
_ROUNDINGS = 4


def agreed_on_factor(upstream: Tensor, foreseen: Tensor, group: Any) -> Tensor | None:
    """The 0-d factor with upstream = factor * foreseen, both [N] of one dtype; None if there is none.

    Waits for the device. All ranks of `group` (None: this one alone) get a factor, or none does: one
    all-reduce of a number.
    """
    if foreseen.numel() == 0:
        return upstream.new_ones(())
    largest = foreseen.abs().argmax(keepdim=True)
    divisor = foreseen.gather(0, largest)
    factor = torch.where(divisor != 0, upstream.gather(0, largest) / divisor, 0.0)
    expected = factor * foreseen
    tolerance = _ROUNDINGS * torch.finfo(upstream.dtype).eps
    holds = ((upstream - expected).abs() <= tolerance * expected.abs()).all() & factor.isfinite().all()
    if group is not None:
        verdict = holds.to(torch.int32)
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=group)
        holds = verdict != 0
    return factor[0] if bool(holds) else None
