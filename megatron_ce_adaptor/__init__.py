"""megatron_ce_adaptor: cross entropy for vocabularies split over tensor-parallel ranks.

Importing the package installs the Megatron import hook (MCE_AUTO_PATCH=0 opts out), so that Megatron-Core's
`--cross-entropy-loss-fusion --cross-entropy-fusion-impl te` runs this package's kernel. Everything else is
loaded on
first use: `import megatron_ce_adaptor` alone imports neither torch nor Megatron.
"""

from __future__ import annotations

from megatron_ce_adaptor.settings import switch as _switch

TYPE_CHECKING = False  # as typing's, without the milliseconds that importing typing takes
if TYPE_CHECKING:
    from typing import Any

    from megatron_ce_adaptor.chunked.wrapper import ChunkedLossWrapper as ChunkedLossWrapper
    from megatron_ce_adaptor.cross_entropy import CrossEntropyStatistics as CrossEntropyStatistics
    from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy as parallel_cross_entropy
    from megatron_ce_adaptor.dtensor.context import is_loss_parallel_active as is_loss_parallel_active
    from megatron_ce_adaptor.dtensor.context import loss_parallel as loss_parallel
    from megatron_ce_adaptor.dtensor.gather import (
        gather_tensor_parallel_logits as gather_tensor_parallel_logits,
    )
    from megatron_ce_adaptor.dtensor.loss import loss_parallel_cross_entropy as loss_parallel_cross_entropy
    from megatron_ce_adaptor.losses import CrossEntropyLoss as CrossEntropyLoss
    from megatron_ce_adaptor.megatron import apply_patches as apply_patches
    from megatron_ce_adaptor.megatron import patch_status as patch_status
    from megatron_ce_adaptor.megatron import remove_patches as remove_patches

__version__ = "0.1.0"

_HOMES = {
    "parallel_cross_entropy": "megatron_ce_adaptor.cross_entropy",
    "CrossEntropyStatistics": "megatron_ce_adaptor.cross_entropy",
    "loss_parallel": "megatron_ce_adaptor.dtensor.context",
    "is_loss_parallel_active": "megatron_ce_adaptor.dtensor.context",
    "loss_parallel_cross_entropy": "megatron_ce_adaptor.dtensor.loss",
    "gather_tensor_parallel_logits": "megatron_ce_adaptor.dtensor.gather",
    "CrossEntropyLoss": "megatron_ce_adaptor.losses",
    "ChunkedLossWrapper": "megatron_ce_adaptor.chunked.wrapper",
    "apply_patches": "megatron_ce_adaptor.megatron",
    "remove_patches": "megatron_ce_adaptor.megatron",
    "patch_status": "megatron_ce_adaptor.megatron",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if _switch("MCE_AUTO_PATCH") is not False:
    from megatron_ce_adaptor.megatron import install_import_hook as _install_import_hook

    _install_import_hook()
