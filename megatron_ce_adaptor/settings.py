"""The package's settings in the environment, read in one way."""

from __future__ import annotations

import os
from collections.abc import Callable

# Settings are read in every call, and `os.environ.get` of an unset variable takes a microsecond: the
# dictionary behind it takes a twentieth of that. Python documents neither name; without them, os.environ.
_stored: dict[object, object] | None = getattr(os.environ, "_data", None)
_encoded: Callable[[str], object] | None = getattr(os.environ, "encodekey", None)
_keys: dict[str, object] = {}


def setting(name: str) -> str:
    """The variable's text, empty if it is unset."""
    if _stored is None or _encoded is None:
        return os.environ.get(name, "")
    key = _keys.get(name)
    if key is None:
        key = _keys[name] = _encoded(name)
    return os.environ[name] if key in _stored else ""


def watch(*names: str) -> Callable[[], tuple[object, ...]]:
    """A function that gives what these variables hold in some form: equal results mean equal settings."""
    if _stored is None or _encoded is None:
        return lambda: tuple(os.environ.get(name) for name in names)
    keys = [_encoded(name) for name in names]
    get = _stored.get
    return lambda: tuple(map(get, keys))


def switch(name: str) -> bool | None:
    """The setting `name`: True for 1, False for 0, None where it is unset or empty.

    Raises:
        ValueError: any other value.
    """
    value = setting(name)
    if not value:
        return None
    if value not in ("0", "1"):
        raise ValueError(f"{name} is {value!r}, expected 0 (off) or 1 (on).")
    return value == "1"
