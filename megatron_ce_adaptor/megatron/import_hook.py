"""A meta-path finder that patches a target right after its module has been executed.

It makes the order of imports irrelevant: ``import megatron_ce_adaptor`` may stand before or after
Megatron's imports. Importing this module costs nothing: it loads neither torch nor PyYAML, not even
``typing``; the declarations are read when the first ``megatron.*`` module is looked up.

The finder stays installed while patches are wanted, because a reload executes a module anew.
"""

from __future__ import annotations

import sys
from _thread import get_ident

TYPE_CHECKING = False  # typing's, without the milliseconds that importing typing takes
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_ROOT = "megatron"


class _PatchAfterExecution:
    """Stands in for a target's loader until the module is executed, then leaves the original behind."""

    def __init__(self, loader: Any, executed: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._executed = executed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        return create(spec) if create is not None else None

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = self._loader
        if module.__dict__.get("__loader__") is self:
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._executed(module)


class PatchingFinder:
    """Finds nothing itself: asks the other finders and hooks into the loading of patched modules."""

    def __init__(self) -> None:
        self._busy: set[int] = set()  # threads inside find_spec

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        thread = get_ident()
        if thread in self._busy:  # our own imports, or a finder that asks all finders, as we do
            return None
        self._busy.add(thread)
        try:
            if fullname != _ROOT and not fullname.startswith(_ROOT + "."):
                # A target that some other finder loaded past us, or that was half-imported when we came
                if recheck is not None:
                    recheck()
                return None
            from megatron_ce_adaptor.megatron import patching

            patching.apply_waiting()
            if fullname not in patching.target_modules():
                return None
            spec = self._find_elsewhere(fullname, path, target)
        finally:
            self._busy.discard(thread)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _PatchAfterExecution(spec.loader, patching.module_executed)  # type: ignore[assignment]
        return spec

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


_finder = PatchingFinder()
wanted = False  # whether targets are to be patched: from install_import_hook() to remove_patches()
# Set by patching once it is loaded; a look-up of any module then also looks after the waiting targets.
recheck: Callable[[], None] | None = None


def install_import_hook() -> None:
    """Patches Megatron's targets as they are imported, and at once where they already are. Idempotent."""
    add_finder()
    if any(name.startswith(_ROOT + ".") for name in sys.modules.copy()):
        from megatron_ce_adaptor.megatron import patching

        patching.apply_patches()


def add_finder() -> None:
    global wanted
    wanted = True
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def remove_finder() -> None:
    global wanted
    wanted = False
    while _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
