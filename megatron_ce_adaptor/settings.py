"""The package's on/off settings in the environment, read in one way."""

from __future__ import annotations

import os


def switch(name: str) -> bool | None:
    """The setting `name`: True for 1, False for 0, None where it is unset or empty.

    Raises:
        ValueError: any other value.
    """
    value = os.environ.get(name)
    if not value:
        return None
    if value not in ("0", "1"):
        raise ValueError(f"{name} is {value!r}, expected 0 (off) or 1 (on).")
    return value == "1"
