"""st_scripts/a2_8p_longrun.sh: the dry run, one sentence for whatever is missing, a run on CPU cores."""

from __future__ import annotations

import json
import os
import shlex
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ce_adaptor.longrun import environment, hand_in

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "st_scripts/a2_8p_longrun.sh"
OURS = (
    "MCE_",
    "TE_PARALLEL",
    "ASCEND_",
    "HCCL_",
    "MASTER_",
    "MEGATRON_",
    "DRY_RUN",
    "NNODES",
    "NODE_RANK",
    "NPUS_",
)
READ = (
    "DEVICE",
    "CONFIG",
    "TP",
    "PP",
    "EP",
    "CP",
    "MBS",
    "GBS",
    "CKPT_DIR",
    "WORLD_SIZE",
    "RANK",
    "TRAIN_ITERS",
)
DATA = ("DATA_PATH", "TOKENIZER_MODEL", "TOKENIZER_TYPE", "VOCAB_FILE", "MERGE_FILE", "TRANSFORMER_IMPL")


def variables(**more: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OURS) and name not in (*READ, *DATA, "PYTHONPATH")
    }
    return {**kept, "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}


def run_script(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *words],
        cwd=REPOSITORY,
        env=variables(**more),
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Status 2 and one sentence; what the script says on standard output does not count."""
    assert done.returncode == 2, done.stdout + done.stderr
    sentences = [line for line in done.stderr.splitlines() if not line.startswith("==>")]
    assert len(sentences) == 1 and sentences[0].endswith("."), done.stderr
    for word in words:
        assert word in sentences[0]


# --- the dry run -----------------------------------------------------------------------------------------


def dry_run(**more: str) -> list[list[str]]:
    """The words of both torchrun lines; the whole output must be a script that a shell can read."""
    done = run_script(DRY_RUN="1", **more)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    assert done.stdout.count("source st_scripts/env_npu.sh") == 2
    lines = [shlex.split(line) for line in done.stdout.splitlines() if "torch.distributed.run" in line]
    assert len(lines) == 2
    for name in (
        "MCE_DEVICE=npu",
        "HCCL_CONNECT_TIMEOUT=",
        "ASCEND_GLOBAL_LOG_LEVEL=3",
        "PYTORCH_NPU_ALLOC_CONF=",
    ):
        assert done.stdout.count(f"export {name}") == 2
    assert not (REPOSITORY / "runs" / "dry").exists()
    return lines


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_dry_run_prints_both_runs() -> None:
    native, te = dry_run(DATA_PATH="/data/enwiki_text_document", TOKENIZER_MODEL="/data/tokenizer")
    assert value(native, "--cross-entropy-fusion-impl") == "native"
    assert value(te, "--cross-entropy-fusion-impl") == "te"
    port = native.index("--master-port") + 1
    differ = [a for i, (a, b) in enumerate(zip(native, te, strict=True)) if a != b and i != port]
    assert differ == ["native"]
    expected = {
        "--nproc-per-node": "8",
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "2",
        "--expert-model-parallel-size": "2",
        "--train-iters": "2000",
        "--micro-batch-size": "2",
        "--global-batch-size": "16",
        "--data-path": "/data/enwiki_text_document",
        "--tokenizer-model": "/data/tokenizer",
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--seq-length": "1024",
        "--distributed-backend": "nccl",
    }
    assert {flag: value(te, flag) for flag in expected} == expected
    assert "--cross-entropy-loss-fusion" in te and "--sequence-parallel" in te and "--save" not in te


def test_dry_run_takes_the_names_that_ascend_users_know(tmp_path: Path) -> None:
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        (tmp_path / name).write_text("{}")
    native, te = dry_run(
        DATA_PATH="/data/x",
        VOCAB_FILE=str(tmp_path / "gpt2-vocab.json"),
        MERGE_FILE=str(tmp_path / "gpt2-merges.txt"),
        CKPT_DIR="/data/ckpt",
        SAVE_INTERVAL="500",
        MBS="1",
        GBS="32",
        TRAIN_ITERS="300",
        TP="4",
        PP="1",
        EP="1",
        NNODES="2",
        NODE_RANK="1",
        MASTER_ADDR="10.0.0.1",
        MASTER_PORT="6000",
        HCCL_CONNECT_TIMEOUT="3600",
        TRANSFORMER_IMPL="transformer_engine",
    )
    expected = {
        "--nnodes": "2",
        "--node-rank": "1",
        "--master-addr": "10.0.0.1",
        "--master-port": "6000",
        "--tensor-model-parallel-size": "4",
        "--micro-batch-size": "1",
        "--global-batch-size": "32",
        "--train-iters": "300",
        "--save": "/data/ckpt/te",
        "--save-interval": "500",
        "--transformer-impl": "transformer_engine",
        "--tokenizer-model": "runs/a2_8p/tokenizer",
    }
    assert {flag: value(te, flag) for flag in expected} == expected
    assert value(native, "--save") == "/data/ckpt/native", "two runs must not share their checkpoints"
    assert "--vocab-file" not in te


# --- what is missing -------------------------------------------------------------------------------------

NPU_SMI_CHIP = """\
| {i}     910B3               | OK            | 94.3        53                0    / 0             |
| 0                         | 0000:{i:02X}:00.0  | 0           0    / 0          4487 / 65536         |
"""


class Stack:
    """An Ascend stack of fakes that nothing is wrong with, until a test takes something away."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.site, self.cann = folder / "bin", folder / "site", folder / "cann"
        for made in (self.bin, self.site, self.cann):
            made.mkdir()
        self.npu_smi(8)
        self.package("torch", "2.9.0")
        self.package("torch_npu", "2.9.0.post2")
        self.package("triton-ascend", "3.2.1")
        for name in ("torch_npu", "triton/backends/ascend", "triton"):
            (self.site / name).mkdir(parents=True, exist_ok=True)
            (self.site / name / "__init__.py").write_text("")

    def npu_smi(self, chips: int, status: int = 0) -> None:
        table = "".join(NPU_SMI_CHIP.format(i=i) for i in range(chips))
        tool = self.bin / "npu-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{table}END\nexit {status}\n")
        tool.chmod(0o755)

    def package(self, name: str, version: str | None) -> None:
        for old in self.site.glob(f"{name.replace('-', '_')}-*.dist-info/METADATA"):
            old.unlink()
            old.parent.rmdir()
        if version is not None:
            folder = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def problem(self, processes: int = 8, python: tuple[int, int] = (3, 12), **more: str) -> str | None:
        """What npu_stack.problem says in an interpreter that sees only these packages."""
        program = (
            f"import sys; sys.path[:0] = [{str(self.site)!r}, {str(REPOSITORY)!r}]\n"
            f"sys.version_info = ({python[0]}, {python[1]}, 0)\n"
            "import json\nfrom megatron_ce_adaptor.longrun import npu_stack\n"
            f"print(json.dumps(npu_stack.problem({processes}, {dict(more)!r})))"
        )
        done = subprocess.run(
            # -S: this environment's own packages are not seen
            [sys.executable, "-S", "-c", program],
            env={"PATH": f"{self.bin}:/bin:/usr/bin", "MCE_AUTO_PATCH": "0"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        sentence = json.loads(done.stdout)
        assert sentence is None or (sentence.endswith(".") and "\n" not in sentence)
        return sentence


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path)


def test_a_whole_stack_has_no_problem(stack: Stack) -> None:
    assert stack.problem(ASCEND_HOME_PATH=str(stack.cann)) is None
    assert stack.problem(ASCEND_TOOLKIT_HOME=str(stack.cann)) is None


def test_cann_that_is_not_active(stack: Stack) -> None:
    assert "ASCEND_HOME_PATH is not set" in (stack.problem() or "")
    sentence = stack.problem(ASCEND_HOME_PATH="/nowhere/cann") or ""
    assert "ASCEND_HOME_PATH is /nowhere/cann" in sentence and "set_env.sh" in sentence


@pytest.mark.parametrize(
    ("chips", "status", "processes", "visible", "words"),
    [
        (None, 0, 8, "", ["npu-smi is not on PATH"]),
        (8, 1, 8, "", ["`npu-smi info` ended with 1", "driver"]),
        (0, 0, 8, "", ["shows no NPU"]),
        (4, 0, 8, "", ["8 processes need 8 NPUs", "npu-smi shows 4", "NPUS_PER_NODE=4"]),
        (8, 0, 8, "0,1,4-5", ["ASCEND_RT_VISIBLE_DEVICES=0,1,4-5 leaves 4"]),
        (4, 0, 8, "0-7", ["npu-smi shows 4"]),
        (8, 0, 4, "0-3", []),
        (16, 0, 16, "", []),
    ],
)
def test_cards(
    stack: Stack, chips: int | None, status: int, processes: int, visible: str, words: list[str]
) -> None:
    if chips is None:
        (stack.bin / "npu-smi").unlink()
    else:
        stack.npu_smi(chips, status)
    named = {"ASCEND_RT_VISIBLE_DEVICES": visible} if visible else {}
    sentence = stack.problem(processes, ASCEND_HOME_PATH=str(stack.cann), **named)
    assert (sentence is None) == (not words), sentence
    for word in words:
        assert word in (sentence or "")


@pytest.mark.parametrize(
    ("python", "version", "words"),
    [
        ((3, 12), "3.2.0", ["triton-ascend 3.2.0 is for Python 3.9 to 3.11", "3.12", "3.2.1 or newer"]),
        ((3, 12), "3.2.0rc4", ["triton-ascend 3.2.0rc4 is for Python 3.9 to 3.11"]),
        ((3, 14), "3.2.1", ["triton-ascend 3.2.1 is for Python 3.9 to 3.13"]),
        ((3, 12), None, ["not installed for Python 3.12", "stops at Python 3.11"]),
        ((3, 11), None, ["not installed for Python 3.11", "pip install triton-ascend==3.2.0"]),
        ((3, 11), "3.2.0", []),
        ((3, 12), "3.2.1", []),
        ((3, 14), "3.3.0", []),  # newer than what is known: not judged
    ],
)
def test_python_and_triton_ascend(
    stack: Stack, python: tuple[int, int], version: str | None, words: list[str]
) -> None:
    stack.package("triton-ascend", version)
    sentence = stack.problem(python=python, ASCEND_HOME_PATH=str(stack.cann))
    assert (sentence is None) == (not words), sentence
    for word in words:
        assert word in (sentence or "")


def test_another_triton_over_triton_ascend(stack: Stack) -> None:
    (stack.site / "triton/backends/ascend/__init__.py").unlink()
    (stack.site / "triton/backends/ascend").rmdir()
    sentence = stack.problem(ASCEND_HOME_PATH=str(stack.cann)) or ""
    assert "no Ascend backend" in sentence and "--force-reinstall --no-deps triton-ascend==3.2.1" in sentence


@pytest.mark.parametrize(
    ("torch", "torch_npu", "words"),
    [
        ("2.9.0", None, ["torch_npu is not installed", "torch 2.9.0"]),
        ("2.9.0+cpu", "2.8.0.post4", ["torch_npu 2.8.0.post4 does not belong to torch 2.9.0+cpu", "2.9.x"]),
        ("2.10.0", "2.1.0", ["does not belong"]),  # 2.10 is not 2.1
        (None, "2.9.0", ["torch is not installed"]),
        ("2.9.1", "2.9.0.post2", []),
    ],
)
def test_torch_and_torch_npu(
    stack: Stack, torch: str | None, torch_npu: str | None, words: list[str]
) -> None:
    stack.package("torch", torch)
    stack.package("torch_npu", torch_npu)
    sentence = stack.problem(ASCEND_HOME_PATH=str(stack.cann))
    assert (sentence is None) == (not words), sentence
    for word in words:
        assert word in (sentence or "")


@pytest.mark.parametrize(
    ("minor", "python", "fits"), [(18, (3, 11), False), (18, (3, 12), True), (17, (3, 11), True)]
)
def test_megatron_and_python(stack: Stack, minor: int, python: tuple[int, int], fits: bool) -> None:
    info = stack.site / "checkout/megatron/core/package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 3\n")
    named = {"ASCEND_HOME_PATH": str(stack.cann), "MEGATRON_PATH": str(stack.site / "checkout")}
    sentence = stack.problem(python=python, **named)
    assert (sentence is None) == fits
    assert fits or "Megatron-Core 0.18.3 needs Python 3.12, this is Python 3.11" in (sentence or "")


