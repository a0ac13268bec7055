"""`megatron-ce npu-check` without a toolchain or with bad arguments: one sentence and a status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_ce_adaptor import cli

CONTROLS = str(Path(__file__).with_name("controls.py"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["npu-check", *arguments])
    captured = capsys.readouterr()
    assert not captured.out
    return status, captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernel", "nowhere.py:kernel"], "nowhere.py"),
        (["--kernel", CONTROLS], "FILE:NAME"),
        (["--kernel", f"{CONTROLS}:no name"], "FILE:NAME"),
        (["--kernel", f"{CONTROLS}:exponentials", "X"], "NAME=VALUE"),
        (["--kernel", f"{CONTROLS}:exponentials", "X=*bf17"], "*bf17"),
        (["X=*bf16"], "--kernel"),
        (["--python", "/no/such/python"], "/no/such/python"),
        (["--python", str(Path(CONTROLS).parent)], "is no program"),
        (["--jobs", "-1", "--python", sys.executable], "--jobs is -1"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    status, sentence = run(capsys, *arguments)
    assert status == 2
    assert said in sentence
    assert len(sentence.splitlines()) == 1


def test_a_python_without_the_toolchain(capsys: pytest.CaptureFixture[str]) -> None:
    """The one that runs the tests has the other Triton."""
    status, sentence = run(capsys, "--python", sys.executable)
    assert status == 3
    assert "pip install triton-ascend" in sentence
    assert len(sentence.splitlines()) == 1


def test_a_folder_without_a_compiler(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, sentence = run(capsys, "--compiler", str(tmp_path))
    assert status == 3
    assert str(tmp_path) in sentence
