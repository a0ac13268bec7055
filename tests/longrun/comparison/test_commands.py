"""`megatron-ce compare` and `megatron-ce report` as a user calls them."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import statistics
import sys

import pytest

from megatron_ce_adaptor import cli
from megatron_ce_adaptor.longrun import report
from megatron_ce_adaptor.longrun.comparison import compare
from megatron_ce_adaptor.longrun.formatting import number
from megatron_ce_adaptor.longrun.gates import Gates
from megatron_ce_adaptor.longrun.metrics import run_from_metrics
from megatron_ce_adaptor.longrun.report_charts import running_median

RESULTS = ("metrics.json", "report.html", "report.png", "acceptance.md", "acceptance.zh-CN.md")


def call(capsys, *arguments):
    status = cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def refused(capsys, *arguments):
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("megatron-ce ") and len(err.strip().splitlines()) == 1, "one sentence"
    return err


def test_two_logs_print_a_table_and_write_nothing(pair, capsys, monkeypatch):
    monkeypatch.chdir(pair[0].parent)
    before = sorted(p.name for p in pair[0].parent.iterdir())
    status, out, _ = call(capsys, "compare", *pair)
    assert status == 0 and out.splitlines()[-1].startswith("PASS: over 20 steps")
    assert re.search(r"loss MAPE +0\.1 % +<= 2 % +pass", out) and "tokens/s" in out
    assert sorted(p.name for p in pair[0].parent.iterdir()) == before


def test_failed_gate_is_exit_status_1(maker, tmp_path, capsys):
    native, te = maker().write(tmp_path), maker("te", factor=1.03).write(tmp_path)
    status, out, _ = call(capsys, "compare", native, te, "--out", tmp_path / "out")
    assert (
        status == 1 and "failed: loss MAPE" in out and out.splitlines()[-1].startswith(str(tmp_path / "out"))
    )
    assert "FAIL: loss MAPE not met" in out
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["verdict"]["passed"] is False


def test_json_output(pair, capsys):
    status, out, _ = call(capsys, "compare", *pair, "--json")
    content = json.loads(out, parse_constant=pytest.fail)
    assert status == 0 and content["verdict"]["passed"] is True
    assert {g["name"] for g in content["gates"]} >= {"loss MAPE", "te called", "step time, te / native"}


def test_run_folder(run_dir, capsys):
    status, out, _ = call(capsys, "compare", run_dir)
    assert status == 0 and all((run_dir / name).stat().st_size > 1000 for name in RESULTS)
    assert not [p.name for p in run_dir.iterdir() if p.name.startswith(".")], "no temporary file stays"
    metrics = json.loads((run_dir / "metrics.json").read_text())
    (native, nf), (te, tf) = (run_from_metrics(metrics[r]) for r in ("native", "te"))
    again = compare(native, te, Gates(**metrics["limits"]), native_facts=nf, te_facts=tf)
    assert again.sentence == metrics["verdict"]["sentence"]
    assert out.count("PASS") == 1


def test_run_folder_with_packed_logs(run_dir, capsys):
    for name in ("native.log", "te.log"):
        (run_dir / f"{name}.gz").write_bytes(gzip.compress((run_dir / name).read_bytes()))
        (run_dir / name).unlink()
    assert call(capsys, "compare", run_dir)[0] == 0


def test_status_file_says_which_ranks_must_call_te(run_dir, status, capsys):
    status(run_dir, "te", last_stage_ranks=[3, 4, 5, 6, 7])
    code, out, _ = call(capsys, "compare", run_dir)
    assert code == 1 and "too few at rank 3" in out


@pytest.mark.parametrize("run", ["native", "te"])
def test_incomplete_run(run_dir, status, run, capsys):
    status(run_dir, run, complete=False, exit_code=137, steps=12, message="rank 5 was killed by signal 9")
    error = refused(capsys, "compare", run_dir)
    assert f"The {run} run" in error and "rank 5 was killed by signal 9" in error and "137" in error
    (run_dir / f"{run}.status.json").unlink()
    assert f"The {run} run" in refused(capsys, "compare", run_dir)
    assert not [n for n in RESULTS if (run_dir / n).exists()]


def test_status_that_contradicts_its_log(run_dir, status, capsys):
    status(run_dir, "te", steps=40)
    assert "te.log ends at step 20, but its status file says 40" in refused(capsys, "compare", run_dir)


@pytest.mark.parametrize("content", ["", "[]", '{"complete": 1}', "{"])
def test_broken_status_file(run_dir, content, capsys):
    (run_dir / "te.status.json").write_text(content)
    assert "te.status.json" in refused(capsys, "compare", run_dir)


def test_logs_without_status_files_are_enough(run_dir, capsys):
    for path in run_dir.glob("*.status.json"):
        path.unlink()
    assert call(capsys, "compare", run_dir)[0] == 0


@pytest.mark.parametrize(
    ("content", "sentence"), [("", "empty"), ("foreign\n", "not a Megatron"), (None, "does not exist")]
)
def test_unusable_logs(pair, content, sentence, capsys):
    pair[1].unlink()
    if content is not None:
        pair[1].write_text(content)
    out = pair[0].parent / "out"
    assert sentence in refused(capsys, "compare", *pair, "--out", out)
    assert not out.exists()


def test_truncated_log_in_a_folder_leaves_no_report(run_dir, capsys):
    text = (run_dir / "te.log").read_text()
    (run_dir / "te.log").write_text(text[: len(text) // 2])
    assert "te.log is truncated" in refused(capsys, "compare", run_dir)
    assert not [n for n in RESULTS if (run_dir / n).exists()]


def test_wrong_usage(run_dir, pair, tmp_path, capsys):
    assert "two logs" in refused(capsys, "compare", pair[0])
    assert "does not exist" in refused(capsys, "compare", tmp_path / "none")
    assert "3 paths" in refused(capsys, "compare", *pair, pair[0])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no native.log" in refused(capsys, "compare", empty)
    assert "cannot be read" in refused(capsys, "compare", run_dir, "--gates", tmp_path / "none.yaml")
    assert "swapped" in refused(capsys, "compare", *reversed(pair))


def test_force(maker, tmp_path, capsys):
    native, te = maker().write(tmp_path), maker("te", arguments={"seed": "7"}).write(tmp_path)
    assert "seed (absent in native, '7' in te)" in refused(capsys, "compare", native, te)
    status, out, _ = call(capsys, "compare", native, te, "--force")
    assert status == 0 and re.search(r"same configuration +1 differences", out)


def test_gates_file_stays_with_the_folder(run_dir, tmp_path, capsys):
    gates = tmp_path / "strict.yaml"
    gates.write_text("loss_mape_percent: 0.05\n")
    assert call(capsys, "compare", run_dir, "--gates", gates)[0] == 1
    status, out, _ = call(capsys, "compare", run_dir)
    assert status == 1, "the same verdict without naming the file again"
    assert "note: limits from run/gates.yaml" in out
    assert "limits from run/gates.yaml" in (run_dir / "report.html").read_text()


def test_source_of_the_limits_is_shown(run_dir, pair, tmp_path, capsys):
    assert "limits from" not in call(capsys, "compare", run_dir)[1], "the defaults need no note"
    gates = tmp_path / "loose.yaml"
    gates.write_text("loss_mape_percent: 50\n")
    assert "note: limits from loose.yaml" in call(capsys, "compare", *pair, "--gates", gates)[1]
    (run_dir / "gates.yaml").write_text("loss_mape_percent: 50\n")
    content = json.loads(call(capsys, "compare", run_dir, "--json")[1])
    assert any("limits from run/gates.yaml" in note for note in content["comparison"]["notes"])
    assert str(tmp_path) not in (run_dir / "report.html").read_text()


def test_native_from_another_run(run_dir, maker, tmp_path, capsys):
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    maker("te", factor=1.002).write(fresh)
    status, out, _ = call(capsys, "compare", fresh, "--native-from", run_dir)
    assert status == 0 and re.search(r"loss MAPE +0\.2 %", out)


def test_noise_floor_of_the_folder(run_dir, maker, capsys):
    maker(factor=1.0005).write(run_dir, "noise_floor.log")
    assert re.search(r"loss MAPE over noise floor +2 x", call(capsys, "compare", run_dir)[1])
    assert "noise floor: native against native" in (run_dir / "report.html").read_text()


def test_full_disk_leaves_nothing_that_looks_finished(run_dir, monkeypatch, capsys):
    call(capsys, "compare", run_dir)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert "No space left on device" in refused(capsys, "compare", run_dir)
    assert not (run_dir / "metrics.json").exists()
    assert not [p.name for p in run_dir.iterdir() if p.name.startswith(".")]


def test_report_command(run_dir, capsys):
    assert "compare" in refused(capsys, "report", run_dir)
    call(capsys, "compare", run_dir)
    made = (run_dir / "report.html").read_text()
    (run_dir / "report.html").unlink()
    status, out, _ = call(capsys, "report", run_dir)
    written = ("report.html", "acceptance.md", "acceptance.zh-CN.md", "report.png")
    assert status == 0 and out.split() == [str(run_dir / name) for name in written]
    assert (run_dir / "report.html").read_text() == made
    metrics = json.loads((run_dir / "metrics.json").read_text())
    for broken in ("", "{}", json.dumps({**metrics, "te": {}}), json.dumps({"schema": 1})):
        (run_dir / "metrics.json").write_text(broken)
        assert "metrics.json" in refused(capsys, "report", run_dir)


def test_report_without_matplotlib_says_so(run_dir, monkeypatch, capsys):
    call(capsys, "compare", run_dir)
    monkeypatch.delitem(sys.modules, "megatron_ce_adaptor.longrun.report_png", raising=False)
    monkeypatch.delattr("megatron_ce_adaptor.longrun.report_png", raising=False)
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without("matplotlib"), *sys.meta_path])
    status, out, err = call(capsys, "report", run_dir)
    assert status == 0 and "report.png is not written: matplotlib is not installed" in err
    assert out.split()[0] == str(run_dir / "report.html") and not (run_dir / "report.png").exists()


class _Without:
    def __init__(self, name):
        self.name = name

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)


def test_report_shows_the_numbers(run_dir, capsys):
    call(capsys, "compare", run_dir)
    page = (run_dir / "report.html").read_text()
    body = page[page.index("<body>") :]
    assert (
        body.index("PASS")
        < body.index("Gates")
        < body.index("Relative error of the loss")
        < body.index("Environment")
    )
    for text in (
        "0.1 %",
        "limit of the mean: 2 %",
        "te called",
        "40 calls",
        "≥ 40 calls",
        "2,300",
        "3.12.1",
        "2.11.0",
    ):
        assert text in body, text
    assert page.count("<svg") == 6 and "<script" not in page
    assert not re.search(r"https?:|url\(|@import|<link|<img|src=", page), "nothing is fetched"
    assert (
        re.search(r"prefers-color-scheme: dark", page)
        and "@media print" in page
        and 'name="viewport"' in page
    )


def test_report_curves_are_the_data(run_dir, capsys):
    """The first chart has a path for each run, of as many points as steps, falling as the loss falls."""
    call(capsys, "compare", run_dir)
    page = (run_dir / "report.html").read_text()
    paths = re.findall(r'<path class="line ([\w ]+)" d="M([^"]+)"', page)
    assert [style for style, _ in paths[:2]] == ["native wide", "te"]
    heights = [float(point.split()[1]) for point in paths[0][1].split("L")]
    assert len(heights) == 20 and heights[-1] > heights[0] + 50


def test_report_escapes_what_logs_say(run_dir, capsys):
    attack = "<script>alert(1)</script>"
    for name in ("native.log", "te.log"):
        text = (run_dir / name).read_text()
        text = text.replace("['/somewhere/data/enwiki_text_document']", f"['{attack}' $x$]")
        (run_dir / name).write_text(text)
    (run_dir / "env.json").write_text(
        json.dumps({attack: attack, "packages": {attack: attack + "\n" + attack}})
    )
    call(capsys, "compare", run_dir)
    page = (run_dir / "report.html").read_text()
    assert "<script" not in page.lower() and page.count("&lt;script&gt;") >= 5


def test_report_escapes_every_string_of_a_foreign_metrics_file(run_dir, capsys):
    call(capsys, "compare", run_dir)
    attack = "<script>alert(1)</script>"

    def poison(value):
        if isinstance(value, dict):
            return {key: poison(v) for key, v in value.items()}
        if isinstance(value, list):
            return [poison(v) for v in value]
        return attack + value if isinstance(value, str) else value

    metrics = poison(json.loads((run_dir / "metrics.json").read_text()))
    metrics["comparison"]["different arguments"] = [{"name": attack, "native": attack, "te": None}]
    page = report.render_html(metrics, None)
    assert "<script" not in page.lower() and page.count("&lt;script&gt;") > 50


def test_report_of_a_failed_and_gappy_run(real_png, maker, tmp_path, capsys):
    """NaN, missing times, no memory: the page and the picture are made all the same, and say FAIL."""
    native, te = maker(memory=()), maker("te", memory=(), factor=1.0)
    te_text = te.text().replace(te.step_line(9), te.step_line(9, nan=True))
    te_text = re.sub(
        r"elapsed time per iteration \(ms\): [\d.]+", "elapsed time per iteration (ms): nan", te_text
    )
    (tmp_path / "te.log").write_text(te_text)
    status, _, _ = call(
        capsys, "compare", native.write(tmp_path), tmp_path / "te.log", "--out", tmp_path / "o"
    )
    page = (tmp_path / "o" / "report.html").read_text()
    assert status == 1 and "FAIL" in page and "not measured" in page and "n/a" in page
    assert len((tmp_path / "o" / "report.png").read_bytes()) > 50_000


def test_running_median_is_the_median_of_the_window():
    chance = random.Random(0)
    for steps, window in ((0, 5), (1, 5), (7, 1), (7, 50), (200, 6), (200, 51)):
        values = [chance.choice([None, 0.0, 1.0, chance.random()]) for _ in range(steps)]
        half, expected = window // 2, []
        for index in range(steps):
            near = [v for v in values[max(0, index - half) : index + half + 1] if v is not None]
            expected.append(statistics.median(near) if near else None)
        assert running_median(values, window) == expected


def test_long_curves_stay_small_and_keep_their_spike():
    from megatron_ce_adaptor.longrun.svg_charts import thin_out

    ys = [1.0] * 50_000
    ys[31_415] = 99.0
    ys[100] = None
    kept = thin_out(list(range(50_000)), ys)
    assert len(kept) < 1000 and (31_415, 99.0) in kept and any(y is None for _, y in kept)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0.1828, "0.1828"),
        (2000, "2,000"),
        (123456.7, "123,457"),
        (6.4e-6, "0.0000064"),
        (math.nan, "n/a"),
    ],
)
def test_numbers_are_readable(value, text):
    assert number(value) == text
