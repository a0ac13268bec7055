"""`megatron-ce pretrain` with a stand-in training under the real torchrun, two processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ce_adaptor.longrun import launch, preflight, processes
from megatron_ce_adaptor.longrun.config import load_config

REPOSITORY = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("stand_in_training.py")
DRIVER = (
    "import argparse, sys; from megatron_ce_adaptor.longrun import launch; p = argparse.ArgumentParser(); "
    "launch.add_arguments(p); sys.exit(launch.run(p.parse_args()))"
)
CONFIG = """\
ENV_VARS:
  STAND_IN: ${STAND_IN:-train}
  SPACED: "a 'quoted' $word"
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --micro-batch-size: 2
  --global-batch-size: 4
  --seq-length: 64
  --train-iters: ${TRAIN_ITERS:-8}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "stand_in.yaml"
    path.write_text(CONFIG)
    return path


def environment(**variables: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "NNODES", "NODE_RANK", "DRY_RUN"))
    }
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def arguments(config: Path, out: Path, *more: str, impl: str = "native") -> list[str]:
    words = [
        "--config",
        str(config),
        "--impl",
        impl,
        "--nproc",
        "2",
        "--out",
        str(out),
        "--entry",
        str(STAND_IN),
    ]
    return [sys.executable, "-c", DRIVER, *words, *more]


def run_launch(config: Path, out: Path, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = arguments(config, out, *more)
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=120)


def status_of(out: Path, name: str = "native") -> dict[str, object]:
    return json.loads((out / f"{name}.status.json").read_text())


def processes_of(out: Path) -> list[int]:
    """The processes with an OUT_DIR at or below `out` in their environment, whoever their parent is now."""
    mark = f"OUT_DIR={out}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any(v == mark or v.startswith(mark + b"/") for v in variables):
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if processes.is_running(pid)]


