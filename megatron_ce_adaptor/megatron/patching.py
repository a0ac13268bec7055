"""Apply, remove and report the patches declared in ``patches/*.yaml``.

Rules: idempotent; reversible to the very original objects; every module that bound an original by name is
rebound; another package's later patch is never overwritten, only reported; a required name that does not
exist is loud. The original of a patched function is its ``__wrapped__``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from megatron_ce_adaptor.megatron import import_hook
from megatron_ce_adaptor.megatron.patch_specs import PatchSpec, load_patch_specs, version_in
from megatron_ce_adaptor.megatron.rebinding import bound_to, rebind


class PatchError(RuntimeError):
    """``apply_patches(strict=True)`` found a target missing or taken over."""


class PatchWarning(RuntimeWarning):
    """A target is missing or taken over. No UserWarning: Megatron's launchers silence those on most ranks."""


class TargetState(str, Enum):
    APPLIED = "applied"
    WAITING = "waiting for import"
    NOT_NEEDED = "not needed in this version"
    MISSING = "missing"
    TAKEN_OVER = "taken over by another package"
    NOT_APPLIED = "not applied"


@dataclass(frozen=True)
class TargetStatus:
    """What became of one target. ``rebound``: the other names that were bound to the same object."""

    target: str
    state: TargetState
    detail: str = ""
    rebound: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchStatus:
    """The state of every declared target, and the version of megatron-core they were judged by."""

    megatron_version: str | None
    targets: tuple[TargetStatus, ...]

    @property
    def ok(self) -> bool:
        """No target is missing or taken over."""
        return not self.problems

    @property
    def problems(self) -> tuple[TargetStatus, ...]:
        return tuple(t for t in self.targets if t.state in (TargetState.MISSING, TargetState.TAKEN_OVER))

    def __getitem__(self, target: str) -> TargetStatus:
        """The status of one target by its dotted name; KeyError if it is not declared."""
        for status in self.targets:
            if status.target == target:
                return status
        raise KeyError(target)

    def __str__(self) -> str:
        lines = [f"megatron-core {self.megatron_version or '(not imported, or version unknown)'}"]
        for status in self.targets:
            detail = f" ({status.detail})" if status.detail else ""
            lines.append(f"  {status.target}: {status.state.value}{detail}")
        return "\n".join(lines)


_ABSENT = object()


@dataclass(eq=False)
class _Patch:
    """One patched function. It may stand in several places; ``active`` is cleared by remove_patches()."""

    replacement: str
    original: Any
    patched: Any = None
    active: bool = True


@dataclass
class _Record:
    """What is known about one target. ``holder`` is the module or class whose attribute was set."""

    state: TargetState
    detail: str = ""
    patch: _Patch | None = None
    holder: Any = None
    rebound: list[str] = field(default_factory=list)


_lock = threading.RLock()
_specs: tuple[PatchSpec, ...] | None = None
_resolved: dict[str, Callable[..., Any]] = {}  # replacements by dotted name
_this_thread = threading.local()
_records: dict[str, _Record] = {}
_bindings: list[tuple[str, Any, str, _Patch]] = []  # (target, holder, attribute, patch), oldest first
_patches: list[_Patch] = []
_left_in_place: dict[str, str] = {}
_warned: set[tuple[str, TargetState]] = set()


# ---------------------------------------------------------------------------------------- public


def apply_patches(strict: bool = False) -> PatchStatus:
    """Patches every declared target whose module is imported; the others are patched when they are.

    Calling it again is harmless. It also puts a *wrapping* patch back on top if another package has
    replaced it in the meantime; a *replacing* patch that another package replaced is left to that package.

    Args:
        strict: raise :class:`PatchError` if a target is missing or taken over, instead of warning.

    Raises:
        PatchFileError: a patch declaration cannot be used.
    """
    specs = _load_specs()
    import_hook.add_finder()
    for spec in specs:
        if (module := _executed_module(spec.module)) is not None:
            _apply(spec, module, fresh=False, warn=not strict)
    status = patch_status()
    if strict and not status.ok:
        problems = "; ".join(f"{t.target} is {t.state.value} ({t.detail})" for t in status.problems)
        raise PatchError(f"--cross-entropy-fusion-impl te would not run as patched: {problems}")
    return status


def remove_patches() -> PatchStatus:
    """Puts every original object back, wherever it was bound, and takes the import hook away.

    Where another package has since put its own function in our place, that stays; our function, should
    theirs still call it, then only calls the original. The returned status says so.
    """
    import_hook.remove_finder()
    with _lock:
        _left_in_place.clear()
        for target, holder, attribute, patch in reversed(_bindings):
            current = vars(holder).get(attribute, _ABSENT)
            if current is patch.patched:
                setattr(holder, attribute, patch.original)
            elif current is not patch.original and _patch_of(current) is None:
                _left_in_place[target] = f"left in place: {_describe(current)}"
        for patch in _patches:
            patch.active = False
            rebind(bound_to(patch.patched, ""), patch.original)
        _bindings.clear()
        _patches.clear()
        _records.clear()
        _warned.clear()
    return patch_status()


