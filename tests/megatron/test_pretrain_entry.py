"""The pretrain entry: a real Megatron in one process, a user's own pretrain_gpt.py, and users' mistakes."""

from __future__ import annotations

import importlib
import json
import socket
from pathlib import Path

import pytest
from training_runs import ENTRY, FORKED, TINY_GPT, Run, run_python, write_token_files

from megatron_ce_adaptor.megatron import pretrain

STEPS = 3
ONE_RANK = ("-m", FORKED, "--standalone", "--nproc-per-node", "1", "-m", ENTRY)

# --- on the wheel ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_files(tmp_path_factory.mktemp("data") / "tokens")


def train(implementation: str, token_files: Path) -> Run:
    return run_python(
        *ONE_RANK,
        *TINY_GPT,
        *("--global-batch-size", "2", "--train-iters", str(STEPS)),
        *("--data-path", str(token_files), "--split", "1,0,0", "--data-cache-path", str(token_files.parent)),
        *("--cross-entropy-fusion-impl", implementation),
    )


@pytest.mark.slow
def test_native_and_te_train_alike_on_token_files(token_files: Path) -> None:
    native, te = train("native", token_files), train("te", token_files)
    assert native.status == 0, native.log[-3000:]
    assert te.status == 0, te.log[-3000:]
    assert len(native.losses) == STEPS
    assert native.losses[0] == pytest.approx(5.95, abs=0.1)  # ln(384): 301 ids, padded to 384
    assert len(set(native.losses)) == STEPS
    assert te.losses[0] == pytest.approx(native.losses[0], rel=1e-6)
    assert te.losses == pytest.approx(native.losses, rel=1e-4)  # native rounds its gradient to bf16
    assert native.calls == {0: (0, 2 * STEPS, "none")}  # two micro-batches a step
    assert te.calls == {0: (2 * STEPS, 0, "reference")}


# --- a user's own pretrain_gpt.py ------------------------------------------------------------------------

_STAND_IN = """
import json, sys
import helper_beside_it
import megatron.core.models.common.language_module.language_module as language_module
import torch
report = {
    "argv": sys.argv,
    "name": __name__,
    "helper": helper_beside_it.VALUE,
    "cuda": torch.cuda.is_available(),
    "te": language_module.te_parallel_cross_entropy.__module__,
}
print("REPORT " + json.dumps(report))
"""


@pytest.mark.slow
def test_a_users_pretrain_gpt_runs_prepared_and_gets_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(_STAND_IN)
    (tmp_path / "helper_beside_it.py").write_text("VALUE = 17\n")
    run = run_python("-m", ENTRY, "--num-layers", "2", "--sft", MEGATRON_PATH=str(tmp_path))
    assert run.status == 0, run.log
    report = json.loads(run.log.partition("REPORT ")[2].splitlines()[0])
    assert report["argv"] == [str(tmp_path / "pretrain_gpt.py"), "--num-layers", "2", "--sft"]
    assert report["name"] == "__main__"
    assert report["helper"] == 17
    assert report["cuda"] is True
    assert report["te"].startswith("megatron_ce_adaptor.")


# --- mistakes: one sentence, exit status 2 ---------------------------------------------------------------


def refusal(log: str) -> str:
    """The one line that the entry printed."""
    (line,) = log.strip().splitlines()
    assert line.startswith("megatron_ce_adaptor: ")
    return line


def test_a_megatron_path_without_pretrain_gpt_is_refused(tmp_path: Path) -> None:
    run = run_python("-m", ENTRY, MEGATRON_PATH=str(tmp_path / "nowhere"))
    assert run.status == 2
    assert "nowhere" in refusal(run.log)
    assert "no pretrain_gpt.py" in refusal(run.log)


def test_one_rank_speaks_for_all(tmp_path: Path) -> None:
    run = run_python("-m", ENTRY, MEGATRON_PATH=str(tmp_path), RANK="3")
    assert (run.status, run.log) == (2, "")


def test_forked_ranks_refuse_another_entry_and_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # importing the launcher would set it for the tests after this
    forked_torchrun = importlib.import_module(FORKED)
    with pytest.raises(pretrain.UsageError, match=f"run {ENTRY} only"):
        forked_torchrun.launch(["--standalone", "-m", "json.tool"])
    monkeypatch.setattr(pretrain, "choose_device", lambda requested: "cuda")
    with pytest.raises(pretrain.UsageError, match="cannot use cuda"):
        forked_torchrun.launch(["--standalone", "-m", ENTRY])


@pytest.mark.slow
def test_a_busy_port_is_refused() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        run = run_python("-m", FORKED, "--master-port", port, "--nproc-per-node", "1", "-m", ENTRY)
    assert run.status == 2
    last = run.log.strip().splitlines()[-1]
    assert last.startswith("megatron_ce_adaptor: the rendezvous at ")
    assert port in last


@pytest.mark.parametrize("world_size", [1, 4, 6, 12])
def test_a_number_of_processes_that_cannot_be_split_is_refused(world_size: int) -> None:
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=2"]
    sizes += ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
    with pytest.raises(pretrain.UsageError, match=f"^{world_size} processes cannot be split into groups of"):
        pretrain.check_process_count(sizes, world_size)


@pytest.mark.parametrize("world_size", [8, 16])
def test_a_number_of_processes_that_can_be_split_is_accepted(world_size: int) -> None:
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=2"]
    sizes += ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
    pretrain.check_process_count(sizes, world_size)


def test_experts_split_over_the_tensor_ranks_unless_told_otherwise() -> None:
    sizes = ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    with pytest.raises(pretrain.UsageError, match=r"groups of 4 \(expert tensor 2 x expert 2"):
        pretrain.check_process_count(sizes, 2)


@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5"])
def test_a_parallel_size_that_is_no_size_is_refused(value: str) -> None:
    with pytest.raises(pretrain.UsageError, match=f"'{value}': expected a whole number"):
        pretrain.check_process_count(["--tensor-model-parallel-size", value], 8)


def test_te_that_megatron_would_ignore_is_refused() -> None:
    te = ["--cross-entropy-fusion-impl", "te"]
    with pytest.raises(pretrain.UsageError, match="no effect without --cross-entropy-loss-fusion"):
        pretrain.check_arguments(te, None)
    pretrain.check_arguments([*te, "--cross-entropy-loss-fusion"], None)


def test_what_only_pretrain_gpt_can_do_is_refused_without_it() -> None:
    with pytest.raises(pretrain.UsageError, match=r"--fim-data needs .* set MEGATRON_PATH"):
        pretrain.check_arguments(["--fim-data"], None)
    pretrain.check_arguments(["--fim-data"], "somewhere")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(pretrain.UsageError, match="'tpu': expected one of cpu, cuda, npu"):
        pretrain.choose_device("tpu")


def test_the_device_is_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pretrain.choose_device(None) == "cpu"
    assert pretrain.choose_device("") == "cpu"
    with pytest.raises(pretrain.UsageError, match="finds no CUDA device"):
        pretrain.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pretrain.choose_device(None) == "cuda"
    assert pretrain.choose_device("cpu") == "cpu"
