"""The example and the benchmark of the chunked loss, as they are started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tp_cp_loss_parallel.py"
BENCHMARK = ROOT / "benchmarks" / "bench_chunked.py"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MCE_", "TRITON_"))}
    environment = kept | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_example_trains_and_agrees_with_the_dense_model():
    done = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(EXAMPLE), "--steps", "8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, 9))
    for _, dense, inside, chunked in rows:
        assert abs(float(dense) - float(inside)) < 1e-4 and abs(float(dense) - float(chunked)) < 1e-4
    assert float(rows[-1][1]) < 0.7 * float(rows[0][1])
    assert "equal: largest relative difference" in done.stdout and "the loss fell" in done.stdout


def test_example_says_how_many_processes_it_needs():
    done = run(str(EXAMPLE))
    assert done.returncode == 2
    assert "--cp 2 --tp 2 needs 4 processes, and there are 1: start it with torchrun" in done.stderr


def test_benchmark_measures_and_writes(tmp_path):
    out = tmp_path / "chunked.json"
    done = run(
        str(BENCHMARK), "--cpu", "--smoke", "--threads", "1", "--chunks", "3", "--seconds", "0",
        "--only", "ours, not cut,ours, 3,torch eager", "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    part = json.loads(out.read_text())
    results = part["results"]
    assert part["part"] == "chunked" and part["settings"]["vocab"] == 96
    measured = {name for name, entry in results.items() if "ms" in entry}
    assert {"three matrix products", "ours, not cut", "ours, 3 chunks", "torch eager"} <= measured
    logits = 24 * 96 * 4
    # the logits and their gradient; a third of the logits, beside the weight's gradient
    assert results["ours, not cut"]["peak_bytes"] >= 2 * logits
    assert logits / 3 + 96 * 16 * 4 <= results["ours, 3 chunks"]["peak_bytes"] < 2 * logits
    for name in measured - {"three matrix products"}:
        assert results[name]["hidden_error"] < 1e-6 and results[name]["weight_error"] < 1e-6
        assert results[name]["times_floor"] > 0
    assert "| ours, 3 chunks | " in done.stdout
    assert "torch eager, fp32 upcast: not for torch.float32" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cpu", "--chunks", "0"], "--chunks is '0', expected at least 1"),
        (["--cpu", "--chunks", "two"], "--chunks is 'two', expected numbers"),
        (["--cpu", "--tokens", "-4"], "--tokens is -4, expected at least 1"),
        ([], "there is no CUDA device here: use --cpu"),
    ],
)
def test_benchmark_refuses_bad_arguments(arguments, words, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    import bench_chunked
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        bench_chunked.parse(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
