"""The compile gate: every shipped kernel, dtype and tile fits the 910B3 with three versions of the compiler,
what must be rejected is rejected, and the estimated costs are not worse than those in cost.json.

Needs what st_scripts/setup_npu_gate.sh makes. After a change that is meant to cost what it costs:
`MCE_UPDATE_COSTS=1 pytest tests/ascend/test_gate.py` writes cost.json anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_ce_adaptor import cli
from megatron_ce_adaptor.npu_check import command, shipped

REPO = Path(__file__).resolve().parents[2]
GATE = REPO / ".venvs" / "npu_gate" / "bin" / "python"
COMPILERS = [REPO / ".venvs" / "ascendnpu-ir" / version for version in ("1.0.0", "1.1.0", "1.2.0")]
COSTS = Path(__file__).with_name("cost.json")
CONTROLS = Path(__file__).with_name("controls.py")
# Of a cost: compilers are deterministic, so this is for a change too small to care about.
TOLERANCE = 1.02

pytestmark = pytest.mark.skipif(
    not GATE.exists(), reason="no compiler for NPUs here: bash st_scripts/setup_npu_gate.sh"
)

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Of all shipped cases and all compilers."""
    cases = [case.as_json() for case in shipped.cases()]
    return list(command._compile(cases, [str(c) for c in COMPILERS], str(GATE), jobs=0))


def check(*arguments: str, every_compiler: bool = True) -> tuple[int, list[Answer]]:
    """`megatron-ce npu-check --json ...`: its exit status and what it prints."""
    printed = io.StringIO()
    compilers = [word for c in COMPILERS for word in ("--compiler", str(c))] if every_compiler else []
    with contextlib.redirect_stdout(printed):
        status = cli.main(["npu-check", "--python", str(GATE), "--json", *compilers, *arguments])
    return status, json.loads(printed.getvalue())


def test_every_shipped_tile_fits_every_compiler(answers: list[Answer]) -> None:
    """Accepted, double buffered, without loops over single elements, within the local memory."""
    bad = [
        f"{a['case']} ({a['compiler']}): {a['status']} {a['message']}"
        for a in answers
        if command.verdict([a]) != command.ALL_WELL
        or a["ub_bytes"] > a["ub_total"]
        or not a["double_buffered"]
    ]
    assert not bad, "\n".join(bad)
    assert {a["ub_total"] for a in answers} == {196608}
    assert {a["compiler"] for a in answers} == {"1.0.0", "1.1.0", "1.2.0"}


def test_the_targets_gradient_is_stored_after_its_tile(answers: list[Answer]) -> None:
    """Both are copies to the same address: the second one waits until the first has arrived."""
    gradients = [a for a in answers if a["kernel"] == "gradient_kernel"]
    assert gradients
    assert [a["case"] for a in gradients if not a["last_store_waits"]] == []


def test_costs_are_not_worse_than_recorded(answers: list[Answer]) -> None:
    now: dict[str, dict[str, float]] = {}
    for answer in answers:
        now.setdefault(answer["case"], {})[answer["compiler"]] = answer["cost"]
    if os.environ.get("MCE_UPDATE_COSTS") == "1":
        lines = [f"{json.dumps(case)}: {json.dumps(costs)}" for case, costs in sorted(now.items())]
        COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    recorded = json.loads(COSTS.read_text())
    assert sorted(now) == sorted(recorded), "the set of cases has changed: MCE_UPDATE_COSTS=1"
    worse = [
        f"{case} ({version}): {cost} after {recorded[case][version]}"
        for case, costs in now.items()
        for version, cost in costs.items()
        if cost > recorded[case][version] * TOLERANCE
    ]
    assert not worse, "the NPU code became worse:\n" + "\n".join(worse)


@pytest.mark.parametrize(
    ("kernel", "dtype", "said"),
    [
        ("double_precision", "*fp64", "fp64"),
        ("inline_ptx", "*fp32", "inline assembly"),
        ("undefined_name", "*fp32", "no_such_function"),
    ],
)
def test_controls_are_rejected(kernel: str, dtype: str, said: str) -> None:
    status, controls = check("--kernel", f"{CONTROLS}:{kernel}", f"X={dtype}", "n=i32", "BLOCK=1024")
    assert status == command.REJECTED
    assert [a["status"] for a in controls] != ["OK"] * len(COMPILERS)
    assert all(said in a["message"] for a in controls), controls


def widened(kernel: str, tile: int, **constants: object) -> list[Answer]:
    """A shipped kernel for bf16 logits with a tile that is not shipped."""
    case = next(c for c in shipped.cases() if c.kernel == kernel and c.dtype == "bf16")
    case = dataclasses.replace(case, constants={**case.constants, "BLOCK": tile, **constants})
    return list(command._compile([case.as_json()], [str(c) for c in COMPILERS], str(GATE), jobs=1))


@pytest.mark.parametrize("kernel", ["row_statistics_kernel", "gradient_kernel"])
def test_a_tile_of_32768_overflows(kernel: str) -> None:
    """What the first version for NPUs did, with MAX_FUSED_SIZE = 32768."""
    for answer in widened(kernel, 32768):
        assert answer["status"] == "UB_OVERFLOW", answer
        assert command.verdict([answer]) == command.REJECTED


def test_loops_over_single_elements_are_called_slow() -> None:
    status, controls = check("--kernel", f"{CONTROLS}:int64_comparison", "X=*i64", "n=i32", "BLOCK=1024")
    assert status == command.SLOW_FORM
    assert all(a["scalar_loops"] > 0 for a in controls)


def test_lost_double_buffering_is_called_slow() -> None:
    """Only the newest compiler gives it up to fit; the older ones reject."""
    answers = widened("row_statistics_kernel", 16384, SMOOTH=True)
    assert [a["status"] for a in answers] == ["UB_OVERFLOW", "UB_OVERFLOW", "OK"]
    assert command.verdict(answers) == command.REJECTED
    assert command.verdict(answers[2:]) == command.SLOW_FORM


def test_the_table_says_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    """With the environment's own compiler."""
    arguments = ["--kernel", f"{CONTROLS}:exponentials", "X=*bf16:16", "n=i32", "BLOCK=4096"]
    status, (answer,) = check(*arguments, every_compiler=False)
    assert status == command.ALL_WELL
    assert answer["compiler"] == "1.2.0"
    assert cli.main(["npu-check", "--python", str(GATE), *arguments]) == command.ALL_WELL
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:5] == ["exponentials", "1.2.0", "OK", str(answer["ub_bytes"]), "yes"]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("exponentials", ["X=*bf16", "BLOCK=4096"], "the parameter n has no type"),
        ("exponentials", ["X=*bf16", "n=i32"], "the constant BLOCK has no value"),
        ("exponentials", ["X=*bf16", "n=i32", "BLOCK=4096", "BLOK=1"], "the kernel has no parameter BLOK"),
        ("tl", ["X=*bf16"], "no @triton.jit function"),
        ("no_such_kernel", [], "there is no no_such_kernel in it"),
    ],
)
def test_what_does_not_fit_the_kernel_is_named(name: str, arguments: list[str], said: str) -> None:
    status, (answer,) = check("--kernel", f"{CONTROLS}:{name}", *arguments, every_compiler=False)
    assert status == command.REJECTED
    assert said in answer["message"]
