"""Runs a function of `rank_programs` on several MindSpore processes of this machine (CPU, mccl).

A job has a hard time limit: when it passes, or a rank fails, every process is killed and the job fails with
what each printed. So a deadlock is a failed test, never a stuck one.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

JOB_LIMIT_S = 420.0
"""Most of it is the start: importing MindSpore in every process of a machine that is busy with other
things."""

GRACE_S = 10.0
"""How long the other ranks get after one has failed: they may be waiting for it in a collective."""


def run_job(world_size: int, program: str, folder: Path, *arguments: str) -> list[Any]:
    """What `rank_programs.PROGRAM(folder, *arguments)` returned on each rank, in rank order."""
    folder.mkdir(parents=True, exist_ok=True)
    roles = [("scheduler", {"MS_ROLE": "MS_SCHED"})]
    for rank in range(world_size):
        roles.append((f"rank{rank}", {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)}))
    common = environment(
        MS_WORKER_NUM=str(world_size), MS_SCHED_HOST="127.0.0.1", MS_SCHED_PORT=str(free_port())
    )
    common["MS_TOPO_TIMEOUT"] = str(int(JOB_LIMIT_S))
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, role in roles:
            with open(folder / f"{name}.txt", "wb") as output:
                processes[name] = subprocess.Popen(
                    [sys.executable, str(HERE / "rank_main.py"), program, str(folder), *arguments],
                    env={**common, **role},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        workers = {name: p for name, p in processes.items() if name != "scheduler"}
        failed = _wait(workers)
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.wait()
    if failed:
        raise AssertionError(_report(program, folder, failed, list(processes)))
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _wait(workers: dict[str, subprocess.Popen[bytes]]) -> list[str]:
    """The names of those that failed or did not end in time."""
    deadline = time.monotonic() + JOB_LIMIT_S
    grace: float | None = None
    while True:
        codes = {name: process.poll() for name, process in workers.items()}
        if all(code == 0 for code in codes.values()):
            return []
        if grace is None and any(code not in (None, 0) for code in codes.values()):
            grace = time.monotonic() + GRACE_S
        ended = all(code is not None for code in codes.values())
        if ended or time.monotonic() > min(deadline, grace or deadline):
            return [f"{name} ({code})" for name, code in codes.items() if code != 0]
        time.sleep(0.1)


def _report(program: str, folder: Path, failed: list[str], names: list[str]) -> str:
    lines = [f"{program} failed on {', '.join(failed)} (None: no answer in time)"]
    for name in names:
        printed = (folder / f"{name}.txt").read_text(errors="replace")
        lines.append(f"--- {name} printed:\n{printed[-4000:]}")
    return "\n".join(lines)


def environment(**more: str) -> dict[str, str]:
    """This process's environment for a MindSpore process: the repository importable, one thread, few
    messages."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "GLOG_v": "3",
        "MCE_AUTO_PATCH": "0",
        **more,
    }


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_other(python: Path, script: Path, folder: Path) -> None:
    """A script with another environment's Python; its output is in the failure."""
    done = subprocess.run(
        [str(python), str(script), str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=JOB_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{script.name} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
