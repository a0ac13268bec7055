"""The command `megatron-ce npu-check`: runs the workers, prints the table, judges it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_ce_adaptor.npu_check import shipped
from megatron_ce_adaptor.npu_check.compiler import TARGET
from megatron_ce_adaptor.npu_check.worker import NO_TOOLCHAIN

ALL_WELL, REJECTED, WRONG_USAGE, SLOW_FORM = 0, 1, 2, 4

_TYPE = re.compile(r"\*?(i1|i8|i16|i32|i64|u8|u16|u32|u64|fp16|bf16|fp32|fp64)(:16)?")

_DESCRIPTION = f"""\
Compile Triton kernels for the Ascend 910B3 on an x86 machine without an NPU, and print what comes
out: whether they fit into the 192 KiB of a vector core's local memory (UB), whether loads are double
buffered, how many operations became loops over single elements, how many waits the program has, and an
estimate of what a row costs (about cycles, from assumed weights: for comparisons). It stops before the
binary, which only CANN can make.

Without --kernel it compiles every kernel and tile of this package for bf16 and fp32, and the widest tiles for
fp16; with --every, all combinations of dtypes, tiles and options. It needs a Python 3.9 to
3.11 with triton-ascend 3.2 and ascendnpu-ir (bash st_scripts/setup_npu_gate.sh makes one), but not torch.

