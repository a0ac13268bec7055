#!/usr/bin/env python3
"""Mass acceptance: 1500 accuracy cases against fp64, and 1500 shapes timed against PyTorch's cross entropy.

    python benchmarks/mass_acceptance.py --accuracy [--out FILE.json] [--limit N] [--workers N]
    python benchmarks/mass_acceptance.py --speed [--out FILE.json] [--limit N]

Accuracy: dtype x reduction x layout x label smoothing x ignored labels x strides x shape, random
upstream gradients, on the device that is tested. Speed: forward + backward per token on the default
route (auto, out of place) against F.cross_entropy(reduction="none") in the logits' dtype. `ratio` is
ours / PyTorch on the GPU's clock (on a CPU: of a call), `call ratio` of calls one after the other as the
host sees them. Also the peak memory of both, and what 10,000 calls leave behind. Runs on the GPU if
there is one; with --device cpu on the CPU, where shapes above 4 million elements are left out.

Exit status: 0 accepted, 1 not accepted (the summary says why), 2 bad arguments.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import mass_accuracy
import mass_speed
import results
import torch
from mass_cases import COUNT, AccuracyCase, SpeedShape, accuracy_cases, speed_shapes
from render_results import markdown
from timing import GpuClock

MEAN_RATIO, WORST_RATIO = 0.5, 1.0
GROWTH_LIMIT = {"cuda": 0, "cpu": 8 * 2**20}
_MOST_ELEMENTS_ON_CPU = 4_000_000


def _accuracy_slice(cases: list[AccuracyCase], device: str) -> list[dict[str, Any]]:
    failures = []
    for case in cases:
        try:
            failure = mass_accuracy.run_case(case, torch.device(device))
        except Exception as error:  # a case that raises is a failed case
            failure = {
                "case": case.number,
                "what": f"{type(error).__name__}: {str(error)[:300]}",
                "options": case.text,
            }
        if failure is not None:
            failures.append(failure)
    return failures


def _warm_slice(shapes: list[SpeedShape], device: str) -> None:
    """Compiles what the shapes need; Triton keeps it on disk for the process that measures."""
    buffers = mass_speed.Buffers.make(shapes, torch.device(device))
    for shape in shapes:
        mass_speed.Pair(shape, buffers, torch.device(device)).runner(mass_speed.ours)()


def _in_workers(function: Any, items: list[Any], device: str, workers: int) -> list[Any]:
    slices = [items[i::workers] for i in range(workers) if items[i::workers]]
    if workers == 1:
        return [function(s, device) for s in slices]
    with ProcessPoolExecutor(
        len(slices), get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return list(pool.map(function, slices, [device] * len(slices)))


def run_accuracy(device: str, limit: int, workers: int) -> dict[str, Any]:
    cases = accuracy_cases(limit)
    began = time.perf_counter()
    failures = [f for part in _in_workers(_accuracy_slice, cases, device, workers) for f in part]
    failures.sort(key=lambda f: f["case"])
    summary = {
        "cases": len(cases),
        "passed": len(cases) - len(failures),
        "failed": len(failures),
        "complete": len(cases) == COUNT,
        "seconds": round(time.perf_counter() - began, 1),
        "accepted": not failures and bool(cases),
    }
    return {"part": "mass_accuracy", "summary": summary, "failures": failures}


def run_speed(device: str, limit: int, workers: int, time_limit: float, calls: int) -> dict[str, Any]:
    on_cpu = device == "cpu"
    shapes = speed_shapes(limit, _MOST_ELEMENTS_ON_CPU if on_cpu else 2**30)
    began = time.perf_counter()
    torch_device = torch.device(device)
    if not on_cpu:
        # a few hundred rows compile the same kernels as many, if they are as divisible by 16
        rows = [s.rows if s.rows < 288 else 272 + s.rows % 16 for s in shapes]
        small = [SpeedShape(s.number, s.dtype, n, s.columns) for s, n in zip(shapes, rows, strict=True)]
        _in_workers(_warm_slice, small, device, workers)
    warm = time.perf_counter() - began
    buffers = mass_speed.Buffers.make(shapes, torch_device)
    clock = None if on_cpu else GpuClock(torch_device)
    measured = []
    for shape in shapes:
        if time.perf_counter() - began > time_limit:
            break
        measured.append(mass_speed.measure_shape(shape, buffers, torch_device, clock))
    growth = mass_speed.growth_bytes(torch_device, calls)
    return {
        "part": "mass_speed",
        "summary": speed_summary(measured, len(shapes), growth, device)
        | {"warm_up_seconds": round(warm, 1), "seconds": round(time.perf_counter() - began, 1)},
        "shapes": measured,
    }


def speed_summary(measured: list[dict[str, Any]], wanted: int, growth: int, device: str) -> dict[str, Any]:
    """The numbers that are judged, and `accepted`."""
    summary: dict[str, Any] = {"shapes": len(measured), "complete": len(measured) == wanted == COUNT}
    accepted = len(measured) == wanted > 0
    for name, key in (("ratio", "ratio"), ("call_ratio", "call_ratio")):
        values = [m[key] for m in measured] or [float("nan")]
        summary[f"mean_{name}"] = statistics.fmean(values)
        summary[f"worst_{name}"] = max(values)
        summary[f"slower_by_5_percent_{name}"] = sum(v > mass_speed.SLOWER for v in values)
    accepted &= summary["mean_ratio"] <= MEAN_RATIO and summary["worst_ratio"] <= WORST_RATIO
    accepted &= summary["slower_by_5_percent_ratio"] == 0
    above = [m["shape"] for m in measured if m["peak_ours"] > m["peak_pytorch"]]
    summary["peak_memory_above_pytorch"] = len(above)
    summary["bytes_left_behind_by_repeated_calls"] = growth
    summary["accepted"] = bool(accepted and not above and growth <= GROWTH_LIMIT[device])
    return summary


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--accuracy", action="store_true")
    what.add_argument("--speed", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--limit", type=int, default=COUNT, metavar="N", help=f"of the {COUNT} cases or shapes"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument(
        "--workers", type=int, help="processes; default 12 at most on a GPU machine, 1 on a CPU"
    )
    parser.add_argument(
        "--time-limit", type=float, default=420.0, help="seconds after which no shape is begun"
    )
    parser.add_argument("--calls", type=int, default=10_000, help="of the test for growth")
    options = parser.parse_args(arguments)
    device = options.device or "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: use --device cpu")
    if not 0 < options.limit <= COUNT:
        parser.error(f"--limit is {options.limit}, expected 1 to {COUNT}")
    workers = options.workers or (min(12, os.cpu_count() or 1) if device == "cuda" else 1)
    if options.accuracy:
        part = run_accuracy(device, options.limit, workers)
    else:
        part = run_speed(device, options.limit, workers, options.time_limit, options.calls)
    part["environment"] = results.environment(device)
    part["settings"] = {"device": device, "limit": options.limit, "workers": workers}
    if options.out:
        results.write(part, options.out)
    print(markdown(part))
    for failure in part.get("failures", [])[:10]:
        print(f"case {failure['case']}: {failure['what']} ({failure['options']})", file=sys.stderr)
    return 0 if part["summary"]["accepted"] else 1


if __name__ == "__main__":
    sys.exit(main())
