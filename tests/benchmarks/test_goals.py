"""`check_results.py` on made-up results: a goal fails when, and only when, what it is about falls short."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import check_results
import goals
import pytest

Parts = dict[str, dict[str, Any]]


def _entry(parts: Parts, part: str, case: str, peer: str) -> dict[str, Any]:
    found = next(c for c in parts[part]["cases"] if c["name"] == case)
    return found["results"][peer]


def _set(part: str, case: str, peer: str, **values: Any) -> Callable[[Parts], None]:
    return lambda parts: _entry(parts, part, case, peer).update(values)


def _ratio(part: str, case: str, peer: str, ratio: float) -> Callable[[Parts], None]:
    times = {goals.OURS: ratio, goals.OURS_IN_PLACE: ratio}
    return _set(part, case, peer, times_ours=times)


def _slower(case: str, percent: float) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        entry = _entry(parts, "cuda", case, goals.OURS_IN_PLACE)
        entry["ms"] *= 1 + percent / 100

    return change


def _without_case(part: str, case: str) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        parts[part]["cases"] = [c for c in parts[part]["cases"] if c["name"] != case]

    return change


def _skipped(part: str, peer: str, *case_names: str) -> Callable[[Parts], None]:
    """On these cases, or on all, the peer says that it is not for such logits."""

    def change(parts: Parts) -> None:
        for case in parts[part]["cases"]:
            if not case_names or case["name"] in case_names:
                case["results"][peer] = {"skipped": "not for such logits"}

    return change


def _without_peer(part: str, case: str, peer: str) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        found = next(c for c in parts[part]["cases"] if c["name"] == case)
        found["results"][peer] = {"error": "RuntimeError: no"}

    return change


def _summary(part: str, **values: Any) -> Callable[[Parts], None]:
    return lambda parts: parts[part]["summary"].update(values)


IN_PLACE, OURS = goals.OURS_IN_PLACE, goals.OURS
TE17, TE20 = "TransformerEngine 2.17.0", "TransformerEngine 2.20.2 overwrite_input"

# (what is changed in results that meet all goals, the beginnings of the goals that then are not met)
CHANGES: list[tuple[str, Callable[[Parts], None], tuple[str, ...]]] = [
    ("bandwidth", _slower("8192x128256 bf16", 3), ("in place, N >=",)),
    ("bandwidth fp32", _slower("8192x128256 fp32", 3), ("in place, N >=",)),
    ("a peer as fast", _ratio("cuda", "256x4096 fp32", "Unsloth", 1.0), ("faster than every peer",)),
    (
        "a peer's number is NaN",
        _ratio("cuda", "256x4096 fp32", "Unsloth", float("nan")),
        ("faster than every",),
    ),
    ("a peer skipped an odd case", _skipped("cuda", "Liger", "8192x32001 bf16"), ()),
    ("a peer skipped all", _skipped("cpu", "Megatron native fused"), ("CPU: faster", "CPU: less extra")),
    ("a peer skipped a factor", _skipped("cuda", TE20, "8192x50304 bf16"), ("large bf16",)),
    (
        "a peer skipped the host's case",
        _skipped("cuda", "Unsloth", "256x4096 bf16"),
        ("256x4096: host",),
    ),
    ("a peer failed", _without_peer("cuda", "2048x8192 bf16", "Liger"), ("faster than every peer",)),
    ("TE 2.20.2 factor", _ratio("cuda", "8192x50304 bf16", TE20, 1.39), ("large bf16",)),
    ("TE 2.17 factor", _ratio("cuda", "8192x50304 bf16", TE17, 1.99), ("large bf16",)),
    ("native factor", _ratio("cuda", "8192x32000 bf16", "Megatron native fused", 6.9), ("large bf16",)),
    (
        "host above eager's",
        _set("cuda", "2048x8192 bf16", "torch eager", host_us=49.0),
        ("small shapes: host",),
    ),
    ("host above a peer's", _set("cuda", "256x4096 bf16", "Unsloth", host_us=49.0), ("256x4096: host",)),
    ("cold host", _set("cuda", "256x4096 bf16", "Unsloth", cold_host_us=49.0), ("256x4096: host",)),
    ("odd", _slower("8192x50257 bf16", 6), ("odd and strided",)),
    ("strided", _slower("8192x32000 bf16 strided by 32064", 6), ("odd and strided",)),
    ("memory in place", _set("cuda", "256x4096 bf16", IN_PLACE, extra_memory=1.0), ("extra memory",)),
    ("memory out of place", _set("cuda", "256x4096 bf16", OURS, extra_memory=2.0), ("extra memory",)),
    (
        "bf16 accuracy",
        _set("cuda", "8192x32000 bf16", OURS, confident_gradient_error=2.1e-3),
        ("confident tokens",),
    ),
    (
        "fp32 accuracy NaN",
        _set("cuda", "8192x32000 fp32", IN_PLACE, confident_loss_error=float("nan")),
        ("confident tokens",),
    ),
    ("tp peer", _ratio("tp", "8192x64128 bf16", "TorchTitan", 0.9), ("two ranks: faster",)),
    ("tp host", _set("tp", "8192x16000 bf16", "TorchTitan", host_us=49.0), ("two ranks, 8192x32000",)),
    ("tp collectives", _set("tp", "8192x16000 bf16", OURS, collectives=2), ("two ranks: one",)),
    ("tp case", _without_case("tp", "16384x64640 bf16"), ("two ranks: faster",)),
    ("cpu", _ratio("cpu", "64x2x2000 bf16", "torch eager", 0.99), ("CPU: faster",)),
    ("cpu memory", _set("cpu", "64x2x2000 bf16", "torch eager", extra_memory=0.001), ("CPU: less",)),
    ("cuda case", _without_case("cuda", "2048x8192 fp32"), ("faster than every peer",)),
    ("accuracy case", _summary("mass_accuracy", passed=1499), ("1500 of 1500",)),
    ("too few accuracy cases", _summary("mass_accuracy", cases=20, passed=20), ("1500 of 1500",)),
    ("mean", _summary("mass_speed", mean_ratio=0.51), ("1500 shapes",)),
    ("mean NaN", _summary("mass_speed", mean_ratio=float("nan")), ("1500 shapes",)),
    ("worst", _summary("mass_speed", worst_ratio=1.01), ("1500 shapes",)),
    ("slower", _summary("mass_speed", slower_by_5_percent_ratio=1), ("1500 shapes",)),
    ("too few shapes", _summary("mass_speed", shapes=1400), ("1500 shapes",)),
    ("peak", _summary("mass_speed", peak_memory_above_pytorch=1), ("peak memory",)),
    ("growth", _summary("mass_speed", bytes_left_behind_by_repeated_calls=512), ("peak memory",)),
]


def test_all_goals_met(parts: Parts) -> None:
    verdicts = goals.judge(parts)
    assert len(verdicts) == len(goals.GOALS)
    assert [v for v in verdicts if not v.met] == []


@pytest.mark.parametrize(("change", "unmet"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_goal_not_met(parts: Parts, change: Callable[[Parts], None], unmet: tuple[str, ...]) -> None:
    change(parts)
    found = [v.goal for v in goals.judge(parts) if not v.met]
    assert len(found) == len(unmet), found
    for goal, beginning in zip(found, unmet, strict=True):
        assert goal.startswith(beginning)


def test_every_goal_can_fail() -> None:
    beginnings = {b for _, _, unmet in CHANGES for b in unmet}
    assert [g for _, g, _ in goals.GOALS if not g.startswith(tuple(beginnings))] == []


@pytest.fixture
def files(parts: Parts, tmp_path: Path) -> Callable[[], list[str]]:
    def write() -> list[str]:
        paths = []
        for name, part in parts.items():
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps(part))
            paths.append(str(path))
        return paths

    return write


def test_exit_status(
    parts: Parts, files: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_results.main(files()) == 0
    parts["mass_speed"]["summary"]["mean_ratio"] = 0.6
    assert check_results.main(files()) == 1
    assert "NOT MET 1500 shapes" in capsys.readouterr().out


def test_missing_part(files: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_results.main(files()[1:]) == 2
    assert "missing parts: cuda" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "no json", '{"part": "gpu"}'])
def test_not_a_result(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        check_results.main([str(path)])
    assert stopped.value.code == 2
    assert "x.json" in capsys.readouterr().err
