"""The processes of a launch (Linux): find the ranks below torchrun, notice a lost one, end them all.

torchrun starts every rank in a session of its own, so a signal to its process group does not reach them, and
a torchrun that is killed leaves them running. The launcher therefore becomes their subreaper: whatever
torchrun leaves behind becomes the launcher's child and can be found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_LIBC = ctypes.CDLL(None, use_errno=True)


def set_subreaper(enabled: bool) -> None:
    """Make orphaned descendants of this process its children, instead of init's."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent dies; call it between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    try:
        # The name in parentheses may hold spaces and parentheses itself.
        rest = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return rest[0], int(rest[1])
    except (OSError, IndexError, ValueError):
        return None


def is_running(pid: int) -> bool:
    """Whether `pid` exists and is not a zombie."""
    known = _state_and_parent(pid)
    return known is not None and known[0] not in "ZX"


def descendants(root: int) -> list[int]:
    """The processes below `root`, zombies included, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (known := _state_and_parent(int(entry.name))):
            children.setdefault(known[1], []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def with_variable(name: str, value: str) -> list[int]:
    """The running processes that were started with the environment variable `name` set to `value`."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return [pid for pid in found if is_running(pid)]


def rank_of(pid: int) -> int | None:
    """The rank of `pid`, from the RANK in its environment or the name of a forked rank; None for others."""
    try:
        name = (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
        if forked := re.fullmatch(r"mce-rank-(\d+)", name):
            return int(forked[1])
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    if not any(v.startswith(b"LOCAL_RANK=") for v in variables):
        return None
    return next((int(v[5:]) for v in variables if v.startswith(b"RANK=") and v[5:].isdigit()), None)


@dataclass
class RankWatch:
    """Notices that a rank below `launcher` (torchrun) ended while others go on.

    torchrun ends the others when a rank fails, but it waits without limit when a rank leaves with status 0 or
    when it cannot act itself.
    """

    launcher: int
    expected: range  # the ranks that torchrun starts on this machine
    ranks: dict[int, int] = field(default_factory=dict)  # pid -> rank
    lost_rank: int | None = None
    lost_at: float = 0.0

    def look(self) -> float:
        """Look once; returns for how many seconds a rank has been missing, 0.0 if none is."""
        for pid in descendants(self.launcher):
            known = _state_and_parent(pid)
            if pid not in self.ranks and known is not None and known[1] == self.launcher:
                rank = rank_of(pid)
                if rank is not None:
                    self.ranks[pid] = rank
        running = {rank for pid, rank in self.ranks.items() if is_running(pid)}
        missing = [rank for rank in self.expected if rank not in running]
        # torchrun starts its ranks together: once one is there, all were, even those that left before a look.
        if not missing or not self.ranks:
            self.lost_rank = None
            return 0.0
        if self.lost_rank is None:
            self.lost_rank = missing[0]
            self.lost_at = time.monotonic()
        return time.monotonic() - self.lost_at


def end_all(pids: list[int], grace: float) -> None:
    """End the processes `pids`: SIGTERM, then SIGKILL to those that still run after `grace` seconds."""
    if grace > 0:
        _send(pids, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            _reap(pids)
            time.sleep(0.05)
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        _send(pids, signal.SIGKILL)
        time.sleep(0.05)
    _reap(pids)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        if is_running(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _reap(pids: list[int]) -> None:
    """Take the exit status of those of `pids` that became children of this process."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
