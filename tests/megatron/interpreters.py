"""Programs in fresh interpreters, for what depends on the order of imports or on the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def start_python(
    code: str, folder: Path, *paths: Path, options: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in ``folder`` with ``paths`` and this repository in front of the module search path."""
    ours = ("MCE_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TE_PARALLEL_CE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, REPOSITORY]))
    environment["OMP_NUM_THREADS"] = "1"
    environment.update(variables)
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
