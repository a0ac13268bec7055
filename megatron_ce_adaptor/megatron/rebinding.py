"""Names that other modules bound by value: ``from megatron... import te_parallel_cross_entropy``.

Setting an attribute on the module that defines a function does not reach the modules that imported it by
name. They are found by identity. Only ``__dict__`` is read, never ``getattr``: a module with a
``__getattr__`` of its own (transformers' lazy modules, ``importlib.util.LazyLoader``) would import things.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

# Namespaces of registered operators, not modules; every look-up in them has side effects.
_NOT_MODULES = ("torch.ops", "torch.classes")
_OWN_PACKAGE = __name__.partition(".")[0]


def module_namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and live ``__dict__`` of every imported module, except our own and operator namespaces."""
    for name, module in sys.modules.copy().items():
        if name.startswith(_NOT_MODULES) or name.partition(".")[0] == _OWN_PACKAGE:
            continue
        try:
            # object's: a lazy module's __getattribute__ would load it
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if type(namespace) is dict:
            yield name, namespace


def rebind(matches: Callable[[str, Any], bool], new: object) -> list[str]:
    """Sets every module-level name that ``matches(name, value)`` to ``new``; returns the dotted names."""
    changed = []
    for module, namespace in module_namespaces():
        for name, value in namespace.copy().items():
            if matches(name, value):
                namespace[name] = new
                changed.append(f"{module}.{name}")
    return changed


def bound_to(target: object, attribute: str) -> Callable[[str, Any], bool]:
    """A test for names bound to ``target``.

    A function is found under any name. ``None`` is what Megatron binds without TransformerEngine, and is
    everywhere: it is only recognised under the target's own name.
    """
    if target is None:
        return lambda name, value: value is None and name == attribute
    return lambda name, value: value is target
