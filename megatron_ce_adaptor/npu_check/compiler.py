"""Compiles a `@triton.jit` kernel for an Ascend NPU without one: triton-ascend turns it into MLIR,
bishengir-compile (of the package ascendnpu-ir) plans memory and synchronisation.

The last step to a binary is the program hivmc, which only CANN has. A stand-in takes its place and keeps what
it is given, which says all about memory, loops and waits. So "OK" means accepted up to there, and nothing
about numbers.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ce_adaptor.npu_check import hivm

TARGET = "Ascend910B3"
_TARGET_CORES = 20  # AI cores of a 910B3, each with two vector cores
_TIMEOUT = 300

INSTALL = (
    "pip install triton-ascend==3.2.0 ascendnpu-ir==1.2.0 pybind11 numpy (Python 3.9 to 3.11, x86 Linux)"
)

_STAND_IN = """#!/bin/sh
if [ "$1" = "--version" ]; then echo "hivmc 1.2.0 (000000000000 2026-01-01)"; exit 0; fi
cp "$1" "$HIVMC_CAPTURE"
while [ $# -gt 0 ]; do if [ "$1" = "-o" ]; then : > "$2"; : > "$2.o"; fi; shift; done
"""


class ToolchainError(Exception):
    """The compiler is not there, or not one that is known here: a sentence."""


class _MisfitError(Exception):
    """What is said of a kernel's parameters does not fit the kernel: a sentence."""


@dataclass(frozen=True)
class Lowered:
    """A kernel as MLIR for bishengir-compile, with the options that triton-ascend would give."""

    mlir: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """status: OK, UB_OVERFLOW (or of another memory), UNSUPPORTED or ERROR; message: why, empty for OK.

    without: what the compiler gave up to fit, such as enable-auto-multi-buffer (double buffering).
    """

    status: str
    message: str = ""
    program: hivm.Program | None = None
    text: str = ""
    without: tuple[str, ...] = ()


def find_compiler(folder: str | None = None) -> Path:
    """The folder of bishengir-compile.

    Raises:
        ToolchainError: it is not there.
    """
    if folder is not None:
        given = Path(folder).resolve()
        for candidate in (given, given / "bin", given / "ascendnpuir" / "bin"):
            if (candidate / "bishengir-compile").is_file():
                return candidate
        raise ToolchainError(
            f"there is no bishengir-compile in {folder}, expected a folder with ascendnpu-ir."
        )
    spec = importlib.util.find_spec("ascendnpuir")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / "bin" / "bishengir-compile").is_file():
            return Path(location) / "bin"
    found = shutil.which("bishengir-compile")
    if found is None:
        raise ToolchainError(f"bishengir-compile cannot be found: {INSTALL}.")
    return Path(found).parent


def compiler_version(folder: Path) -> str:
    """The version of the package that the compiler came in, or what it says of itself."""
    for info in folder.parent.parent.glob("ascendnpu_ir-*.dist-info"):
        return info.name.split("-")[1].removesuffix(".dist")
    said = subprocess.run(
        [folder / "bishengir-compile", "--version"], capture_output=True, text=True, timeout=60
    )
    found = re.search(r"\d+\.\d+\.\d+", said.stdout)
    return found.group(0) if found else "unknown"


@functools.cache
def prepare_frontend(target: str = TARGET) -> None:
    """Imports triton-ascend as if a device were there: it would build an extension against CANN to ask for
    its name.

    Raises:
        ToolchainError: triton-ascend is missing, or no version whose inner workings are known here.
    """
    os.environ["TRITON_ASCEND_ARCH"] = target
    try:
        import triton
    except ImportError as error:
        raise ToolchainError(f"triton cannot be imported ({error}): {INSTALL}.") from error
    if importlib.util.find_spec("triton.backends.ascend") is None:
        raise ToolchainError(
            f"triton {triton.__version__} is installed, which is not triton-ascend: {INSTALL}."
        )
    if not triton.__version__.startswith("3.2."):
        raise ToolchainError(f"triton-ascend {triton.__version__} is not known to npu-check: {INSTALL}.")
    try:
        driver = importlib.import_module("triton.backends.ascend.driver")
        importlib.import_module("pybind11")
    except ImportError as error:
        raise ToolchainError(f"triton-ascend lacks a package ({error}): {INSTALL}.") from error
    driver.NPUUtils.__init__ = lambda self: None
    driver.NPUUtils.get_arch = lambda self: target
    driver.NPUUtils.get_aicore_num = lambda self: _TARGET_CORES


