"""Puts the benchmark's modules on the path, and makes up results that meet every goal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


def _result(times_ours: float, ours: bool, case: Any, gb_per_s: float) -> dict[str, Any]:
    import goals

    ms = 3 * case.bytes / (gb_per_s * 1e6) * times_ours
    entry = {
        "ms": ms,
        "times_ours": {goals.OURS: times_ours, goals.OURS_IN_PLACE: times_ours},
        "extra_memory": 3.0,
        "host_us": 50.0 * times_ours,
        "cold_host_us": 50.0 * times_ours,
        "collectives": 3,
        "confident_loss_error": 1e-3,
        "confident_gradient_error": 0.2,
    }
    if ours:
        entry |= {"collectives": 1, "confident_loss_error": 1e-8, "confident_gradient_error": 1.5e-3}
    return entry


def _part(name: str, cases: tuple[Any, ...], peers: tuple[str, ...], bandwidth: float) -> dict[str, Any]:
    import goals

    made = []
    for case in cases:
        results = {
            goals.OURS_IN_PLACE: _result(1.0, True, case, bandwidth * 0.99) | {"extra_memory": 0.001},
            goals.OURS: _result(1.0, True, case, bandwidth * 0.98) | {"extra_memory": 1.001},
        }
        results |= {peer: _result(8.0, False, case, bandwidth) for peer in peers}
        made.append(
            {
                "name": case.name,
                "rows": case.rows,
                "columns": case.columns,
                "dtype": case.dtype,
                "padding": case.padding,
                "large": case.large,
                "regular": case.regular,
                "results": results,
            }
        )
    names = (goals.OURS_IN_PLACE, goals.OURS, *peers)
    return {
        "part": name,
        "environment": {
            "date": "today",
            "python": "3",
            "torch": "2",
            "triton": None,
            "threads": 2,
            "gpu": "a GPU" if name != "cpu" else None,
        },
        "settings": {"ranks": 2 if name == "tp" else 1},
        "peers": [
            {"name": n, "version": "1", "missing": None, "ours": n.startswith("ours"), "in_place": False}
            for n in names
        ],
        "cases": made,
        "not_begun": [],
        "in_place_gb_per_s": bandwidth,
    }


@pytest.fixture
def parts() -> dict[str, dict[str, Any]]:
    """All parts, every goal met."""
    import cases
    import goals

    made = {
        "cuda": _part("cuda", cases.CUDA_CASES, goals.CUDA_PEERS, 4190.0),
        "tp": _part("tp", cases.TP_CASES, goals.TP_PEERS, 4190.0),
        "cpu": _part("cpu", cases.CPU_CASES, goals.CPU_PEERS, 10.0),
    }
    mass = {"environment": {"date": "today"}, "settings": {}}
    made["mass_accuracy"] = mass | {
        "part": "mass_accuracy",
        "summary": {"cases": 1500, "passed": 1500, "failed": 0, "accepted": True},
    }
    made["mass_speed"] = mass | {
        "part": "mass_speed",
        "summary": {
            "shapes": 1500,
            "mean_ratio": 0.4,
            "worst_ratio": 0.9,
            "slower_by_5_percent_ratio": 0,
            "peak_memory_above_pytorch": 0,
            "bytes_left_behind_by_repeated_calls": 0,
            "accepted": True,
        },
    }
    return made


@pytest.fixture
def environment() -> dict[str, str]:
    """For processes that are started: one thread, the package's own choice of implementation."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MCE_", "TRITON_"))}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
