"""The console script: quick to start, quiet when interrupted, clear when something is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import types

import pytest

from megatron_ce_adaptor import cli


def test_importing_it_loads_no_framework():
    code = (
        "import sys; sys.modules['torch'] = None; import megatron_ce_adaptor.cli as c; "
        "import megatron_ce_adaptor.longrun.compare_command, megatron_ce_adaptor.longrun.report_command, "
        "megatron_ce_adaptor.longrun.environment; "
        "frameworks = {'megatron', 'numpy', 'matplotlib', 'yaml', 'triton'}; "
        "bad = frameworks & {m.split('.')[0] for m in sys.modules}; "
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_and_version(capsys):
    for arguments in (["--help"], ["--version"], ["compare", "--help"], ["report", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS) and "exit status: 0" in out and "examples:" in out


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["--nonsense"], ["compare"], ["compare", "a", "b", "--nonsense"]]
)
def test_wrong_usage_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2 and "usage: megatron-ce" in capsys.readouterr().err


def test_no_command_prints_help_and_is_2(capsys):
    assert cli.main([]) == 2 and "commands:" in capsys.readouterr().out


@pytest.fixture
def fake(monkeypatch):
    """Put a module with this `run` in place of the report command's."""

    def fake(run):
        module = types.ModuleType("fake")
        module.add_arguments = lambda parser: None
        module.run = run
        monkeypatch.setitem(sys.modules, "megatron_ce_adaptor.longrun.report_command", module)

    return fake


def test_interrupt_is_130(fake, capsys):
    def run(args):
        raise KeyboardInterrupt

    fake(run)
    assert cli.main(["report"]) == 130
    assert capsys.readouterr().err == "megatron-ce: interrupted\n"


def test_status_of_the_command_is_passed_on(fake):
    fake(lambda args: 7)
    assert cli.main(["report"]) == 7


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("gensim", r"needs the package gensim; pip install 'megatron-ce-adaptor\[longrun\]'"),
        ("megatron_ce_adaptor.doctor", "lacks"),
    ],
)
def test_missing_package(monkeypatch, capsys, missing, sentence):
    def lacking(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(cli.importlib, "import_module", lacking)
    assert cli.main(["doctor"]) == 2
    error = capsys.readouterr().err
    assert re.search(sentence, error) and error.count("\n") == 1


def test_reader_gone_is_quiet(run_dir):
    """As in `megatron-ce compare DIR --json | head -1`."""
    command = [sys.executable, "-m", "megatron_ce_adaptor.cli", "compare", str(run_dir), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait() == 141 and error == b""
