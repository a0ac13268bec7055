"""Times of forward + backward: on the GPU's clock, on the host's, and on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from inputs import Call, Inputs

_FLUSH_BYTES = 256 * 2**20  # several times an H200's L2
_CYCLES_PER_US = 2000  # of torch.cuda._sleep, at most


class GpuClock:
    """Times calls between CUDA events, with cold caches and with the host out of the way.

    Before each timed call the logits are restored, the L2 cache is overwritten, and the GPU is kept asleep
    for longer than the host needs to enqueue the call, so that the events see the GPU's work only (a call
    that itself waits for the GPU cannot be helped).
    """

    def __init__(self, device: torch.device, group: object = None) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        self._group = group
        self._token = torch.zeros(1, device=device)

    def time(self, before: Callable[[], object], call: Callable[[], object], host_us: float) -> float:
        """Milliseconds of `call`; `before` is not timed."""
        before()
        self._flush.zero_()
        if self._group is not None:
            torch.distributed.all_reduce(self._token, group=self._group)  # ranks start together
        torch.cuda._sleep(int(min(host_us * 1.5 + 100, 5000) * _CYCLES_PER_US))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def in_place_ms(self, flat: torch.Tensor) -> float:
        """Milliseconds of multiplying a contiguous tensor by 1 in place: one read and one write of it."""
        return self.time(lambda: None, lambda: flat.mul_(1.0), 20.0)


def host_times_us(call: Call) -> tuple[float, float]:
    """(until the call returns, until its work on the device is done), nothing queued before."""
    call.inputs.restore()
    call.prepare()
    synchronize(call.inputs.work.device)
    began = time.perf_counter()
    call.both()
    returned = time.perf_counter()
    synchronize(call.inputs.work.device)
    return (returned - began) * 1e6, (time.perf_counter() - began) * 1e6


def cpu_ms(call: Call) -> float:
    call.inputs.restore()
    call.prepare()
    began = time.perf_counter()
    call.both()
    return (time.perf_counter() - began) * 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def alternate(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The order of each round: it starts one further on each time, every second round backwards, so that
    slow drifts fall on all alike."""
    orders = []
    for r in range(rounds):
        shift = (r // 2) % len(names)
        order = [*names[shift:], *names[:shift]]
        orders.append(order[::-1] if r % 2 else order)
    return orders


def summary(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return {
        "ms": statistics.median(ordered),
        "ms_p10": ordered[tenth],
        "ms_p90": ordered[-1 - tenth],
        "rounds": len(ordered),
    }


def restore_and_prepare(inputs: Inputs, call: Call) -> Callable[[], None]:
    def before() -> None:
        inputs.restore()
        call.prepare()

    return before
