"""acceptance.md and acceptance.zh-CN.md: every line of the task has an answer, the measured one."""

from __future__ import annotations

import json
import re
import sys

import pytest

from megatron_ce_adaptor import cli
from megatron_ce_adaptor.longrun.acceptance import device_of, render_acceptance

TASK = {"expert_model_parallel_size": "2", "padded_vocab_size": "129280"}
PAGES = {"en": "acceptance.md", "zh-CN": "acceptance.zh-CN.md"}
# The lines that the task asks about, in the order of the page.
LINES = ["parallel layout", "device", "data", "length", "completeness", "loss MAPE", "loss, worst step",
         "gradient norm deviation", "step time (median) and throughput", "peak memory (last stage)",
         "te really ran", "to deliver"]  # fmt: skip


def rows(page, heading):
    """The table under `heading`: first cell -> the other cells."""
    section = page[page.index(heading) :]
    table = re.search(r"((?:^\|.*\n)+)", section, re.MULTILINE)[1].splitlines()[2:]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    return {row[0]: row[1:] for row in cells}


@pytest.fixture
def judged(maker, tmp_path, capsys):
    """The metrics and both pages of a comparison of runs with these changes."""

    def judged(te=None, environment=None, status=0, floor=False, **changes):
        changes["arguments"] = {**TASK, **changes.get("arguments", {})}
        logs = [
            maker(**changes).write(tmp_path),
            maker(
                "te", **{"factor": 1.001, "norm_factor": 1.01, "time_ms": 90, **changes, **(te or {})}
            ).write(tmp_path),
        ]
        if floor:
            logs += ["--noise-floor", maker(factor=1.0005, **changes).write(tmp_path, "floor.log")]
        out = tmp_path / "out"
        assert cli.main(["compare", *map(str, logs), "--out", str(out)]) == status
        capsys.readouterr()
        metrics = json.loads((out / "metrics.json").read_text())
        return metrics, {language: render_acceptance(metrics, environment, language) for language in PAGES}

    return judged


def test_every_line_has_its_answer(judged):
    _, pages = judged(environment={"npu-smi": "| 0     910B3   | OK |", "variables": {"MCE_DEVICE": "npu"}})
    page = rows(pages["en"], "## The task")
    assert list(page) == LINES
    measured = {name: cells[1:] for name, cells in page.items()}
    assert measured["parallel layout"] == ["8 ranks, TP2 PP2 EP2", "as asked"]
    assert measured["device"] == ["Ascend 910B3", "as asked"]
    assert (
        "vocabulary 129280" in measured["data"][0]
        and "enwiki_text_document, tokenizer" in measured["data"][0]
    )
    assert measured["length"] == ["native to step 20 of 20, te to step 20 of 20", "differs from the task"]
    assert measured["loss MAPE"] == ["0.1 %", "met"]
    assert re.fullmatch(r"0\.1\d* % at step \d+", measured["loss, worst step"][0])
    assert re.fullmatch(r"mean 1\.\d+ %, worst 1\.\d+ % at step \d+", measured["gradient norm deviation"][0])
    assert re.search(r"native 1[78]\d\.\d ms, 1,\d+ tokens/s; te \d+\.\d+ ms, 2,\d+ tokens/s",
                     measured["step time (median) and throughput"][0])  # fmt: skip
    assert measured["peak memory (last stage)"][0] == "native 2,300 MB, te 2,300 MB; te / native 1"
    assert measured["te really ran"] == [
        "te 40 calls on each of ranks 4, 5, 6, 7; native 0; PyTorch reference",
        "met",
    ]
    assert "This run is not the task's own: length (below)" in pages["en"]


def test_both_languages_tell_the_same_numbers(judged):
    _, pages = judged(floor=True)
    english, chinese = (rows(pages[k], h) for k, h in (("en", "## The task"), ("zh-CN", "## 任务逐项回答")))
    assert len(english) == len(chinese) == len(LINES) + 1
    for one, other in zip(english.values(), chinese.values(), strict=True):
        assert sorted(re.findall(r"\d[\d.,]*\d|\d", one[1])) == sorted(
            re.findall(r"\d[\d.,]*\d|\d", other[1])
        )
    assert "loss 0.05 %" in english["noise floor (native against native, one ulp)"][1]
    assert "**PASS**" in pages["en"] and "**通过**" in pages["zh-CN"]


def test_a_failed_line_says_so_in_both(judged):
    _, pages = judged(te={"factor": 1.05}, status=1)
    assert "**FAIL**" in pages["en"] and rows(pages["en"], "## The task")["loss MAPE"][1:] == [
        "5 %",
        "**not met**",
    ]
    assert "**不通过**" in pages["zh-CN"] and "未满足：loss MAPE" in pages["zh-CN"]


