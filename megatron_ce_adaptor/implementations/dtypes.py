"""In what dtype a loss is computed."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of the loss and of all that is computed on the way: fp64 for fp64 logits, else fp32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
