"""The control beside a comparison: native once more, with the logits of the first micro-batch off by one ulp.

Training amplifies rounding: two runs that differ in the last bit once end in curves some tenths of a percent
apart.  How far is measured by disturbing native in this way (MCE_NOISE_FLOOR=1, set by ``megatron-ce pretrain
--noise-floor``).  te's curve means something only beside that of this run.

Why the logits, all of them and only once: that is where the two implementations part.  te rounds the gradient
of every logit once, native several times, so from the first step on every gradient differs by about one unit
in its last place.  Every logit is moved to a neighbouring number, up in even columns and down in odd ones; a
shift that all have in common would vanish in the softmax.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


def moved_by_one_ulp(logits: torch.Tensor) -> torch.Tensor:
    """`logits` [..., V] with each value replaced by the next one, up in even columns, down in odd ones.

    The gradient passes unchanged.  Infinite values and NaN stay what they are.
    """
    with torch.no_grad():
        limit = torch.full((logits.shape[-1],), float("inf"), dtype=logits.dtype, device=logits.device)
        limit[1::2] = float("-inf")
        distance = torch.nextafter(logits, limit) - logits
        distance = torch.where(distance.isfinite(), distance, torch.zeros_like(distance))
    return logits + distance


def apply() -> None:
    """Disturb the first loss that this process computes, unless it continues a checkpoint."""
    module = importlib.import_module("megatron.core.models.common.language_module.language_module")
    original = module.LanguageModule.compute_language_model_loss
    if getattr(original, "mce_noise_floor", False):
        return
    is_first = True

    @functools.wraps(original)
    def compute_language_model_loss(
        self: Any, labels: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        nonlocal is_first
        if is_first:
            is_first = False
            from megatron.training import get_args

            if getattr(get_args(), "iteration", 0) == 0:  # a continued run was disturbed at its beginning
                print("noise floor: the logits of the first micro-batch are off by one ulp", flush=True)
                logits = moved_by_one_ulp(logits)
        return original(self, labels, logits, *args, **kwargs)

    compute_language_model_loss.mce_noise_floor = True  # type: ignore[attr-defined]
    module.LanguageModule.compute_language_model_loss = compute_language_model_loss