def patch_status() -> PatchStatus:
    """The present state of every declared target; looks at the live objects and changes nothing."""
    specs = _load_specs()
    with _lock:
        return PatchStatus(megatron_version(), tuple(_status_of(spec) for spec in specs))


def megatron_version() -> str | None:
    """Version of the imported megatron-core, ``None`` if it is not imported or does not say."""
    core = sys.modules.get("megatron.core")
    if core is None:
        return None
    package_info = sys.modules.get("megatron.core.package_info")
    version = vars(package_info).get("__version__") if package_info is not None else None
    version = (
        version or vars(core).get("__version__") or _version_on_disk(tuple(getattr(core, "__path__", ())))
    )
    return version if isinstance(version, str) else None


@functools.cache
def _version_on_disk(folders: tuple[str, ...]) -> Any:
    """The version, before megatron.core has imported its package_info (which is after modules we patch).

    The file is run, not imported: an import from within another thread's import can deadlock.
    """
    for folder in folders:
        if os.path.isfile(path := os.path.join(folder, "package_info.py")):
            return runpy.run_path(path).get("__version__")
    return None


# ------------------------------------------------------------------------ called by the import hook


def target_modules() -> frozenset[str]:
    """Modules that hold a target."""
    return frozenset(spec.module for spec in _load_specs())


def module_executed(module: ModuleType) -> None:
    """Applies what concerns a module that has just been executed, for the first time or by a reload."""
    for spec in _load_specs():
        if spec.module == module.__name__:
            _apply(spec, module, fresh=True)


def apply_waiting() -> None:
    """Applies what concerns modules that got executed without the hook noticing.

    It is called while some ``megatron.*`` module is being looked up, so it may import our own.
    """
    for spec in _load_specs():
        if spec.target not in _records and (module := _executed_module(spec.module)) is not None:
            _apply(spec, module, fresh=False)


def _apply_waiting_without_imports() -> None:
    """The same while any module is looked up: it could be the one we would import, and be loaded twice."""
    if getattr(_this_thread, "applying", False) or _specs is None:
        return
    for spec in _specs:
        if spec.target in _records or spec.replacement not in _resolved:
            continue
        if (module := _executed_module(spec.module)) is not None:
            _apply(spec, module, fresh=False)


import_hook.recheck = _apply_waiting_without_imports


# --------------------------------------------------------------------------------------- applying


def _load_specs() -> tuple[PatchSpec, ...]:
    global _specs
    if _specs is None:
        _specs = load_patch_specs()
    return _specs


def _executed_module(name: str) -> ModuleType | None:
    """The module if it is imported and its execution has ended: before that, names may yet be set."""
    module = sys.modules.get(name)
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return None
    return module


def _apply(spec: PatchSpec, module: ModuleType, fresh: bool, warn: bool = True) -> None:
    _this_thread.applying = True
    try:
        # Imports happen before the lock is taken: another thread may hold an import lock and want ours.
        version = megatron_version()
        replacement = _resolve(spec)
        with _lock:
            if not import_hook.wanted:  # removed by another thread in the meantime
                return
            record = _applied_record(spec, module, version, replacement, fresh)
            _records[spec.target] = record
    finally:
        _this_thread.applying = False
    if warn and record.state in (TargetState.MISSING, TargetState.TAKEN_OVER):
        _warn(spec, record)


def _resolve(spec: PatchSpec) -> Callable[..., Any]:
    if spec.replacement not in _resolved:  # all of them: _apply_waiting_without_imports() may need any
        for name in {spec.replacement, *(other.replacement for other in _load_specs())}:
            module, _, attribute = name.rpartition(".")
            _resolved[name] = getattr(importlib.import_module(module), attribute)
    return _resolved[spec.replacement]


def _applied_record(
    spec: PatchSpec, module: ModuleType, version: str | None, replacement: Callable[..., Any], fresh: bool
) -> _Record:
    """Does the patch under the lock and says what came of it."""
    in_range, note = _in_range(spec.version, version)
    if not in_range:
        return _Record(TargetState.NOT_NEEDED, note)
    holder: Any = module
    for name in spec.attribute[:-1]:
        holder = vars(holder).get(name, _ABSENT) if holder is not _ABSENT else holder
    attribute = spec.attribute[-1]
    current = vars(holder).get(attribute, _ABSENT) if holder is not _ABSENT else _ABSENT
    if current is _ABSENT or not (callable(current) or (current is None and spec.kind == "replace")):
        return _absent_record(spec, version, current)

    if fresh:  # a reload: what was bound before is gone, not taken over
        _bindings[:] = [b for b in _bindings if not (b[1] is holder and b[2] == attribute)]
    before = _records.get(spec.target)
    if (ours := _patch_of(current)) is not None:
        _bind(spec.target, holder, attribute, ours)
        rebound = before.rebound if before is not None else []
        return _Record(TargetState.APPLIED, note, ours, holder, rebound)
    if not fresh and before is not None and before.patch is not None and before.holder is holder:
        if _reaches(current, before.patch):
            return before
        if spec.kind == "replace":
            return _Record(TargetState.TAKEN_OVER, "", before.patch, holder, before.rebound)
    patch = _make_patch(spec, current, replacement)
    if patch is None:
        return _Record(TargetState.NOT_NEEDED, "nothing to do here in this version")
    setattr(holder, attribute, patch.patched)
    _bind(spec.target, holder, attribute, patch)
    rebound = rebind(bound_to(current, attribute), patch.patched) if holder is module else []
    return _Record(TargetState.APPLIED, note, patch, holder, rebound)


