"""Megatron's door: ``--cross-entropy-loss-fusion --cross-entropy-fusion-impl te`` runs our operation.

Importing this package loads neither torch nor Megatron nor PyYAML.
"""

from __future__ import annotations

from megatron_ce_adaptor.megatron.import_hook import install_import_hook

TYPE_CHECKING = False  # typing's, without the milliseconds that importing typing takes
if TYPE_CHECKING:
    from typing import Any

    from megatron_ce_adaptor.megatron.patching import apply_patches, patch_status, remove_patches

__all__ = ["apply_patches", "install_import_hook", "patch_status", "remove_patches"]


def __getattr__(name: str) -> Any:
    if name in ("apply_patches", "patch_status", "remove_patches"):
        from megatron_ce_adaptor.megatron import patching

        return getattr(patching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
