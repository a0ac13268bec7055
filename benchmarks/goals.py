"""The goals for speed, memory and accuracy, judged from the benchmark's JSON parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from cases import CPU_CASES, CUDA_CASES, TP_CASES, Case
from mass_cases import COUNT
from render_results import gb_per_s, percent_of_in_place

OURS, OURS_IN_PLACE = "ours", "ours, in place"
EAGER = "torch eager"

BANDWIDTH_PERCENT = 97.0
FACTORS = {
    "TransformerEngine 2.20.2 overwrite_input": 1.4,
    "TransformerEngine 2.17.0": 2.0,
    "Megatron native fused": 7.0,
}
CUDA_PEERS = (
    "TransformerEngine 2.17.0",
    "TransformerEngine 2.20.2",
    "TransformerEngine 2.20.2 overwrite_input",
    "Megatron native fused",
    "Megatron native unfused",
    "Liger",
    "Liger vocab-parallel",
    "quack in place",
    "flash-attn in place",
    "Unsloth",
    "torch.compile, fp32 upcast",
    EAGER,
    "torch eager, fp32 upcast",
)
TP_PEERS = (
    "TransformerEngine 2.17.0",
    "TransformerEngine 2.20.2",
    "TransformerEngine 2.20.2 overwrite_input",
    "Megatron native fused",
    "Megatron native unfused",
    "Liger vocab-parallel",
    "TorchTitan",
    "PyTorch loss_parallel",
)
CPU_PEERS = ("Megatron native fused", "Megatron native unfused", EAGER)
IRREGULAR_LOSS_PERCENT = 5.0
# an irregular case, and the regular one that it is compared with
IRREGULAR = (
    ("8192x50257 bf16", "8192x50304 bf16"),
    ("8192x32001 bf16", "8192x32000 bf16"),
    ("8192x32000 bf16 strided by 32064", "8192x32000 bf16"),
    ("8192x32000 bf16 strided by 32003", "8192x32000 bf16"),
    ("8192x32001 fp32", "8192x32000 fp32"),
)
CONFIDENT_BF16_GRADIENT, CONFIDENT_FP32_LOSS = 2e-3, 1e-7
# of repeated calls, and of the first one after all other peers had their turns
HOST_TIMES = ("host_us", "cold_host_us")
# row statistics and the allocator's rounding, in units of the logits
SMALL_MEMORY = 0.02


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a goal is met, and each thing that falls short of it or is not there."""

    goal: str
    met: bool
    shortfalls: tuple[str, ...]


Shortfalls = Iterator[str]


def judge(parts: dict[str, dict[str, Any]]) -> list[Verdict]:
    """All goals of the parts that are given, by part name."""
    return [
        Verdict(goal, not found, tuple(found))
        for part_name, goal, check in GOALS
        if part_name in parts
        for found in [list(check(parts[part_name]))]
    ]


def _cases(part: dict[str, Any], wanted: tuple[Case, ...]) -> Shortfalls:
    there = {c["name"] for c in part["cases"]}
    for name in dict.fromkeys(c.name for c in wanted):
        if name not in there:
            yield f"{name} was not measured"


def _entry(case: dict[str, Any], name: str) -> dict[str, Any]:
    return case["results"].get(name, {})


def _faster_than(
    part: dict[str, Any],
    own: str,
    peers: tuple[str, ...],
    key: str = "",
    cases: Callable[..., bool] | None = None,
) -> Shortfalls:
    """Every named peer takes longer on every case; one without a number is a shortfall, not a win. A case
    that a peer is not for (skipped) is none of its own, but it must have another one.
    """
    never_compared = dict.fromkeys(peers, "")
    for case in part["cases"]:
        if cases is not None and not cases(case):
            continue
        mine = _entry(case, own)
        for peer in peers:
            theirs = _entry(case, peer)
            if key:
                ratio = theirs[key] / mine[key] if key in theirs and key in mine else None
            else:
                ratio = theirs.get("times_ours", {}).get(own)
            if "skipped" in theirs:
                if peer in never_compared:
                    never_compared[peer] = theirs["skipped"]
                continue
            never_compared.pop(peer, None)
            if ratio is None:
                why = theirs.get("error") or _missing(part, peer)
                yield f"{case['name']}: no comparison with {peer} ({why})"
            elif not ratio > 1.0:
                yield f"{case['name']}: {peer} takes {ratio:.3f} times ours{f' ({key})' if key else ''}"
    yield from (f"no case was compared with {peer}: {why}" for peer, why in never_compared.items() if why)


