"""The JSON that the benchmark writes: its parts, and reading and writing them.

A part is one file: {"part": one of PARTS, "environment", "settings", "peers", "cases", ...}. A case
holds "results" by peer name: "ms" (median of forward + backward), "ms_p10", "ms_p90", "rounds",
"times_ours", "extra_memory" (in units of the logits), "loss_error", "gradient_error" and both for
"confident_" rows, on some "host_us", "cold_host_us", "wall_us", "forward_ms", "backward_ms",
"collectives"; or "error" or "skipped" with the reason.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

MEASURED_SOURCES = (
    "cross_entropy.py",
    "dispatch.py",
    "plan.py",
    "labels.py",
    "settings.py",
    "vocab_shard.py",
    "implementations/__init__.py",
    "implementations/class_weights.py",
    "implementations/dtypes.py",
    "implementations/rows.py",
    "implementations/reference.py",
    "implementations/cuda.py",
    "implementations/cuda_kernels.py",
    "implementations/prepared_call.py",
    "implementations/memo.py",
    "implementations/allocation.py",
)
PARTS = ("cuda", "tp", "cpu", "mass_accuracy", "mass_speed")


def environment(device_type: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "sources": sources_digest(),
    }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    if device_type == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def sources_digest() -> str:
    """Names the measured code, also where no repository is around it: 32 digits of the SHA-256 of the files
    that a call runs through."""
    package = Path(__file__).resolve().parents[1] / "megatron_ce_adaptor"
    digest = hashlib.sha256()
    for name in MEASURED_SOURCES:
        digest.update((package / name).read_bytes())
    return digest.hexdigest()[:32]


def write(part: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


class BadResults(Exception):
    """A file that is not one of the benchmark's; the message says why."""


def read(path: Path) -> dict[str, Any]:
    try:
        part = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise BadResults(f"{path}: {error}") from error
    if not isinstance(part, dict) or part.get("part") not in PARTS:
        raise BadResults(f"{path} is not a result of this benchmark: 'part' is none of {', '.join(PARTS)}")
    return part


def read_or_exit(paths: list[Path]) -> list[dict[str, Any]]:
    try:
        return [read(path) for path in paths]
    except BadResults as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
