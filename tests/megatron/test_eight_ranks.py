"""The real thing, small: eight gloo ranks, TP2 PP2 EP2, sequence parallel, a mixture of experts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import EIGHT_RANK_MOE, ENTRY, FORKED, ROOT, TINY_GPT, Run, environment, run_python

pytestmark = pytest.mark.slow

STEPS = 5
MICRO_BATCHES = 2  # global batch 4, two data-parallel ranks, one sample a micro-batch
LAST_STAGE = (4, 5, 6, 7)


def train(implementation: str, **extra_environment: str) -> Run:
    run = run_python(
        *("-m", FORKED, "--standalone", "--nproc-per-node", "8", "-m", ENTRY),
        *(*TINY_GPT, *EIGHT_RANK_MOE, "--mock-data", "--train-iters", str(STEPS)),
        *("--cross-entropy-fusion-impl", implementation),
        **extra_environment,
    )
    assert run.status == 0, run.log[-4000:]
    assert len(run.losses) == STEPS
    return run


@pytest.fixture(scope="module")
def te() -> Run:
    return train("te", MCE_IMPLEMENTATION="reference")


def test_native_and_te_agree_and_every_last_stage_rank_called_te(te: Run) -> None:
    native = train("native")
    calls = STEPS * MICRO_BATCHES
    assert native.calls == dict.fromkeys(LAST_STAGE, (0, calls, "none"))
    assert te.calls == dict.fromkeys(LAST_STAGE, (calls, 0, "reference"))
    assert len(set(native.losses)) == STEPS
    assert te.losses[0] == pytest.approx(native.losses[0], rel=1e-6)
    assert te.losses == pytest.approx(native.losses, rel=1e-4)
    assert te.grad_norms == pytest.approx(native.grad_norms, rel=5e-3)


def test_the_triton_kernels_in_the_interpreter_equal_the_reference(te: Run) -> None:
    triton = train("te", MCE_IMPLEMENTATION="triton", TRITON_INTERPRET="1")
    assert triton.calls == dict.fromkeys(LAST_STAGE, (STEPS * MICRO_BATCHES, 0, "cuda (interpreter)"))
    assert triton.losses == pytest.approx(te.losses, rel=1e-5)


def _ranks_of(launcher: int) -> dict[str, int]:
    """Name -> process id of the launcher's children."""
    ranks = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher:
                ranks[(folder / "comm").read_text().strip()] = int(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return ranks


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_killed_process_ends_the_run(tmp_path: Path, victim: str) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", FORKED, "--standalone", "--nproc-per-node", "2", "-m", ENTRY, *TINY_GPT]
    command += ["--tensor-model-parallel-size", "2", "--global-batch-size", "1", "--mock-data"]
    command += ["--train-iters", "100000", "--cross-entropy-fusion-impl", "te"]
    with log.open("w") as stream:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 200
        while "iteration        3/" not in log.read_text():
            assert launcher.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        ranks = _ranks_of(launcher.pid)
        assert set(ranks) >= {"mce-rank-0", "mce-rank-1"}
        if victim == "rank":
            os.kill(ranks["mce-rank-1"], signal.SIGKILL)
        else:
            launcher.terminate()
        assert launcher.wait(60) != 0
        for process in ranks.values():
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)
    finally:
        if launcher.poll() is None:
            for process in _ranks_of(launcher.pid).values():
                os.kill(process, signal.SIGKILL)
            launcher.kill()
            launcher.wait()
