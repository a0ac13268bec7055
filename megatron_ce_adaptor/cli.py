"""The console script `megatron-ce`. Each command loads its own module when it is used, so `--help` is
instant."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

PROGRAM = "megatron-ce"


class _Command(NamedTuple):
    module: str
    summary: str


COMMANDS = {
    "doctor": _Command("doctor", "say which implementation runs here, why, and what is patched"),
    "prepare-data": _Command("longrun.prepare_data", "turn text into Megatron's .bin/.idx and a tokenizer"),
    "pretrain": _Command("longrun.launch", "train with native and with te from one configuration"),
    "compare": _Command("longrun.compare_command", "compare two Megatron logs, or judge a run folder"),
    "npu-check": _Command(
        "npu_check.command", "compile kernels for an NPU without one and say what comes out"
    ),
    "report": _Command("longrun.report_command", "make the report of a compared run folder again"),
}

EPILOG = """\
examples:
  megatron-ce doctor
  megatron-ce compare native.log te.log --out result
  megatron-ce compare logs/2026-07-01_cpu_cpu_small
  megatron-ce COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the process's exit status.

    2: wrong usage or a missing package; 130: interrupted; 141: the reader of our output went away; the rest
    is the command's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # `megatron-ce compare ... | head` is no error; nothing may be flushed into the closed pipe at exit
        # either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13


def _run(arguments: list[str]) -> int:
    parser = _top_parser()
    if not arguments or arguments[0] not in COMMANDS:
        parser.parse_args(arguments)  # --help and --version end here, and so does an unknown command
        parser.print_help()
        return 2
    name = arguments[0]
    try:
        module = importlib.import_module(f"megatron_ce_adaptor.{COMMANDS[name].module}")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package == __package__:
            hint = f"this installation lacks {error.name}; install megatron-ce-adaptor again"
        else:
            hint = f"it needs the package {package}; pip install 'megatron-ce-adaptor[longrun]'"
        print(f"{PROGRAM} {name}: {hint}.", file=sys.stderr)
        return 2
    command = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}", description=COMMANDS[name].summary, allow_abbrev=False
    )
    module.add_arguments(command)
    return int(module.run(command.parse_args(arguments[1:])))


def _top_parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<14}{command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--help] [--version] COMMAND ...",
        description="Cross entropy over vocabularies split across tensor-parallel ranks: diagnosis, "
        "training runs that "
        "compare te with native, and their reports.",
        epilog=f"commands:\n{commands}\n\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND", nargs="?", help="see below")
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("megatron-ce-adaptor")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed; run from a checkout)"


if __name__ == "__main__":
    sys.exit(main())
