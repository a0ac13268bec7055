"""The pretrain entry: a real Megatron in one process, a user's own pretrain_gpt.py, and what users get wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import ENTRY, FORKED, TINY_GPT, Run, run_python, write_token_files

from megatron_ce_adaptor.megatron import pretrain

STEPS = 3
IN_ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}


@pytest.fixture(scope="module")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_files(tmp_path_factory.mktemp("data") / "tokens")


def train(implementation: str, token_files: Path, *extra: str) -> Run:
    return run_python(
        *("-m", FORKED, "--standalone", "--nproc-per-node", "1", "-m", ENTRY),
        *(*TINY_GPT, "--global-batch-size", "2", "--train-iters", str(STEPS)),
        *("--data-path", str(token_files), "--split", "1,0,0", "--data-cache-path", str(token_files.parent)),
        *("--cross-entropy-fusion-impl", implementation, *extra),
    )


@pytest.mark.slow
def test_native_and_te_train_alike_on_token_files(token_files: Path) -> None:
    native, te = train("native", token_files), train("te", token_files)
    assert native.status == 0, native.log[-3000:]
    assert te.status == 0, te.log[-3000:]
    assert len(native.losses) == STEPS
    assert te.losses == pytest.approx(native.losses, rel=2e-6)
    assert native.losses[0] == pytest.approx(5.95, abs=0.1)  # ln(384): 300 ids padded to 384
    assert native.losses != sorted(set(native.losses))[:1] * STEPS  # it trains
    assert native.calls == {0: (0, 2 * STEPS, "none")}  # two micro-batches a step
    assert te.calls == {0: (2 * STEPS, 0, "reference")}