def test_native_calls_in_the_te_run_fail_the_line(judged, maker, monkeypatch):
    monkeypatch.setattr(maker, "exit_lines", lambda run: [
        f"[rank {r}] cross entropy: te {40 * (run.impl == 'te')} calls, native 3 calls, implementation cuda"
        for r in range(4, 8)
    ])  # fmt: skip
    _, pages = judged(status=1)
    cells = rows(pages["en"], "## The task")["te really ran"]
    assert "native 12" in cells[1] and "Triton kernels for CUDA" in cells[1] and cells[2] == "**not met**"


@pytest.mark.parametrize("argument", ["world_size", "pipeline_model_parallel_size", "data_path"])
def test_what_was_another_run_is_said(judged, argument):
    _, pages = judged(arguments={argument: "1"}, status=1 if argument != "data_path" else 0)
    line = "data" if argument == "data_path" else "parallel layout"
    assert rows(pages["en"], "## The task")[line][2] == "differs from the task"
    assert f"not the task's own: {line}" in pages["en"].replace("device, ", "")


def test_what_the_files_do_not_show_is_not_called_different(judged):
    metrics, _ = judged()
    metrics["te"]["arguments"] = {}
    page = render_acceptance(metrics, None, "en")
    lines = rows(page, "## The task")
    assert [lines[name][2] for name in ("parallel layout", "device", "data")] == ["not shown"] * 3
    assert "The files do not show: parallel layout, device, data." in page
    assert "## Configuration" not in page and "No env.json beside these logs." in page


def test_limits_of_the_gates_that_are_not_the_tasks_are_shown(judged):
    metrics, pages = judged()
    assert rows(pages["en"], "## The task")["loss MAPE"][0] == "≤ 2 %"
    metrics["limits"]["loss_mape_percent"] = 5.0
    assert "(this run's gate: ≤ 5 %)" in render_acceptance(metrics, None, "en")


def test_nothing_of_a_log_breaks_the_page(judged):
    attack = "<script>x</script> | `a` | [b](c)\n# d"
    metrics, _ = judged()
    metrics["te"]["arguments"]["tokenizer_model"] = metrics["te"]["arguments"]["data_path"] = attack
    metrics["comparison"]["notes"] = [attack]
    metrics["te"]["cross entropy calls"][5]["implementation"] = attack
    for language in PAGES:
        page = render_acceptance(metrics, {attack: attack, "a tool": "````\n<b>| x"}, language)
        parts = page.split("\n````\n")  # a fence shows what is in it as it is
        assert page.splitlines().count("````") == 4 and len(parts) == 5 and "<b>| x" in parts[3], (
            "no fence was closed by what it holds"
        )
        told = "".join(parts[::2])
        assert "<script" not in told and "\n# d" not in told
        assert len(rows(page, "## ")) == len(LINES), "no row was split or lost"


@pytest.mark.parametrize(
    ("environment", "device"),
    [
        (None, None),
        ({"cpu": "X", "cpus usable": 2, "variables": {"MCE_DEVICE": "cpu"}, "nvidia-smi": "i,n\n0, H200, 5"},
         "CPU (X, 2 cores)"),
        ({"nvidia-smi": "index, name, d\n0, NVIDIA H200, 5\n1, NVIDIA H200, 5"}, "2 x NVIDIA H200"),
        ({"npu-smi": "+---+\n| 0     910B3               | OK            | 93.6 |"}, "Ascend 910B3"),
        ({"nvidia-smi": None, "npu-smi": None, "variables": {}}, None),
    ],
)  # fmt: skip
def test_device(environment, device):
    assert device_of(environment) == device


def test_tensorboard_files_hold_the_curves(pair, tmp_path, capsys):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "out"
    arguments = ["compare", *map(str, pair), "--out", str(out)]
    assert cli.main([*arguments, "--tensorboard"]) == 0
    folder = out / "tensorboard_curves"
    events = accumulator.EventAccumulator(str(folder / "te")).Reload()
    metrics = json.loads((out / "metrics.json").read_text())
    assert [e.value for e in events.Scalars("lm loss")] == pytest.approx(metrics["te"]["lm loss"], rel=1e-6)
    assert [e.step for e in events.Scalars("grad-norm")] == metrics["te"]["iteration"]
    files = list(folder.rglob("*tfevents*"))
    first = {f: f.read_bytes() for f in files}
    assert cli.main([*arguments, "--tensorboard"]) == 0 and {f: f.read_bytes() for f in files} == first
    assert cli.main(arguments) == 0 and not list(folder.rglob("*tfevents*")), (
        "none of an earlier comparison stays"
    )
    capsys.readouterr()


def test_tensorboard_that_cannot_be_written_is_refused(pair, tmp_path, capsys, monkeypatch):
    assert cli.main(["compare", *map(str, pair), "--tensorboard"]) == 2
    assert "name a folder with --out" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    out = tmp_path / "out"
    assert cli.main(["compare", *map(str, pair), "--tensorboard", "--out", str(out)]) == 2
    assert "needs the package tensorboard" in capsys.readouterr().err
    assert not (out / "metrics.json").exists()
