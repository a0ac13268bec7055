"""Measures the peers on one case, side by side, on whichever device."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import memory
import timing
import torch
from cases import Case
from inputs import Call, Exact, Inputs, errors
from peers import Peer

_WARM_UP = 3
_FEWEST_ROUNDS, _MOST_ROUNDS = 7, 200
_HOST_ROUNDS, _HOST_CALLS = 40, 6
_SPLIT_ROUNDS = 15


def measure_case(
    case: Case,
    peers: Sequence[Peer],
    device: torch.device,
    group: Any,
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Results of one case by peer name (see `results.py`). A peer that raises gets its error as its result.

    Args:
        seconds: for the timed rounds of all peers together; warming up and compiling come on top.
    """
    inputs = Inputs.make(case, device, group)
    exact = Exact.of(inputs)
    if any(p.compiles for p in peers):
        torch._dynamo.reset()
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for peer in peers:
        reason = peer.declines(case.columns, case.columns + case.padding, case.torch_dtype)
        if case.torch_dtype not in peer.dtypes:
            reason = f"not for {case.dtype} logits"
        if reason is not None:
            found[peer.name] = {"skipped": reason}
            continue
        try:
            began = time.perf_counter()
            call = Call(peer, peer.make(), inputs)
            found[peer.name] = _warm_up(call, exact)
            calls[peer.name] = call
            say(f"  {peer.name}: warm after {time.perf_counter() - began:.1f} s")
        except Exception as error:  # foreign code: its failure is its result
            if group is not None and group.size() > 1:
                raise  # the other ranks would wait for this one
            found[peer.name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if calls:
        names = [p.name for p in peers if p.name in calls]
        if device.type == "cuda":
            _time_cuda(names, calls, inputs, found, seconds, group)
        else:
            _time_cpu(names, calls, found, seconds, group)
        if case.host:
            _time_host(names, calls, found, group)
        _compare(names, found, [p.name for p in peers if p.ours])
    result = {
        "name": case.name,
        "rows": case.rows,
        "columns": case.columns,
        "dtype": case.dtype,
        "padding": case.padding,
        "large": case.large,
        "regular": case.regular,
        "results": found,
    }
    if device.type == "cuda":
        result["in_place_ms"] = found.pop("")["ms"]
    for entry in found.values():
        entry.pop("times", None)
    return result


def _warm_up(call: Call, exact: Exact) -> dict[str, Any]:
    """Compiles, checks the results, measures memory and collectives."""
    loss = None
    for _ in range(_WARM_UP):
        call.inputs.restore()
        call.prepare()
        loss = call.both()
    assert loss is not None
    result: dict[str, Any] = errors(call, loss, exact)
    del loss
    call.clear()
    logits_bytes = call.inputs.case.bytes
    result["extra_memory"] = memory.peak_extra_bytes(call) / logits_bytes
    if call.inputs.group is not None and call.inputs.group.size() > 1:
        result["collectives"] = memory.collectives(call)
    host = [timing.host_times_us(call)[0] for _ in range(3)]
    call.clear()
    result["warm_host_us"] = statistics.median(host)
    return result


def _rounds(seconds: float, one_round: Callable[[], None], group: Any, device: torch.device) -> int:
    """How many rounds fit; the same on all ranks."""
    began = time.perf_counter()
    one_round()
    timing.synchronize(device)
    took = time.perf_counter() - began
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(seconds / took)))
    if group is not None and group.size() > 1:
        agreed = torch.tensor(rounds, device=device)
        torch.distributed.broadcast(agreed, 0, group=group)
        rounds = int(agreed)
    return rounds