def _missing(part: dict[str, Any], name: str) -> str:
    for peer in part["peers"]:
        if peer["name"] == name and peer["missing"]:
            return str(peer["missing"])
    return "not measured"


def _bandwidth(part: dict[str, Any]) -> Shortfalls:
    yield from _cases(part, tuple(c for c in CUDA_CASES if c.large and c.regular))
    for case in part["cases"]:
        if not (case["large"] and case["regular"]):
            continue
        percent = percent_of_in_place(part, case, OURS_IN_PLACE)
        if percent is None or not percent >= BANDWIDTH_PERCENT:
            shown = "no result" if percent is None else f"{percent:.1f} %"
            yield f"{case['name']}: {shown}"


def _faster_cuda(part: dict[str, Any]) -> Shortfalls:
    yield from _cases(part, CUDA_CASES)
    yield from _faster_than(part, OURS_IN_PLACE, CUDA_PEERS)


def _factors(part: dict[str, Any]) -> Shortfalls:
    chosen = [c for c in part["cases"] if c["large"] and c["regular"] and c["dtype"] == "bf16"]
    if not chosen:
        yield "no large bf16 case was measured"
    for case in chosen:
        for peer, factor in FACTORS.items():
            ratio = _entry(case, peer).get("times_ours", {}).get(OURS_IN_PLACE)
            if ratio is None or not ratio >= factor:
                shown = "no comparison" if ratio is None else f"{ratio:.2f} times ours"
                yield f"{case['name']}: {peer} {shown}, wanted {factor}"


def _host_below_eager(part: dict[str, Any]) -> Shortfalls:
    small = ("256x4096 bf16", "2048x8192 bf16")
    there = [c for c in part["cases"] if c["name"] in small]
    if len(there) < len(small):
        yield "a small case was not measured"
    for own in (OURS, OURS_IN_PLACE):
        for key in HOST_TIMES:
            yield from _faster_than(part, own, (EAGER,), key, lambda c: c["name"] in small)


def _host_cuda(part: dict[str, Any]) -> Shortfalls:
    if not any(c["name"] == "256x4096 bf16" for c in part["cases"]):
        yield "256x4096 bf16 was not measured"
    for key in HOST_TIMES:
        yield from _faster_than(part, OURS_IN_PLACE, CUDA_PEERS, key, lambda c: c["name"] == "256x4096 bf16")


def _irregular(part: dict[str, Any]) -> Shortfalls:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for case in part["cases"]:
        by_name.setdefault(case["name"], []).append(case)
    for name, regular_name in IRREGULAR:
        if name not in by_name or regular_name not in by_name:
            yield f"{name} or {regular_name} was not measured"
            continue
        regular = by_name[regular_name][0]
        for case in by_name[name]:
            mine, reference = _entry(case, OURS_IN_PLACE), _entry(regular, OURS_IN_PLACE)
            if "ms" not in mine or "ms" not in reference:
                yield f"{name}: no result"
                continue
            loss = 100 * (1 - gb_per_s(case, mine["ms"]) / gb_per_s(regular, reference["ms"]))
            if not loss <= IRREGULAR_LOSS_PERCENT:
                yield f"{name}: {loss:.1f} % below {regular_name}"


def _memory_cuda(part: dict[str, Any]) -> Shortfalls:
    for case in part["cases"]:
        for own, limit in ((OURS_IN_PLACE, 0.0), (OURS, 1.0)):
            extra = _entry(case, own).get("extra_memory")
            if extra is None or not extra <= limit + SMALL_MEMORY:
                yield f"{case['name']}: {own}: {extra} times the logits, wanted {limit:.0f}"


def _accuracy(part: dict[str, Any]) -> Shortfalls:
    seen = set()
    for case in part["cases"]:
        seen.add(case["dtype"])
        for own in (OURS_IN_PLACE, OURS):
            entry = _entry(case, own)
            key, limit = {
                "bf16": ("confident_gradient_error", CONFIDENT_BF16_GRADIENT),
                "fp32": ("confident_loss_error", CONFIDENT_FP32_LOSS),
            }[case["dtype"]]
            value = entry.get(key)
            if value is None or not value <= limit:
                yield f"{case['name']}: {own}: {key.replace('_', ' ')} {value}, wanted at most {limit:g}"
    for dtype in {"bf16", "fp32"} - seen:
        yield f"no {dtype} case was measured"


def _faster_tp(part: dict[str, Any]) -> Shortfalls:
    yield from _cases(part, TP_CASES)
    yield from _faster_than(part, OURS_IN_PLACE, TP_PEERS)


