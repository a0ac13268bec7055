"""The stand-in's context."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("active", default=False)


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def is_loss_parallel_active() -> bool:
    return _active.get()