def test_the_script_says_it_in_one_sentence(tmp_path: Path, stack: Stack) -> None:
    data = {"DATA_PATH": "/nowhere/x", "TOKENIZER_MODEL": "/nowhere"}
    out = ("--out", str(tmp_path / "out"))
    assert_refused(run_script(*out), "DATA_PATH is not set")
    assert_refused(run_script(*out, DEVICE="tpu"), "DEVICE is npu or cpu, not tpu")
    assert_refused(run_script(*out, "--steps", "3"), "unknown argument --steps")
    assert_refused(run_script(*out, **data, NPUS_PER_NODE="x"), "NPUS_PER_NODE is x: expected a whole number")
    assert_refused(run_script(*out, **data, TRAIN_ITERS="2k"), "TRAIN_ITERS is 2k: expected a whole number")
    assert_refused(run_script(*out, **data), "CANN is not active")
    path = f"{stack.bin}:{os.environ['PATH']}"
    stack.npu_smi(4)
    refused = run_script(*out, **data, ASCEND_HOME_PATH=str(stack.cann), PATH=path)
    assert_refused(refused, "8 processes need 8 NPUs, but npu-smi shows 4")
    refused = run_script(*out, **data, ASCEND_HOME_PATH=str(stack.cann), MEGATRON_PATH=str(tmp_path))
    assert_refused(refused, f"MEGATRON_PATH is {tmp_path}", "pretrain_gpt.py")
    assert not (tmp_path / "out").exists(), "a refused run leaves nothing behind"