def _host_tp(part: dict[str, Any]) -> Shortfalls:
    name = TP_CASES[0].name  # 8192 x 32000 over two ranks
    if not any(c["name"] == name for c in part["cases"]):
        yield f"{name} was not measured"
    yield from _faster_than(part, OURS_IN_PLACE, TP_PEERS, "host_us", lambda c: c["name"] == name)


def _one_collective(part: dict[str, Any]) -> Shortfalls:
    if not part["cases"]:
        yield "no case was measured"
    for case in part["cases"]:
        for own in (OURS, OURS_IN_PLACE):
            number = _entry(case, own).get("collectives")
            if number != 1:
                yield f"{case['name']}: {own}: {number} collectives"


def _faster_cpu(part: dict[str, Any]) -> Shortfalls:
    yield from _cases(part, CPU_CASES)
    for own in (OURS, OURS_IN_PLACE):
        yield from (f"{own}: {line}" for line in _faster_than(part, own, CPU_PEERS))


def _memory_cpu(part: dict[str, Any]) -> Shortfalls:
    if not part["cases"]:
        yield "no case was measured"
    for case in part["cases"]:
        mine = _entry(case, OURS_IN_PLACE).get("extra_memory")
        for peer in CPU_PEERS:
            theirs = _entry(case, peer).get("extra_memory")
            if mine is None or theirs is None or not mine < theirs:
                yield f"{case['name']}: {mine} times the logits, {peer} {theirs}"


def _mass_accuracy(part: dict[str, Any]) -> Shortfalls:
    summary = part["summary"]
    if summary["cases"] != COUNT or summary["passed"] != COUNT:
        yield f"{summary['passed']} of {summary['cases']} cases passed, wanted {COUNT} of {COUNT}"


def _mass_speed(part: dict[str, Any]) -> Shortfalls:
    summary = part["summary"]
    if summary["shapes"] != COUNT:
        yield f"{summary['shapes']} shapes were measured, wanted {COUNT}"
    if not summary["mean_ratio"] <= 0.5:
        yield f"mean ratio {summary['mean_ratio']:.3f}, wanted at most 0.5"
    if not summary["worst_ratio"] <= 1.0:
        yield f"worst ratio {summary['worst_ratio']:.3f}, wanted at most 1.0"
    if summary["slower_by_5_percent_ratio"]:
        yield f"{summary['slower_by_5_percent_ratio']} shapes slower by 5 %"


def _mass_memory(part: dict[str, Any]) -> Shortfalls:
    summary = part["summary"]
    if summary["peak_memory_above_pytorch"]:
        yield f"{summary['peak_memory_above_pytorch']} shapes with a higher peak than PyTorch's"
    if summary["bytes_left_behind_by_repeated_calls"] > 0:
        yield f"{summary['bytes_left_behind_by_repeated_calls']} bytes left behind by repeated calls"


GOALS: tuple[tuple[str, str, Callable[[dict[str, Any]], Shortfalls]], ...] = (
    ("cuda", f"in place, N >= 4096, V >= 32000: {BANDWIDTH_PERCENT:.0f} % of in-place bandwidth", _bandwidth),
    ("cuda", "faster than every peer at every shape", _faster_cuda),
    ("cuda", "large bf16: 1.4x TE 2.20.2 overwrite, 2x TE 2.17, 7x native fused", _factors),
    ("cuda", "small shapes: host time below torch eager's", _host_below_eager),
    ("cuda", "256x4096: host time below every peer's", _host_cuda),
    ("cuda", "odd and strided within 5 % of the regular shape's bandwidth", _irregular),
    ("cuda", "extra memory: in place none, out of place one gradient", _memory_cuda),
    ("cuda", "confident tokens: bf16 gradient <= 2e-3, fp32 loss <= 1e-7", _accuracy),
    ("tp", "two ranks: faster than every peer", _faster_tp),
    ("tp", "two ranks, 8192x32000: host time below every peer's", _host_tp),
    ("tp", "two ranks: one collective a call", _one_collective),
    ("cpu", "CPU: faster than native and F.cross_entropy", _faster_cpu),
    ("cpu", "CPU: less extra memory than each", _memory_cpu),
    ("mass_accuracy", f"{COUNT} of {COUNT} accuracy cases", _mass_accuracy),
    ("mass_speed", "1500 shapes: mean <= 0.5, worst <= 1.0, none slower by 5 %", _mass_speed),
    ("mass_speed", "peak memory never above PyTorch's, no growth", _mass_memory),
)