def _bind(target: str, holder: Any, attribute: str, patch: _Patch) -> None:
    if not any(h is holder and a == attribute and p is patch for _, h, a, p in _bindings):
        _bindings.append((target, holder, attribute, patch))


def _make_patch(spec: PatchSpec, original: Any, replacement: Callable[..., Any]) -> _Patch | None:
    """The patched function for one original: the same object wherever the same original stood."""
    for patch in _patches:
        if patch.replacement == spec.replacement and patch.original is original:
            return patch
    function = replacement if spec.kind == "replace" else replacement(original)
    if function is None:
        return None
    patch = _Patch(spec.replacement, original)

    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if patch.active:
            return function(*args, **kwargs)
        if original is None:
            raise RuntimeError(
                f"{spec.target} was called after remove_patches(), and Megatron has none of its own without "
                "TransformerEngine: use --cross-entropy-fusion-impl native, or call apply_patches()"
            )
        return original(*args, **kwargs)

    patch.patched = patched
    if original is None:
        patch.patched.__signature__ = inspect.signature(function)
        del patch.patched.__wrapped__
    else:
        patch.patched.__wrapped__ = original
    _patches.append(patch)
    return patch


def _in_range(specifier: str, version: str | None) -> tuple[bool, str]:
    """Whether a version range applies, and a note for the status."""
    unknown = True, "version of megatron-core unknown: decided by whether the name exists"
    if version is None:
        return unknown
    try:
        if version_in(version, specifier):
            return True, ""
    except (ImportError, ValueError):  # no packaging; not a PEP 440 version
        return unknown
    return False, f"megatron-core {version} is not in {specifier}"


def _absent_record(spec: PatchSpec, version: str | None, current: object) -> _Record:
    what = "does not exist" if current is _ABSENT else f"is {current!r}, not a function"
    if spec.required is not None and _in_range(spec.required, version)[0]:
        return _Record(TargetState.MISSING, f"{what} in megatron-core {version or 'of unknown version'}")
    return _Record(TargetState.NOT_NEEDED, what)


# -------------------------------------------------------------------------------------- reporting


def _status_of(spec: PatchSpec) -> TargetStatus:
    if not import_hook.wanted:
        return TargetStatus(spec.target, TargetState.NOT_APPLIED, _left_in_place.get(spec.target, ""))
    record = _records.get(spec.target)
    if record is None:
        return TargetStatus(spec.target, TargetState.WAITING)
    rebound = tuple(record.rebound)
    if record.patch is None:
        return TargetStatus(spec.target, record.state, record.detail, rebound)
    current = vars(record.holder).get(spec.attribute[-1], _ABSENT)
    if _patch_of(current) is not None:
        return TargetStatus(spec.target, TargetState.APPLIED, record.detail, rebound)
    if _reaches(current, record.patch):
        return TargetStatus(spec.target, TargetState.APPLIED, f"called through {_describe(current)}", rebound)
    detail = f"now {_describe(current)}"
    if spec.kind == "wrap":
        detail += "; call apply_patches() to wrap it again"
    return TargetStatus(spec.target, TargetState.TAKEN_OVER, detail, rebound)


def _warn(spec: PatchSpec, record: _Record) -> None:
    if (spec.target, record.state) in _warned:
        return
    _warned.add((spec.target, record.state))
    detail = record.detail or _status_of(spec).detail
    warnings.warn(
        f"megatron_ce_adaptor: {spec.target} is {record.state.value} ({detail}). {spec.why}",
        PatchWarning,
        stacklevel=3,
    )


def _patch_of(function: object) -> _Patch | None:
    """The active patch whose function this is."""
    return next((patch for patch in _patches if patch.patched is function), None)


def _reaches(function: Any, patch: _Patch) -> bool:
    """Whether following ``__wrapped__`` from a foreign function leads to our patch."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        if function is patch.patched:
            return True
        seen.add(id(function))
        function = getattr(function, "__wrapped__", None)
    return False


def _describe(value: object) -> str:
    if value is _ABSENT:
        return "absent"
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', None) or '?'}.{name}"
    return repr(value)
