"""The benchmark of the loss without logits: what it measures on a CPU, its table and its verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_loss_without_logits as bench
import pytest


def test_ours_is_measured_and_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "loss.json"
    assert bench.main(["--cpu", "--smoke", "--only", "te", "--seconds", "0", "--out", str(out)]) == 0
    part = json.loads(out.read_text())
    fewest, more = part["cases"]
    assert (fewest["tokens"], more["tokens"], fewest["columns"]) == (24, 48, 96)
    assert len(fewest["results"]) == 5
    whole = fewest["results"].pop("te")
    for name, entry in fewest["results"].items():
        assert entry["loss"] == pytest.approx(whole["loss"], rel=1e-6), name
        assert max(entry["hidden_difference"], entry["weight_difference"]) < 1e-5, name
        assert entry["rounds"] >= 3
        assert 0 < entry["peak_bytes"] < whole["peak_bytes"], name
    printed = capsys.readouterr().out
    assert "| te, chunks of 7, gradients in backward | " in printed
    assert bench.main(["--render", str(out)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"part": "cuda"}'])
def test_no_result_to_render(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as left:
        bench.main(["--render", str(path)])
    assert left.value.code == 2
    assert f"--render is {path}, " in capsys.readouterr().err


def test_columns_that_a_run_did_not_come_to() -> None:
    cut_off = part(te={"ms": 100.0, "peak_bytes": 35e9})
    cut_off["settings"]["columns"] = [62_080, 248_320]
    assert "248320 columns were not measured" in bench.markdown(cut_off)


def part(**results: Any) -> dict[str, Any]:
    case = {"tokens": 262_144, "columns": 62_080, "results": results}
    return {
        "environment": {"gpu": "a GPU", "torch": "2", "date": "today"},
        "settings": {"hidden": 4096, "dtype": "bf16", "columns": [62_080]},
        "missing": {"Liger fused linear": "not there"},
        "cases": [case],
    }


def test_table_and_verdicts() -> None:
    entries = {
        "native": {"out_of_memory": True},
        "te": {"ms": 100.0, "peak_bytes": 35e9},
        "te, chunks of 4096, gradients in forward": {"ms": 108.0, "peak_bytes": 3.2e9},
        "te, chunks of 4096, gradients in backward": {"ms": 140.0, "peak_bytes": 2.7e9},
    }
    text = bench.markdown(part(**entries))
    assert "| native | out of memory |" in text
    assert "| te, chunks of 4096, gradients in forward | 108.0 (1.08), 3.20 |" in text
    assert "Liger fused linear was not measured: not there" in text
    assert bench.goals(part(**entries)) == [
        "- loss memory at 262144 x 62080: 2.70 GB (te, chunks of 4096, gradients in backward), goal 3 GB",
        "- 262144 x 62080: 1.08 x te (te, chunks of 4096, gradients in forward), goal 1.1",
    ]
    entries["te"] = {"out_of_memory": True}
    assert "| te, chunks of 4096, gradients in forward | 108.0, 3.20 |" in bench.markdown(part(**entries))


@pytest.mark.parametrize(
    "words", [["--tokens", "0"], ["--tokens", "few"], ["--hidden", "-1"], ["--chunk", "4"]]
)
def test_bad_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench.parse(["--cpu", *words])
    assert left.value.code == 2
    assert words[0] in capsys.readouterr().err