def assert_nothing_left(out: Path) -> None:
    deadline = time.monotonic() + 2
    while processes_of(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(out) == []


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == launch.REFUSED
    sentence = result.stderr.strip()
    assert len(sentence.splitlines()) == 1 and "Traceback" not in sentence
    for word in words:
        assert word in sentence


def assert_failed(out: Path, code: int, *words: str) -> None:
    status = status_of(out)
    assert (status["complete"], status["exit_code"]) == (False, code)
    for word in words:
        assert word in str(status["message"])
    assert not (out / "native.log").exists()
    assert not (out / "native.log.partial").exists()
    assert (out / "native.failed.log").stat().st_size > 0
    assert_nothing_left(out)


@pytest.fixture(autouse=True)
def no_process_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    """What a failed test leaves running would disturb the others."""
    yield
    for pid in processes_of(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- runs that end well ----------------------------------------------------------------------------------


def test_complete_run_leaves_log_status_commands_and_environment(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_launch(config, out, "--steps", "5")
    assert result.returncode == launch.COMPLETE, result.stderr
    log = (out / "native.log").read_text()
    assert "iteration        5/       5" in log
    assert log in result.stdout.replace("\r\n", "\n") or log == result.stdout
    assert status_of(out) == {
        "implementation": "native",
        "exit_code": 0,
        "steps": 5,
        "complete": True,
        "world_size": 2,
        "last_stage_ranks": [0, 1],
        "micro_batches_per_step": 2,
        "sequence_length": 64,
        "global_batch_size": 4,
        "message": "All 5 steps are done.",
    }
    assert json.loads((out / "env.json").read_text())
    assert sorted(p.name for p in out.iterdir()) == ["cmd.sh", "env.json", "native.log", "native.status.json"]
    assert_nothing_left(out)


def test_commands_file_runs_both_implementations_again(config: Path, tmp_path: Path) -> None:
    """Started from the repository with `--out` below it, cmd.sh holds no absolute path and trains again."""
    work = tmp_path / "checkout"
    out = work / "runs" / "a"
    out.mkdir(parents=True)
    (work / "stand_in_training.py").write_text(STAND_IN.read_text())
    (work / "c.yaml").write_text(CONFIG)
    base = [sys.executable, "-c", DRIVER, "--config", "c.yaml", "--nproc", "2", "--out", "runs/a"]
    for impl in ("native", "te"):
        command = [*base, "--impl", impl, "--entry", "./stand_in_training.py"]
        done = subprocess.run(
            command, cwd=work, env=environment(TRAIN_ITERS="3"), capture_output=True, timeout=120
        )
        assert done.returncode == 0
    text = (out / "cmd.sh").read_text()
    assert str(tmp_path) not in text and sys.prefix not in text
    shown = subprocess.run(
        ["bash", str(out / "cmd.sh"), "native", "te"],
        cwd=tmp_path,  # from anywhere
        env=environment(PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("iteration        3/       3") == 2


def test_dry_run_prints_a_script_that_trains_and_nothing_else(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for more, variables in ((["--dry-run"], {}), ([], {"DRY_RUN": "1"})):
        shown = run_launch(config, out, *more, **variables)
        assert shown.returncode == 0 and shown.stderr == ""
        lines = shown.stdout.splitlines()
        assert all(line.startswith("export ") for line in lines[:-1])
        assert "-m torch.distributed.run --nproc-per-node 2 " in lines[-1]
        assert not out.exists()
    assert "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native" in lines[-1]
    shell = subprocess.run(
        ["bash", "-c", shown.stdout + "\n"], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert shell.returncode == 0, shell.stderr
    assert "iteration        8/       8" in shell.stdout


def test_later_run_puts_the_earlier_log_aside(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "native.log").write_text("an earlier run")
    (out / "metrics.json").write_text("{}")
    assert run_launch(config, out, STAND_IN="fail").returncode == launch.FAILED
    assert (out / "native.previous.log").read_text() == "an earlier run"
    assert not (out / "metrics.json").exists(), "a verdict on the earlier log stayed"
    assert_failed(out, launch.FAILED, "rank 1", "7")


def test_a_device_that_is_not_there_is_refused(config: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run_launch(config, tmp_path / "out", "--device", "cuda")
    assert result.returncode == launch.REFUSED
    assert "torch finds no cuda device here" in result.stderr
    assert not (tmp_path / "out").exists(), "nothing was started"


# --- runs that fail --------------------------------------------------------------------------------------


def test_exit_before_the_last_step_is_not_complete(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_launch(config, out, STAND_IN="short").returncode == launch.FAILED
    assert_failed(out, launch.FAILED, "8 steps", "step 4")


def test_exit_interval_is_not_complete_either(config: Path, tmp_path: Path) -> None:
    """Megatron says that it was told to stop early; compare would refuse such a run."""
    out = tmp_path / "out"
    assert run_launch(config, out, STAND_IN="exit_interval").returncode == launch.FAILED
    assert_failed(out, launch.FAILED, "8 steps", "step 4")


@pytest.mark.slow
def test_killed_rank_ends_the_launch_within_a_minute(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Ranks that ignore SIGTERM, so that torchrun needs its whole grace period of 30 s.
    launcher, ranks = start(config, out, "stubborn")
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    assert launcher.wait(timeout=90) == launch.FAILED
    assert time.monotonic() - began < 60
    assert_failed(out, launch.FAILED, "rank 1", "SIGKILL")


def test_rank_that_leaves_while_others_wait_ends_the_launch(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "RANK_LOSS_SECONDS", 2.0)
    monkeypatch.setenv("STAND_IN", "leave")
    out = tmp_path / "out"
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    began = time.monotonic()
    assert launch.run(parser.parse_args(arguments(config, out)[3:])) == launch.FAILED
    assert time.monotonic() - began < 40
    assert_failed(out, launch.FAILED, "Rank 1 ended", "2 s")
    assert "megatron-ce pretrain: Rank 1 ended" in capfd.readouterr().err


def start(config: Path, out: Path, behaviour: str) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """Start a launch and wait until both ranks have spoken; returns it and their process ids by rank."""
    launcher = subprocess.Popen(
        arguments(config, out),
        env=environment(STAND_IN=behaviour),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout is not None
    ranks: dict[int, int] = {}
    helpers = 0
    trained = False
    for line in launcher.stdout:
        if match := re.search(r"stand-in rank (\d+) pid (\d+)", line):
            ranks[int(match[1])] = int(match[2])
        helpers += "helper pid" in line
        trained = trained or "iteration        1/" in line
        if len(ranks) == 2 and trained and (behaviour != "stubborn" or helpers == 2):
            break
    assert len(processes_of(out)) >= 3
    # Nobody reads on; the launcher must not mind.
    launcher.stdout.close()
    return launcher, ranks


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_launcher_leaves_no_process(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    launcher, _ = start(config, out, "hang")
    launcher.send_signal(number)
    assert launcher.wait(timeout=30) == 128 + number
    assert_failed(out, 128 + number, number.name)


def test_second_signal_kills_ranks_that_ignore_the_first(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launcher, _ = start(config, out, "stubborn")
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=10) == 128 + signal.SIGTERM
    assert_failed(out, 128 + signal.SIGTERM, "SIGTERM")


def test_killed_launcher_takes_its_ranks_along_and_leaves_nothing_finished(
    config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    launcher, _ = start(config, out, "hang")
    launcher.kill()
    launcher.wait(timeout=10)
    deadline = time.monotonic() + 20
    while processes_of(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(out) == []
    assert status_of(out)["complete"] is False
    assert not (out / "native.log").exists()


def test_a_launch_waits_for_the_ranks_of_a_killed_one(config: Path, tmp_path: Path) -> None:
    """They would write checkpoints, which the new one clears away or loads."""
    out = tmp_path / "out"
    launcher, _ = start(config, out, "stubborn")  # torchrun needs 30 s to end them
    launcher.kill()
    launcher.wait(timeout=10)
    assert_refused(run_launch(config, out, "--save-every", "2", "--resume"), "what is left of one")


# --- resumed runs ----------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_from_its_checkpoint_in_its_log(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    again = ("--save-every", "2", "--resume")
    assert run_launch(config, out, "--save-every", "2", STAND_IN="short").returncode == launch.FAILED
    log = out / "native.failed.log"
    text = log.read_text()
    log.rename(out / "elsewhere")
    assert_refused(run_launch(config, out, *again), "checkpoint of step 4", "no native.log")
    (out / "elsewhere").rename(log)
    done = run_launch(config, out, *again)
    assert done.returncode == launch.COMPLETE, done.stderr
    assert "Continuing from the checkpoint of step 4." in done.stderr
    joined = (out / "native.log").read_text()
    assert joined.startswith(text) and "iteration        4/" not in joined[len(text) :]
    assert "iteration        8/" in joined
    (out / "native.log").rename(out / "native.log.gz")  # as it is handed in
    done = run_launch(config, out, *again)
    assert (done.returncode, "is complete" in done.stdout) == (launch.COMPLETE, True)


def test_a_noise_floor_from_the_environment_is_refused(config: Path, tmp_path: Path) -> None:
    result = run_launch(config, tmp_path / "out", MCE_NOISE_FLOOR="1")
    assert_refused(result, "MCE_NOISE_FLOOR", "--noise-floor")


@pytest.mark.parametrize("save", ["${OUT_DIR}", "${OUT_DIR}/../mine"])
def test_checkpoints_beside_the_output_are_the_users(tmp_path: Path, save: str) -> None:
    out = tmp_path / "out"
    config = data_config(tmp_path, f"  --save: {save}\n  --save-interval: 2\n")
    folder = Path(save.replace("${OUT_DIR}", str(out)))
    (folder.resolve() / "iter_0000005").mkdir(parents=True)
    assert_refused(run_launch(config, out), "step 5", "another folder")
    assert (folder / "iter_0000005").is_dir()


# --- output folders --------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    size = preflight.LEAST_FREE_BYTES + 2**20
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_folder_that_becomes_full_stops_the_run(config: Path, small_disk: Path) -> None:
    result = run_launch(config, small_disk, STAND_IN="fill")
    assert result.returncode == launch.FAILED
    assert "is full" in result.stderr or "No space left" in result.stderr
    status = status_of(small_disk)
    assert status["complete"] is False and status["exit_code"] == launch.FAILED
    assert not (small_disk / "native.log").exists()
    assert_nothing_left(small_disk)


def test_disk_filled_to_the_last_byte_still_gets_a_record(
    config: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LEAST_FREE_WHILE_RUNNING", 0)
    monkeypatch.setenv("STAND_IN", "fill")
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    assert launch.run(parser.parse_args(arguments(config, small_disk)[3:])) == launch.FAILED
    assert_failed(small_disk, launch.FAILED, "No space left on device")


def test_log_that_cannot_grow_stops_the_run(config: Path, tmp_path: Path) -> None:
    """The limit on a file's size stands in for a disk that another user fills."""
    out = tmp_path / "out"
    result = subprocess.run(
        arguments(config, out),
        env=environment(STAND_IN="fill"),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)),
    )
    assert result.returncode == launch.FAILED
    assert_failed(out, launch.FAILED, "cannot be written", "File too large")


def test_folder_without_room_is_refused(config: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(2 * 2**20))
    assert_refused(run_launch(config, small_disk), "MiB left", "at least 64 MiB")
    assert [p.name for p in small_disk.iterdir()] == ["ballast"]


def test_folder_below_a_file_is_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(run_launch(config, tmp_path / "file" / "out"), "cannot be written", "Not a directory")


def test_read_only_folder_is_refused(config: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_refused(run_launch(config, small_disk), "cannot be written", "Read-only file system")


def test_two_launches_do_not_share_a_log(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launcher, _ = start(config, out, "hang")
    try:
        assert_refused(run_launch(config, out), "Another launch")
        assert launcher.poll() is None
    finally:
        launcher.terminate()
        launcher.wait(timeout=30)


# --- refusals before the start ---------------------------------------------------------------------------


def test_wrong_number_of_processes_shows_the_arithmetic(config: Path, tmp_path: Path) -> None:
    result = run_launch(config, tmp_path / "out", "--nproc", "3")
    assert_refused(result, "3 processes", "TP 2 x PP 1 x CP 1 = 2", "2 or 4")
    assert not (tmp_path / "out").exists()


def test_busy_port_is_refused(config: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert_refused(
            run_launch(config, tmp_path / "out", MASTER_PORT=port), f"Port {port} is in use", "MASTER_PORT"
        )


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NNODES": "two"}, ["NNODES", "'two'"]),
        ({"NNODES": "2", "NODE_RANK": "2"}, ["NODE_RANK is 2", "0 to 1"]),
        ({"NNODES": "2", "MASTER_PORT": "6000"}, ["MASTER_ADDR is not set"]),
        ({"NNODES": "2"}, ["MASTER_ADDR and MASTER_PORT is not set"]),
        ({"MASTER_PORT": "99999"}, ["99999", "65535"]),
    ],
)
def test_machines_that_do_not_fit_are_refused(variables: dict[str, str], words: list[str]) -> None:
    with pytest.raises(preflight.Refused) as refused:
        preflight.machines_from(variables)
    for word in words:
        assert word in str(refused.value)


def test_several_machines_are_handed_to_torchrun(config: Path) -> None:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    args = parser.parse_args(["--config", str(config), "--impl", "te", "--nproc", "2"])
    machines = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "6000"}
    plan = launch.make_plan(args, machines)
    assert plan.layout.world_size == 4 and plan.layout.micro_batches_per_step == 1
    line = " ".join(plan.command)
    assert "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 6000" in line


def test_cpu_ranks_are_forked_from_one_process(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    words = ["--config", str(config), "--impl", "te", "--nproc", "2"]
    cpu = launch.make_plan(parser.parse_args([*words, "--device", "cpu"]), {"MCE_DEVICE": "cuda"})
    assert cpu.command[1:3] == ["-m", launch.FORKED_TORCHRUN] and cpu.added_environment["MCE_DEVICE"] == "cpu"
    cuda = launch.make_plan(parser.parse_args(words), {"MCE_DEVICE": "cuda"})
    assert cuda.command[1:3] == ["-m", launch.TORCHRUN] and cuda.added_environment["MCE_DEVICE"] == "cuda"


def test_rank_of_a_forked_process_is_its_name() -> None:
    name = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'mce-rank-3'); print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", name], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert processes.rank_of(child.pid) == 3
        assert processes.rank_of(os.getpid()) is None
    finally:
        child.kill()
        child.wait()


def data_config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data.yaml"
    path.write_text(CONFIG + text)
    return path


@pytest.mark.parametrize("content", [None, b"this is no index of Megatron's, whatever its name says" * 4])
def test_missing_and_foreign_token_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    prefix = tmp_path / "wiki_text_document"
    if content is not None:
        for suffix in (".bin", ".idx"):
            Path(f"{prefix}{suffix}").write_bytes(content)
    result = run_launch(data_config(tmp_path, f"  --data-path: {prefix}\n"), tmp_path / "out")
    assert_refused(result, str(prefix), "prepare-data")
    assert not (tmp_path / "out").exists()


def test_every_part_of_a_blend_is_checked(tmp_path: Path) -> None:
    config = load_config(data_config(tmp_path, "  --data-path: [0.3, first, 0.7, second]\n"))
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "check_indexed_dataset", lambda prefix, *more, **named: seen.append(prefix))
        preflight.check_data(config, {})
    assert seen == ["first", "second"]


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        text = f"  --tokenizer-type: HuggingFaceTokenizer\n  --tokenizer-model: {tmp_path / folder}\n"
        assert_refused(run_launch(data_config(tmp_path, text), tmp_path / "out"), folder, "tokenizer.json")


def test_unset_variable_of_the_configuration_is_named(tmp_path: Path) -> None:
    config = data_config(tmp_path, "  --data-path: ${MCE_TEST_NOWHERE}\n")
    assert_refused(run_launch(config, tmp_path / "out"), "MCE_TEST_NOWHERE", "not set")
