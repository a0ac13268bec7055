"""What a run on Ascend NPUs needs beside this package, checked before a process a card is started.

From the bottom up: CANN, driver and cards, Python, triton-ascend, torch_npu, Megatron. Nothing here imports
torch: with torch_npu installed and CANN missing, `import torch` itself fails.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

SET_ENV = "/usr/local/Ascend/ascend-toolkit/set_env.sh"

# First and last Python with a wheel. 3.2.0: PyPI, and its compiler was run on 3.11. 3.2.1: the project's
# installation guide. What is newer than this table is not judged.
TRITON_ASCEND_PYTHONS: dict[tuple[int, ...], tuple[tuple[int, int], tuple[int, int]]] = {
    (3, 2, 0): ((3, 9), (3, 11)),
    (3, 2, 1): ((3, 9), (3, 13)),
}

# megatron/training/models/hybrid.py of core_r0.18.0 imports typing.override, which 3.11 does not have.
# 0.17.1 can be imported on 3.11, although its metadata asks for 3.12.
MEGATRON_PYTHONS = {(0, 18): (3, 12)}

# One line a chip: `| 0                         | 0000:C1:00.0  | 0           0    / 0          3396/ 65536 |`
_CHIP = re.compile(r"\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]\s*\|")


def problem(processes: int, variables: Mapping[str, str]) -> str | None:
    """Why `processes` ranks cannot train on this machine's NPUs, in one sentence; None where they may.

    Args:
        processes: ranks on this machine, one a card.
        variables: the environment that the ranks will have.
    """
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _cann(variables),
        lambda: _cards(processes, variables),
        lambda: _triton_ascend(variables),
        _torch_npu,
        lambda: _megatron(variables),
    )
    return next((sentence for check in checks if (sentence := check())), None)


def _cann(variables: Mapping[str, str]) -> str | None:
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        home = variables.get(name)
        if home:
            if Path(home).is_dir():
                return None
            return f"{name} is {home}, where there is no folder: source the set_env.sh of the installed CANN."
    return (
        "CANN is not active, ASCEND_HOME_PATH is not set: run `source st_scripts/env_npu.sh`, or "
        f"`source {SET_ENV}` with the path of your CANN."
    )


def _cards(processes: int, variables: Mapping[str, str]) -> str | None:
    if shutil.which("npu-smi") is None:
        return (
            "npu-smi is not on PATH: install the NPU driver, or in a container mount it together with "
            "/usr/local/Ascend/driver and /dev/davinci*."
        )
    try:
        done = subprocess.run(
            ["npu-smi", "info"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`npu-smi info` does not answer ({type(error).__name__}): check the NPU driver."
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
        return f"`npu-smi info` ended with {done.returncode} ({last[0].strip()[:120]}): check the NPU driver."
    present = len(_CHIP.findall(done.stdout))
    usable, where = present, "npu-smi shows"
    chosen = variables.get("ASCEND_RT_VISIBLE_DEVICES")
    if chosen:
        usable, where = _listed(chosen), f"ASCEND_RT_VISIBLE_DEVICES={chosen} leaves"
        if present and usable > present:
            usable, where = present, "npu-smi shows"
    if usable < processes and (present or chosen):
        return (
            f"{processes} processes need {processes} NPUs, but {where} {usable}: set NPUS_PER_NODE={usable} "
            "and TP, PP and EP to sizes that fit, or take a machine with more cards."
        )
    if not present and not chosen:
        return "`npu-smi info` shows no NPU: check the driver, or in a container the devices /dev/davinci*."
    return None


def _listed(devices: str) -> int:
    """How many devices `0,1,4-7` names."""
    count = 0
    for part in devices.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", part)
        count += max(0, int(match[2]) - int(match[1]) + 1) if match else bool(part.strip())
    return count


def _triton_ascend(variables: Mapping[str, str]) -> str | None:
    python = sys.version_info[:2]
    version = _version("triton-ascend")
    if version is None:
        if variables.get("MCE_IMPLEMENTATION") == "reference":
            return None
        if python <= TRITON_ASCEND_PYTHONS[3, 2, 0][1]:
            remedy = "pip install triton-ascend==3.2.0 (of CANN 8.5), or take 3.2.1 (of CANN 9.0) from Ascend"
        else:
            remedy = (
                "3.2.0, the newest on PyPI, stops at Python 3.11; take 3.2.1 or newer from Ascend's own "
                "index, whose address is in its installation guide"
            )
        return f"triton-ascend is not installed for Python {_dotted(python)}, which te needs: {remedy}."
    known = TRITON_ASCEND_PYTHONS.get(_numbers(version, 3))
    if known is not None and not known[0] <= python <= known[1]:
        return (
            f"triton-ascend {version} is for Python {_dotted(known[0])} to {_dotted(known[1])}, this is "
            f"Python {_dotted(python)}: take triton-ascend 3.2.1 or newer, or another Python."
        )
    folder = _package_folder("triton")
    if folder is None or not (folder / "backends" / "ascend").is_dir():
        return (
            f"triton-ascend {version} is installed, but the package triton has no Ascend backend: another "
            "triton was installed over it; run `pip uninstall -y triton`, then `pip install "
            f"--force-reinstall --no-deps triton-ascend=={version}`."
        )
    return None


def _torch_npu() -> str | None:
    torch, torch_npu = _version("torch"), _version("torch-npu")
    if torch is None:
        return "torch is not installed: install it together with the torch_npu of the same version."
    if torch_npu is None or _package_folder("torch_npu") is None:
        return f"torch_npu is not installed: install the torch_npu of torch {_dotted(_numbers(torch, 3))}."
    if _numbers(torch_npu, 2) != _numbers(torch, 2):
        return (
            f"torch_npu {torch_npu} does not belong to torch {torch}: install a torch_npu "
            f"{_dotted(_numbers(torch, 2))}.x, or a torch {_dotted(_numbers(torch_npu, 2))}.x."
        )
    return None


def _megatron(variables: Mapping[str, str]) -> str | None:
    """Python against Megatron's version; whether the checkout is one is asked for every device."""
    python = sys.version_info[:2]
    checkout = variables.get("MEGATRON_PATH")
    version = _checkout_version(Path(checkout).expanduser()) if checkout else _version("megatron-core")
    if version is None:
        return None  # no checkout and no wheel: the training entry says so
    needed = next((py for series, py in MEGATRON_PYTHONS.items() if _numbers(version, 2) >= series), None)
    if needed is not None and python < needed:
        return (
            f"Megatron-Core {version} needs Python {_dotted(needed)}, this is Python {_dotted(python)}: take "
            f"Python {_dotted(needed)} with triton-ascend 3.2.1 or newer, or Megatron-Core 0.17.1."
        )
    return None


def _checkout_version(folder: Path) -> str | None:
    try:
        text = (folder / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    except OSError:
        return None
    parts = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) if all(parts) else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_folder(name: str) -> Path | None:
    """Where a package lies; looking does not import it."""
    spec = importlib.util.find_spec(name)
    return Path(os.path.dirname(spec.origin)) if spec is not None and spec.origin else None


def _numbers(version: str, count: int) -> tuple[int, ...]:
    """(2, 10) of 2.10.0.post4."""
    found = re.findall(r"\d+", version)[:count]
    return tuple(int(number) for number in found)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