def lower(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], target: str = TARGET
) -> Lowered | Outcome:
    """From Python to MLIR, or why not.

    Args:
        types: of the parameters that are no constants: *bf16, *i64, i32, fp32 ...; with :16 at the end if the
            value, or the address, is known to be a multiple of 16.
    """
    prepare_frontend(target)
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    try:
        gpu = GPUTarget("npu", target, 0)
        backend = make_backend(gpu)
        options = backend.parse_options({})
        source = ASTSource(kernel, *_specialise(kernel, types, constants))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        metadata = {"hash": "x", "target": gpu, **options.__dict__}
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options)
        mlir = stages["ttadapter"](stages["ttir"](module, metadata), metadata)
    except subprocess.CalledProcessError as error:
        return Outcome("ERROR", _last_words((error.stderr or b"").decode(errors="replace")))
    except _MisfitError as error:
        return Outcome("ERROR", str(error))
    except Exception as error:  # whatever Triton says of a kernel that it cannot take
        return Outcome("ERROR", _of_exception(error))
    flags = []
    if options.multibuffer is not None:
        flags.append(f"--enable-auto-multi-buffer={options.multibuffer}")
    if options.enable_auto_bind_sub_block is not None:
        flags.append(f"--enable-auto-bind-sub-block={options.enable_auto_bind_sub_block}")
    # triton-ascend takes this attribute out too before it goes on
    return Lowered(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", mlir), tuple(flags))


def _specialise(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> tuple[Any, Any, Any]:
    from triton.compiler.compiler import AscendAttrsDescriptor

    if not hasattr(kernel, "params"):
        raise _MisfitError("that name is no @triton.jit function")
    names = [parameter.name for parameter in kernel.params]
    # A module's cases share one table of types, so only constants can be superfluous.
    if superfluous := [name for name in constants if name not in names]:
        raise _MisfitError(f"the kernel has no parameter {', '.join(superfluous)}; it has {', '.join(names)}")
    signature: dict[str, str] = {}
    divisible: list[int] = []
    for parameter in kernel.params:
        if parameter.is_constexpr:
            if parameter.name not in constants:
                raise _MisfitError(
                    f"the constant {parameter.name} has no value: give {parameter.name}=NUMBER"
                )
            continue
        if parameter.name not in types:
            raise _MisfitError(
                f"the parameter {parameter.name} has no type: give {parameter.name}=i32, *bf16 ..."
            )
        kind, _, multiple = types[parameter.name].partition(":")
        signature[parameter.name] = kind
        if multiple == "16":
            divisible.append(parameter.num)
    attributes = AscendAttrsDescriptor()
    attributes.arg_properties = {"tt.divisibility": divisible, "tt.equal_to": []}
    attributes._init_slots()
    return signature, constants, attributes


def plan(lowered: Lowered, folder: Path, target: str = TARGET) -> Outcome:
    """Memory and synchronisation by the bishengir-compile in `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        source, captured = work / "kernel.mlir", work / "module.hivm.opt.mlir"
        source.write_text(lowered.mlir)
        stand_in = work / "bin" / "hivmc"
        stand_in.parent.mkdir()
        stand_in.write_text(_STAND_IN)
        stand_in.chmod(0o755)
        path = os.pathsep.join((str(stand_in.parent), str(folder), os.environ.get("PATH", "")))
        command = [
            str(folder / "bishengir-compile"), str(source), f"--target={target}", *lowered.flags,
            "--enable-hfusion-compile=true", "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true", "-o", str(work / "kernel"),
        ]  # fmt: skip
        try:
            run = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT,
                env={**os.environ, "PATH": path, "HIVMC_CAPTURE": str(captured)},
            )
        except subprocess.TimeoutExpired:
            return Outcome("ERROR", f"bishengir-compile was not done after {_TIMEOUT} s")
        except OSError as error:
            raise ToolchainError(f"bishengir-compile in {folder} does not start ({error}).") from error
        text = captured.read_text() if run.returncode == 0 and captured.is_file() else ""
        return _outcome(text, run.stdout + run.stderr, folder, target)


def _outcome(text: str, log: str, folder: Path, target: str) -> Outcome:
    without = tuple(re.findall(r"automatically set ([\w-]+) to false and retrying", log))
    if text:
        program = hivm.parse(text)
        unknown = ["inline assembly"] if program.inline_assembly else []
        unknown += _undefined(program, folder, target)
        if unknown:
            return Outcome(
                "UNSUPPORTED", "not in the vendor's library: " + ", ".join(unknown), program, text, without
            )
        return Outcome("OK", "", program, text, without)
    overflows = re.findall(r"(\w+) overflow, requires (\d+) bits while (\d+) bits av", log)
    if overflows:
        memory, needed, there = min(overflows, key=lambda found: int(found[1]))
        return Outcome(
            f"{memory.upper()}_OVERFLOW",
            f"needs {int(needed) // 8} bytes of {int(there) // 8}",
            without=without,
        )
    return Outcome("ERROR", _last_words(log))


def _undefined(program: hivm.Program, folder: Path, target: str) -> list[str]:
    """Library functions that are called but not in the bitcode that hivmc would link (1.0.0 brings none)."""
    suffix = ".c220.bc" if re.match(r"Ascend910(B|_93)", target) else ".bc"
    library = b""
    for core in ("aiv", "aic"):
        files = [folder.parent / "lib" / f"meta_op.{core}{s}" for s in (suffix, ".bc")]
        library += next((f.read_bytes() for f in files if f.is_file()), b"")
    return sorted(name for name in program.called if library and name.encode() not in library)


def _of_exception(error: Exception) -> str:
    """Triton quotes the kernel between where the error is and what it is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else ""
    return f"{type(error).__name__}: {said}"[:400]


def _last_words(log: str) -> str:
    """What is wrong, in a line: the first error that a compiler printed, or the end of what it said."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and "hivmc" not in line]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines[-1:] or ["no message"])[0][:400]