def _time_cuda(
    names: Sequence[str],
    calls: dict[str, Call],
    inputs: Inputs,
    found: dict[str, Any],
    seconds: float,
    group: Any,
) -> None:
    device = inputs.work.device
    many = group is not None and group.size() > 1
    clock = timing.GpuClock(device, group if many else None)
    flat = torch.zeros(inputs.case.rows * inputs.case.columns, dtype=inputs.work.dtype, device=device)
    flat.view_as(inputs.master).copy_(inputs.master)
    times: dict[str, list[float]] = {name: [] for name in (*names, "")}

    def one(name: str) -> None:
        if name == "":  # the in-place pass that the others are compared with
            times[name].append(clock.in_place_ms(flat))
            return
        call = calls[name]
        before = timing.restore_and_prepare(inputs, call)
        times[name].append(clock.time(before, call.both, found[name]["warm_host_us"]))
        call.clear()

    def one_round() -> None:
        for name in (*names, ""):
            one(name)

    rounds = _rounds(seconds, one_round, group, device)
    for order in timing.alternate([*names, ""], rounds):
        for name in order:
            one(name)
    found[""] = {}
    for name, values in times.items():
        values = values[1:]
        if many:
            values = _max_over_ranks(values, group, device)
        found[name].update(timing.summary(values), times=values)
    for name in names:
        if calls[name].peer.ours:
            _time_split(calls[name], clock, found[name])


def _time_split(call: Call, clock: timing.GpuClock, entry: dict[str, Any]) -> None:
    """Forward and backward by themselves."""
    forward, backward = [], []
    before = timing.restore_and_prepare(call.inputs, call)
    host = entry["warm_host_us"]
    for _ in range(_SPLIT_ROUNDS):
        forward.append(clock.time(before, call.forward, host))
        before()
        loss = call.forward()
        upstream = call.upstream_like(loss)
        backward.append(clock.time(lambda: None, functools.partial(loss.backward, upstream), host))
        call.clear()
    entry["forward_ms"] = statistics.median(forward)
    entry["backward_ms"] = statistics.median(backward)


def _time_cpu(
    names: Sequence[str], calls: dict[str, Call], found: dict[str, Any], seconds: float, group: Any
) -> None:
    device = torch.device("cpu")
    times: dict[str, list[float]] = {name: [] for name in names}

    def one_round() -> None:
        for name in names:
            timing.cpu_ms(calls[name])
            calls[name].clear()

    rounds = _rounds(seconds, one_round, group, device)
    for order in timing.alternate(names, rounds):
        for name in order:
            times[name].append(timing.cpu_ms(calls[name]))
            calls[name].clear()
    for name, values in times.items():
        if group is not None and group.size() > 1:
            values = _max_over_ranks(values, group, device)
        found[name].update(timing.summary(values), times=values)


def _time_host(names: Sequence[str], calls: dict[str, Call], found: dict[str, Any], group: Any) -> None:
    """Host times of calls that find the device idle: of the first one after all other peers had their turns,
    when neither the processor's caches nor its branch predictors know this peer (cold), and of the ones that
    follow it."""
    device = next(iter(calls.values())).inputs.work.device
    cold: dict[str, list[float]] = {name: [] for name in names}
    host: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    for order in timing.alternate(names, _HOST_ROUNDS):
        for name in order:
            for again in range(_HOST_CALLS):
                if group is not None and group.size() > 1:
                    torch.distributed.barrier(group)
                returned, done = timing.host_times_us(calls[name])
                calls[name].clear()
                (host if again else cold)[name].append(returned)
                if again:
                    wall[name].append(done)
    for key, taken in (("cold_host_us", cold), ("host_us", host), ("wall_us", wall)):
        for name, values in taken.items():
            if group is not None and group.size() > 1:
                values = _max_over_ranks(values, group, device)
            found[name][key] = statistics.median(values)


def _max_over_ranks(values: list[float], group: Any, device: torch.device) -> list[float]:
    own = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX, group=group)
    return own.tolist()


def _compare(names: Sequence[str], found: dict[str, Any], ours: Sequence[str]) -> None:
    """`times_ours`: by which factor a peer takes longer than each of ours, the median over paired rounds."""
    for name in names:
        found[name]["times_ours"] = {
            own: statistics.median(
                a / b for a, b in zip(found[name]["times"], found[own]["times"], strict=True)
            )
            for own in ours
            if own in names
        }
