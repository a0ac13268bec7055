"""Times shapes against PyTorch's cross entropy on the default route, and looks for growth over many calls."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mass_cases import SpeedShape
from memory import cpu_peak_bytes
from timing import GpuClock, synchronize
from torch import Tensor

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SLOWER = 1.05
_PAIRS, _PAIRS_AGAIN = 5, 25


def ours(logits: Tensor, labels: Tensor) -> Tensor:
    from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy

    return parallel_cross_entropy(logits, labels)  # type: ignore[return-value]


def theirs(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


@dataclasses.dataclass
class Buffers:
    """Random numbers that the shapes' logits are cut from, so that none are drawn between measurements."""

    logits: dict[str, Tensor]
    upstream: Tensor

    @classmethod
    def make(cls, shapes: list[SpeedShape], device: torch.device) -> Buffers:
        made = {}
        for dtype in {s.dtype for s in shapes}:
            most = max(s.elements for s in shapes if s.dtype == dtype)
            flat = torch.empty(most, dtype=_DTYPES[dtype], device=device)
            for start in range(0, most, 2**26):
                part = flat[start : start + 2**26]
                part.copy_(torch.randn(part.shape, device=device))
            made[dtype] = flat
        return cls(made, torch.rand(max(s.rows for s in shapes), device=device) + 0.5)


class Pair:
    """Both implementations on one shape."""

    def __init__(self, shape: SpeedShape, buffers: Buffers, device: torch.device) -> None:
        flat = buffers.logits[shape.dtype][: shape.elements]
        self.logits = flat.view(shape.rows, shape.columns)
        generator = torch.Generator().manual_seed(shape.number)
        self.labels = torch.randint(0, shape.columns, (shape.rows,), generator=generator).to(device)
        self.upstream = buffers.upstream[: shape.rows]
        self.device = device

    def runner(self, function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        logits = self.logits.detach().requires_grad_()
        upstream = self.upstream.to(function(self.logits, self.labels).dtype)  # outside of what is timed

        def run() -> None:
            loss = function(logits, self.labels)
            loss.backward(upstream)
            logits.grad = None

        return run

    def peak(self, function: Callable[[Tensor, Tensor], Tensor]) -> int:
        run = self.runner(function)
        if self.device.type == "cuda":
            synchronize(self.device)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            synchronize(self.device)
            return torch.cuda.max_memory_allocated() - before
        return cpu_peak_bytes(run)


def _call_ms(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Milliseconds a call takes a user who calls again and again: the host's time or the device's."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - began) * 1e3 / repeats


def _ratios(pair: Pair, clock: GpuClock | None, pairs: int) -> dict[str, float]:
    mine, other = pair.runner(ours), pair.runner(theirs)
    for run in (mine, other):
        run()
    found: dict[str, list[float]] = {"call": [], "device": []}
    once = _call_ms(other, 1, pair.device)
    repeats = max(1, min(5, int(5 / once)))
    host_us = min(once * 1e3, 1500.0)
    for i in range(pairs):
        order = (mine, other) if i % 2 else (other, mine)
        taken = {run: _call_ms(run, repeats, pair.device) for run in order}
        found["call"].append(taken[mine] / taken[other])
        if clock is not None:
            taken = {run: clock.time(lambda: None, run, host_us) for run in order}
            found["device"].append(taken[mine] / taken[other])
    return {name: statistics.median(values) for name, values in found.items() if values}


def measure_shape(
    shape: SpeedShape, buffers: Buffers, device: torch.device, clock: GpuClock | None
) -> dict[str, Any]:
    """Ratios ours / PyTorch of a shape; one that comes out slower is measured again, longer."""
    pair = Pair(shape, buffers, device)
    ratios = _ratios(pair, clock, _PAIRS)
    again = ratios.get("device", ratios["call"]) > 1.0
    if again:
        ratios = _ratios(pair, clock, _PAIRS_AGAIN)
    return {
        "number": shape.number,
        "shape": shape.text,
        "ratio": ratios.get("device", ratios["call"]),
        "call_ratio": ratios["call"],
        "measured_again": again,
        "peak_ours": pair.peak(ours),
        "peak_pytorch": pair.peak(theirs),
    }


def growth_bytes(device: torch.device, calls: int = 10_000) -> int:
    """How much memory `calls` calls leave behind: the allocator's on a GPU, the process's on a CPU."""
    shape = SpeedShape(0, "fp32", 64, 1000)
    run = Pair(shape, Buffers.make([shape], device), device).runner(ours)
    for _ in range(50):
        run()
    before = _held(device)
    for _ in range(calls):
        run()
    return _held(device) - before


def _held(device: torch.device) -> int:
    if device.type == "cuda":
        synchronize(device)
        return torch.cuda.memory_allocated() + torch.cuda.memory_reserved()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