def test_env_npu_leaves_the_callers_shell_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "set_env.sh").write_text(f'export ASCEND_HOME_PATH={tmp_path}\necho "$UNSET_IN_CANN"\n')
    shell = (
        'before=$-; source st_scripts/env_npu.sh; echo "status $?"; [ "$before" = "$-" ] && echo same; '
        'declare -F _mce_source; echo "$ASCEND_HOME_PATH $HCCL_CONNECT_TIMEOUT $MCE_DEVICE"'
    )
    for options in ("+u", "-u"):
        done = subprocess.run(
            ["bash", options, "-c", shell],
            cwd=REPOSITORY,
            env=variables(ASCEND_TOOLKIT_HOME=str(tmp_path), HCCL_CONNECT_TIMEOUT="7"),
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == ["status", "0", "same", str(tmp_path), "7", "npu"], done.stderr
    done = subprocess.run(
        ["bash", "-c", shell], cwd=REPOSITORY, env=variables(HOME="/nowhere"), capture_output=True, text=True
    )
    if not any(
        Path(root).is_dir() for root in ("/usr/local/Ascend/ascend-toolkit", "/usr/local/Ascend/cann")
    ):
        assert "status 2" in done.stdout and "no CANN was found" in done.stderr


# --- the data --------------------------------------------------------------------------------------------


def write_gpt2_files(folder: Path) -> dict[str, str]:
    """GPT-2's two files for the 256 bytes and the end of text: 257 ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(c) for c in printable] + [chr(256 + i) for i in range(len(others))]
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<|endoftext|>"])}
    (folder / "gpt2-vocab.json").write_text(json.dumps(vocabulary))
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n")
    return {"VOCAB_FILE": str(folder / "gpt2-vocab.json"), "MERGE_FILE": str(folder / "gpt2-merges.txt")}


def write_tokens(prefix: Path, largest: int) -> str:
    """A .bin and .idx in Megatron's format: 30 documents of 90 tokens, ids up to `largest`."""
    tokens = np.random.default_rng(0).integers(0, 256, 30 * 90, dtype=np.uint16)
    tokens[1234] = largest
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 30, 31)
    lengths, pointers = np.full(30, 90, np.int32), np.arange(30, dtype=np.int64) * 180
    content = header + lengths.tobytes() + pointers.tobytes() + np.arange(31, dtype=np.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(content)
    return str(prefix)


def test_data_and_tokenizer_that_do_not_fit(tmp_path: Path) -> None:
    files = write_gpt2_files(tmp_path)
    out = ("--out", str(tmp_path / "out"))
    missing = run_script(*out, DEVICE="cpu", DATA_PATH=str(tmp_path / "enwiki"), **files)
    assert_refused(missing, "enwiki.bin", "enwiki.idx not found")
    other = write_tokens(tmp_path / "other", largest=257)
    wrong = run_script(*out, DEVICE="cpu", DATA_PATH=other, **files)
    assert_refused(
        wrong, "other.bin was made with another tokenizer", "token 1234 is 257", "vocabulary of 257"
    )
    no_tokenizer = run_script(*out, DEVICE="cpu", DATA_PATH=other)
    assert_refused(no_tokenizer, "set TOKENIZER_MODEL")
    half = run_script(*out, DEVICE="cpu", DATA_PATH=other, VOCAB_FILE=files["VOCAB_FILE"])
    assert_refused(half, "MERGE_FILE is not set")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"model": {}}')
    broken = run_script(*out, DEVICE="cpu", DATA_PATH=other, TOKENIZER_MODEL=str(tmp_path / "broken"))
    assert_refused(broken, "tokenizer.json has no vocabulary")


