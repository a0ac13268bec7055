"""The most memory a call holds beyond what was there before it, and the collectives it starts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from inputs import Call


def peak_extra_bytes(call: Call) -> int:
    """Bytes at the highest point of forward + backward, the gradient included unless it is in the logits."""
    call.inputs.restore()
    call.prepare()
    if call.inputs.work.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call.both()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return cpu_peak_bytes(call.both)


def cpu_peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that PyTorch holds on the CPU within `run` beyond what it held before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def collectives(call: Call) -> int:
    """How many collective operations forward + backward start."""
    call.inputs.restore()
    call.prepare()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call.both()
    return sum(
        e.name().startswith("c10d::")  # the functional collectives start these, too
        for e in profile.profiler.kineto_results.events()
    )
