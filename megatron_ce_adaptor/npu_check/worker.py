"""Compiles cases in a process of its own, in a Python that has the toolchain: `python -m
...npu_check.worker < job`.

The job is one JSON object, `{"target": ..., "compilers": [folder or null, ...], "cases": [...]}` (see
`shipped.Case`); the answers are JSON objects, one a line, one for each case and compiler. Exit status 3:
there is no toolchain; the reason is the last line of the error stream.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_ce_adaptor.npu_check import compiler
from megatron_ce_adaptor.npu_check.cost import cost_of_row

NO_TOOLCHAIN = 3


def main() -> int:
    """Reads the job, writes the answers."""
    job = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the compilers print on the way is no answer
    try:
        folders = [compiler.find_compiler(folder) for folder in job["compilers"]]
        compiler.prepare_frontend(job["target"])
        versions = [compiler.compiler_version(folder) for folder in folders]
        for case in job["cases"]:
            for answer in _answers(case, list(zip(folders, versions, strict=True)), job["target"]):
                print(json.dumps(answer), file=answers)
    except compiler.ToolchainError as error:
        print(error, file=sys.stderr)
        return NO_TOOLCHAIN
    return 0


def _answers(case: dict[str, Any], compilers: list[tuple[Path, str]], target: str) -> list[dict[str, Any]]:
    began = time.perf_counter()
    try:
        kernel = getattr(_load(case["source"]), case["kernel"], None)
        if kernel is None:
            raise LookupError(f"there is no {case['kernel']} in it")
        lowered = compiler.lower(kernel, case["types"], case["constants"], target)
    except Exception as error:  # of the file that holds a user's kernel
        lowered = compiler.Outcome("ERROR", f"{case['source']}: {type(error).__name__}: {error}")
    answers = []
    for folder, version in compilers:
        outcome = lowered
        if isinstance(lowered, compiler.Lowered):
            outcome = compiler.plan(lowered, folder, target)
        assert isinstance(outcome, compiler.Outcome)
        answers.append(_describe(case, version, outcome, time.perf_counter() - began))
        began = time.perf_counter()
    return answers


def _describe(
    case: dict[str, Any], version: str, outcome: compiler.Outcome, seconds: float
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "case": case["name"],
        "kernel": case["kernel"],
        "dtype": case["dtype"],
        "tile": case["tile"],
        "compiler": version,
        "status": outcome.status,
        "message": outcome.message,
        "given_up": list(outcome.without),
        "seconds": round(seconds, 2),
    }
    program = outcome.program
    if program is not None:
        answer |= {
            "ub_bytes": program.ub_used,
            "ub_total": program.ub_total,
            "double_buffered": program.double_buffered,
            "scalar_loops": program.scalar_loops,
            "waits": program.waits,
            "last_store_waits": program.last_store_waits,
            "cost": cost_of_row(program, case["trips"], case["rows"]),
        }
    return answer


def _load(source: str) -> ModuleType:
    """A module by its name, or a file by its path."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    spec = importlib.util.spec_from_file_location("kernel_to_check", source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_to_check"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