Exit status: {ALL_WELL} all well; {REJECTED} a kernel does not fit or is rejected; {WRONG_USAGE} wrong usage;
{NO_TOOLCHAIN} no toolchain; {SLOW_FORM} all compile, but one loops over single elements or has lost double
buffering."""

_EPILOG = """\
examples:
  megatron-ce npu-check --python .venvs/npu_gate/bin/python
  megatron-ce npu-check --kernel my_kernels.py:softmax 'X=*bf16' 'Y=*bf16' n_rows=i32 n_cols=i32 BLOCK=4096
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument(
        "--python", metavar="PATH", default=sys.executable, help="the Python with the toolchain"
    )
    parser.add_argument(
        "--compiler", metavar="FOLDER", action="append",
        help="a folder with another ascendnpu-ir, instead of that Python's; may be given several times",
    )  # fmt: skip
    parser.add_argument("--every", action="store_true", help="every combination of constants (some minutes)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--jobs", type=int, default=0, help="processes at once (default: one a core)")
    parser.add_argument("--kernel", metavar="FILE:NAME", help="a @triton.jit kernel of yours")
    parser.add_argument(
        "arguments", metavar="NAME=VALUE", nargs="*",
        help="with --kernel, for each parameter its type (*bf16, *i64, i32, fp32; ':16' after it for a "
        "multiple of 16), or its value (1024, 0.1, True, None) if it is a tl.constexpr",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Compiles, prints, and returns the exit status."""
    try:
        cases = _cases(args)
        _check_python(args.python)
        if args.jobs < 0:
            raise ValueError(f"--jobs is {args.jobs}, expected a number of processes, or 0 for one a core.")
    except ValueError as error:
        print(f"megatron-ce npu-check: {error}", file=sys.stderr)
        return WRONG_USAGE
    answers: list[dict[str, Any]] = []
    compilers: Sequence[str | None] = [str(Path(c).resolve()) for c in args.compiler or []] or [None]
    try:
        for answer in _compile(cases, compilers, args.python, args.jobs):
            answers.append(answer)
    except _NoToolchainError as error:
        print(f"megatron-ce npu-check: {error}", file=sys.stderr)
        return NO_TOOLCHAIN
    if args.json:
        print(json.dumps(answers, indent=1))
    else:
        print("\n".join(_table(answers)))
    return verdict(answers)


def verdict(answers: Sequence[dict[str, Any]]) -> int:
    """The exit status for what the compilers said."""
    if any(answer["status"] != "OK" for answer in answers):
        return REJECTED
    return SLOW_FORM if any(_is_slow(answer) for answer in answers) else ALL_WELL


def _is_slow(answer: dict[str, Any]) -> bool:
    gave_up = "enable-auto-multi-buffer" in answer["given_up"]
    return answer["scalar_loops"] > 0 or gave_up or answer["double_buffered"] is False


class _NoToolchainError(Exception):
    """What the worker says is missing."""


def _check_python(python: str) -> None:
    if shutil.which(python) is None:
        raise ValueError(f"--python {python} is no program; name a Python 3.9 to 3.11 with triton-ascend.")


def _cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.kernel is None:
        if args.arguments:
            raise ValueError(f"{args.arguments[0]!r} belongs to a kernel: give --kernel FILE:NAME too.")
        return [case.as_json() for case in shipped.cases(args.every)]
    file, _, name = args.kernel.rpartition(":")
    if not file or not name.isidentifier():
        raise ValueError(f"--kernel is {args.kernel!r}, expected FILE:NAME, such as kernels.py:softmax.")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ValueError(f"--kernel names {file}, which is no Python file (.py) here.")
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for argument in args.arguments:
        parameter, equals, value = argument.partition("=")
        if not equals or not parameter.isidentifier():
            raise ValueError(f"{argument!r} is not of the form NAME=VALUE.")
        if _TYPE.fullmatch(value):
            types[parameter] = value
        else:
            constants[parameter] = _constant(argument, value)
    tile = next((v for k, v in constants.items() if "BLOCK" in k.upper() and isinstance(v, int)), 0)
    pointer = next((t for t in types.values() if t.startswith("*")), "")
    case = shipped.Case(
        name, str(Path(file).resolve()), name, pointer.removeprefix("*").split(":")[0], tile, types, constants
    )
    return [case.as_json()]


def _constant(argument: str, value: str) -> int | float | bool | None:
    words = {"True": True, "False": False, "None": None}
    if value in words:
        return words[value]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise ValueError(
        f"{argument!r} gives neither a type (*bf16, i32, fp32 ...) nor a value (1024, 0.1, True, None)."
    )


def _compile(
    cases: list[dict[str, Any]], compilers: Sequence[str | None], python: str, jobs: int
) -> Iterator[dict[str, Any]]:
    """The answers to all cases, in their order, by `jobs` workers."""
    workers = min(jobs or os.cpu_count() or 1, len(cases))
    shares = [cases[k::workers] for k in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda share: _work(share, compilers, python), shares))
    per_case = len(compilers)
    for position in range(len(cases)):
        share, place = position % workers, position // workers
        yield from results[share][place * per_case : (place + 1) * per_case]


def _work(cases: list[dict[str, Any]], compilers: Sequence[str | None], python: str) -> list[dict[str, Any]]:
    job = json.dumps({"target": TARGET, "compilers": compilers, "cases": cases})
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
    # That Python need not have this package's requirements; the hook for Megatron is of no use there.
    environment = {**os.environ, "PYTHONPATH": path, "MCE_AUTO_PATCH": "0", "TRITON_INTERPRET": "0"}
    worker = subprocess.run(
        [python, "-m", "megatron_ce_adaptor.npu_check.worker"],
        input=job,
        capture_output=True,
        text=True,
        env=environment,
    )
    if worker.returncode == NO_TOOLCHAIN:
        raise _NoToolchainError(worker.stderr.strip().splitlines()[-1])
    answers = [json.loads(line) for line in worker.stdout.splitlines()]
    if worker.returncode or len(answers) != len(cases) * len(compilers):
        last = "\n".join(worker.stderr.strip().splitlines()[-20:])
        raise _NoToolchainError(
            f"the compiling process of {python} failed (exit status {worker.returncode}):\n{last}"
        )
    return answers


_COLUMNS = (
    "case",
    "compiler",
    "verdict",
    "UB bytes",
    "double buffered",
    "scalar loops",
    "waits",
    "cost per row",
)


def _table(answers: Sequence[dict[str, Any]]) -> list[str]:
    rows = [_COLUMNS, *(_row(answer) for answer in answers)]
    widths = [max(len(row[c]) for row in rows) for c in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    for answer in answers:
        if answer["status"] != "OK":
            lines.append(
                f"! {answer['case']} ({answer['compiler']}): {answer['status']}: {answer['message']}"
            )
    bad = sum(answer["status"] != "OK" for answer in answers)
    slow = sum(answer["status"] == "OK" and _is_slow(answer) for answer in answers)
    lines.append(
        f"{len(answers)} compilations for {TARGET}: {len(answers) - bad - slow} well, {slow} slow, "
        f"{bad} rejected."
    )
    return lines


def _row(answer: dict[str, Any]) -> tuple[str, ...]:
    if answer["status"] != "OK":
        return (answer["case"], answer["compiler"], answer["status"], *("-",) * 5)
    return (
        answer["case"],
        answer["compiler"],
        "slow" if _is_slow(answer) else "OK",
        str(answer["ub_bytes"]),
        {True: "yes", False: "no", None: "no loop"}[answer["double_buffered"]],
        str(answer["scalar_loops"]),
        str(answer["waits"]),
        f"{answer['cost']:g}",
    )
