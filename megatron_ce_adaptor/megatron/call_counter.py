"""Counts cross-entropy calls and prints them when the process exits.

A comparison of ``native`` with ``te`` means nothing if ``te`` silently ran something else. Every rank that
computed a loss prints one line, in this form, which the comparison reads::

    [rank 7] cross entropy: te 200 calls, native 0 calls, implementation reference

Where checkpoints are saved, a line is printed before each of them too, and counting starts again: the sum of
a rank's lines is right also where a later process that was killed printed none.

and, if output layer and loss were computed in chunks of tokens, at its end
``, te 200 calls in chunks of at most 4096 tokens``. A loss in chunks is one call.

Calls inside a region compiled by ``torch.compile`` are not counted: a counter there would recompile it.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

_counts = {"te": 0, "native": 0}
_in_chunks = {"calls": 0, "tokens": 0}
_lock = threading.Lock()
_inside_native = threading.local()
_rank = 0
_counting_process: int | None = None


def call_counts() -> dict[str, int]:
    """Calls so far in this process: ``{"te": ..., "native": ...}``."""
    with _lock:
        return dict(_counts)


def count_call(kind: str, chunk_tokens: int | None = None) -> None:
    """Adds one call of ``"te"`` or ``"native"``; the first one arranges for the line at exit.

    Args:
        chunk_tokens: of the call's chunks, None if its logits were there as a whole.
    """
    if torch.compiler.is_compiling():
        return
    global _rank, _counting_process
    with _lock:
        if _counting_process != os.getpid():  # the first call, or the first one after a fork
            _counting_process = os.getpid()
            _rank = _current_rank()
            _counts.update(te=0, native=0)
            _in_chunks.update(calls=0, tokens=0)
            atexit.unregister(_print_counts)
            atexit.register(_print_counts)
        _counts[kind] += 1
        if chunk_tokens is not None:
            _in_chunks.update(calls=_in_chunks["calls"] + 1, tokens=max(_in_chunks["tokens"], chunk_tokens))


def count_native(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch replacement of kind ``wrap``: the original, counted. Arguments and result pass unchanged."""

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        # "active": another package's wrapper has one of ours inside, which must not count again
        if torch.compiler.is_compiling() or getattr(_inside_native, "active", False):
            return original(*args, **kwargs)
        count_call("native")
        _inside_native.active = True
        try:
            return original(*args, **kwargs)
        finally:
            _inside_native.active = False

    return counted


def print_and_restart() -> None:
    """Print the line of this rank now, if it has computed a loss since the last one, and count from 0."""
    with _lock:
        called = any(_counts.values())
    if called:
        _print_counts()
        with _lock:
            _counts.update(te=0, native=0)


def summary_line() -> str:
    """The line that is printed at exit."""
    counts = call_counts()
    line = (
        f"[rank {_rank}] cross entropy: te {counts['te']} calls, native {counts['native']} calls, "
        f"implementation {_implementation()}"
    )
    if _in_chunks["calls"]:
        line += f", te {_in_chunks['calls']} calls in chunks of at most {_in_chunks['tokens']} tokens"
    return line


def _current_rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _implementation() -> str:
    implementations = sys.modules.get("megatron_ce_adaptor.implementations")
    last_used = getattr(implementations, "last_used", None)
    return (last_used() if last_used is not None else None) or "none"


def _print_counts() -> None:
    if _counting_process != os.getpid():  # forked from a rank: the rank prints
        return
    line = summary_line() + "\n"
    try:
        sys.stdout.flush()
        sys.stdout.write(line)  # one write, so that the lines of several ranks do not mix
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # stdout is closed, or its reader is gone
        pass