# --- a run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_cpu_ranks_end_with_a_folder_to_hand_in(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    out = tmp_path / "out"
    done = run_script(
        "--out",
        str(out),
        DEVICE="cpu",
        NPUS_PER_NODE="2",
        TP="2",
        PP="1",
        EP="1",
        TRAIN_ITERS="2",
        CKPT_DIR="",
        DATA_PATH=write_tokens(tmp_path / "text_document", largest=256),
        **write_gpt2_files(tmp_path),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "PASS: over 2 steps" in done.stdout and f"{out} is ready to hand in" in done.stdout
    log = (out / "te.log").read_text()
    assert "[rank 1] cross entropy: te 4 calls, native 0 calls" in log
    assert "beside Megatron" in log
    facts = json.loads((out / "env.json").read_text())
    assert facts["mindspeed active"] is False and facts["beside Megatron"]["active"] == {}
    assert facts["variables"]["MCE_DEVICE"] == "cpu"
    assert facts["variables"]["HCCL_CONNECT_TIMEOUT"] == "1200", "what the ranks had, not only the launcher"
    assert "triton: " in (out / "environment.txt").read_text()
    page = (out / "README.md").read_text()
    for name in ("native.log", "te.log", "cmd.sh", "environment.txt", "PASS: over 2 steps", "loss MAPE"):
        assert name in page
    scripts = {file.name for file in (out / "scripts").iterdir()}
    assert {"a2_8p_longrun.sh", "env_npu.sh", "a2_8p.yaml"} <= scripts
    checked = subprocess.run(["sha256sum", "--check", "--quiet", "sha256sums.txt"], cwd=out)
    assert checked.returncode == 0
    assert len((out / "sha256sums.txt").read_text().splitlines()) >= 20


def test_two_machines_each_end_well(tmp_path: Path) -> None:
    """Only the machine with the last rank has iteration lines; the log of the other is whole without them."""
    config = tmp_path / "c.yaml"
    config.write_text("MODEL_ARGS:\n  --micro-batch-size: 1\n  --seq-length: 8\n  --train-iters: 3\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = ["pretrain", "--config", str(config), "--impl", "te", "--nproc", "1"]
    words += ["--entry", str(Path(__file__).with_name("stand_in_training.py"))]
    program = "import sys; from megatron_ce_adaptor.cli import main; sys.exit(main(sys.argv[1:]))"
    machines = [
        subprocess.Popen(
            [sys.executable, "-c", program, *words, "--out", str(tmp_path / f"node{rank}")],
            cwd=REPOSITORY,
            env=variables(NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank, machine in enumerate(machines):
        output, _ = machine.communicate(timeout=120)
        assert machine.returncode == 0, output
        assert ("iteration        3/" in (tmp_path / f"node{rank}/te.log").read_text()) == (rank == 1)


def test_the_script_leaves_the_verdict_to_the_last_machine(tmp_path: Path) -> None:
    named = {
        "NNODES": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "6000",
        "TOKENIZER_MODEL": "x",
        "DATA_PATH": "x",
    }
    for rank, out in (("0", "runs/a2_8p.node0"), ("1", "runs/a2_8p")):
        done = run_script(DRY_RUN="1", NODE_RANK=rank, **named)
        assert done.stdout.count(f"export OUT_DIR={out}\n") == 2, done.stderr


# --- handing in ------------------------------------------------------------------------------------------


def run_folder(folder: Path, **neighbours: dict[str, str]) -> Path:
    for name in hand_in._NEEDED:
        (folder / name).write_text("{}")
    for run, active in neighbours.items():
        told = json.dumps({"active": active, "computed by": {}})
        (folder / f"{run}.log").write_text(
            f"step 1\nmegatron_ce_adaptor: beside Megatron: {told}\nlast line\n"
        )
    return folder


def test_hand_in_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder(tmp_path)
    for name in ("te.log", "metrics.json"):
        (tmp_path / name).unlink()
    assert hand_in.main([str(tmp_path)]) == 1
    assert "te.log, metrics.json is missing" in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


def test_hand_in_refuses_runs_of_two_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MindSpeed replaces a part of native: with it in one run only, something else was compared."""
    run_folder(tmp_path, native={"mindspeed.megatron_adaptor": "0.18.0"}, te={})
    assert hand_in.main([str(tmp_path)]) == 1
    assert "native had mindspeed.megatron_adaptor 0.18.0, te had nothing" in capsys.readouterr().err
    run_folder(tmp_path, te={"mindspeed.megatron_adaptor": "0.18.0"})
    assert hand_in.main([str(tmp_path)]) == 0


def test_environment_is_readable_and_tells_of_mindspeed(tmp_path: Path) -> None:
    log = tmp_path / "te.log"
    told = '{"active": {"mindspeed.megatron_adaptor": "1"}, "computed by": {}}'
    log.write_text(f"x\nmegatron_ce_adaptor: beside Megatron: {told}\n")
    facts = environment.with_neighbours({"mindspeed active": False, "npu-smi": "a\nb", "CANN": None}, log)
    assert facts["mindspeed active"] is True
    text = hand_in.readable(facts)
    assert "CANN: not found\n" in text and "npu-smi:\n  a\n  b\n" in text
    log.write_text("megatron_ce_adaptor: beside Megatron: {torn\n")
    assert environment.with_neighbours({"mindspeed active": False}, log) == {"mindspeed active": False}
