"""Runs a function on several gloo processes of this machine and returns what each rank returned.

The processes of a `RankPool` stay up between calls, because starting them costs seconds. A call has a hard
time limit: when it passes, or a rank dies or raises, every process is killed and the call fails with what
each rank printed. So a deadlock is a failed test, never a stuck one, and the next call starts from fresh
processes.

Functions are sent by name: they must be importable on the ranks (`tp_cases.py`). Arguments and results are
pickled by value.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_LIMIT_S = 240.0
"""Importing torch and the operation in every process, on a slow and busy machine with cold disks."""

CALL_LIMIT_S = 120.0

PRELOADED = ["torch.distributed.tensor", "torch._dynamo", "triton", "megatron_ce_adaptor.cross_entropy"]
"""Imported once for all ranks, where it is there. None of these starts a thread or touches a GPU, which a
fork would not survive."""

GRACE_S = 5.0
"""How long the other ranks get to answer after one has raised or died: they may be waiting for it in a
collective."""


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time; the message holds what each of them printed."""


class RankPools:
    """`pools(world_size)`: a `RankPool` of that size, started on first use, restarted after a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        return self._pools.setdefault(world_size, RankPool(world_size))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class RankPool:
    """`world_size` gloo processes. `run` sends them a function; `close` ends them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: Path | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = CALL_LIMIT_S,
    ) -> list[Any]:
        """`function(rank, *args)` on every rank, with `environment` added there; the results in rank
        order."""
        return self.run_each(function, [args] * self.world_size, environment=environment, timeout_s=timeout_s)

    def run_each(
        self,
        function: Callable[..., Any],
        rank_args: Sequence[Sequence[Any]],
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = CALL_LIMIT_S,
    ) -> list[Any]:
        """As `run`, with arguments of its own for every rank."""
        if not self._processes:
            self._start()
        for connection, args in zip(self._connections, rank_args, strict=True):
            with contextlib.suppress(OSError):  # the rank is gone: _collect says so, with its output
                connection.send_bytes(pickle.dumps((function, tuple(args), dict(environment or {}))))
        return self._collect(timeout_s, f"{function.__name__} on {self.world_size} ranks")

    def close(self) -> None:
        """Kill the processes and forget them; a later `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections, self._folder = [], [], None

    def _start(self) -> None:
        # Ranks are forks of one process that has torch: each would take seconds of a core to import it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = Path(tempfile.mkdtemp(prefix="tp_harness_"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, str(self._folder)), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._collect(START_LIMIT_S, f"starting {self.world_size} ranks")

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    ok, value = False, "the process ended"
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not failures and not pending:
            return [results[rank] for rank in range(self.world_size)]
        for rank in pending.values():
            failures[rank] = f"no answer (limit {timeout_s:g} s, {GRACE_S:g} s after another rank's failure)"
        report = self._report(what, failures)
        self.close()
        raise RankFailure(report)

    def _report(self, what: str, failures: Mapping[int, str]) -> str:
        lines = [f"{what} failed on ranks {sorted(failures)}"]
        for rank in range(self.world_size):
            lines.append(f"--- rank {rank}: {failures.get(rank, 'returned')}")
            assert self._folder is not None
            printed = (self._folder / f"rank{rank}.txt").read_text(errors="replace")[-4000:]
            if printed.strip():
                lines.append(f"    it printed:\n{printed}")
        return "\n".join(lines)


def _serve(connection: Connection, rank: int, world_size: int, folder: str) -> None:
    """The life of one rank: join the process group, then answer calls until the other end closes."""
    output = os.open(os.path.join(folder, f"rank{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        _join(rank, world_size, folder)
        importlib.import_module("tp_cases")  # here and not within the first call's limit
        connection.send_bytes(pickle.dumps((True, None)))
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    while True:
        try:
            function, args, environment = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        except Exception:
            connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue
        saved = dict(os.environ)
        os.environ.update(environment)
        try:
            answer = pickle.dumps((True, function(rank, *args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        finally:
            os.environ.clear()
            os.environ.update(saved)
        connection.send_bytes(answer)


def _join(rank: int, world_size: int, folder: str) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # needs no resolvable host name
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo" if torch.cuda.is_available() else "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=START_LIMIT_S),
    )
