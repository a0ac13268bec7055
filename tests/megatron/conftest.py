"""A fake Megatron in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # --import-mode=importlib leaves it out

from fake_megatron import build_fake_megatron

from megatron_ce_adaptor.megatron import import_hook, remove_patches


@pytest.fixture
def fake_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Builds a fake Megatron (see build_fake_megatron) and makes it the one that ``import megatron`` finds.

    Nothing of it, nor any patch, is left behind; a real Megatron that was imported before comes back.
    """
    wanted = import_hook.wanted
    remove_patches()
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "megatron"}

    def build(*args: Any, **kwargs: Any) -> Path:
        root = build_fake_megatron(tmp_path / "fake", *args, **kwargs)
        monkeypatch.syspath_prepend(root)
        importlib.invalidate_caches()
        return root

    yield build
    remove_patches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.modules.update(real)
    if wanted:
        import_hook.install_import_hook()
