"""What a run ran on, for env.json: versions, devices, settings; nothing that names a machine or a person."""

from __future__ import annotations

import contextlib
import datetime
import getpass
import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch", "triton", "megatron-core", "numpy", "transformers", "tokenizers", "megatron-ce-adaptor",
    "torch-npu", "triton-ascend", "mindspeed", "mindspeed-llm", "megatron-adaptor", "transformer-engine",
    "apex", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
_VARIABLE_PREFIXES = ("CUDA_", "NCCL_", "HCCL_", "ASCEND_", "MCE_", "OMP_", "TORCH_", "TE_", "TRITON_",
                      "PYTORCH_", "TASK_QUEUE_", "COMBINED_", "GLOO_", "CPU_AFFINITY_", "STREAMS_PER_DEVICE",
                      "INF_NAN_", "ATB_", "NPUS_PER_NODE", "NNODES")  # fmt: skip
# The line of megatron/neighbours.py, which this package may not import.
_NEIGHBOURS = re.compile(r"megatron_ce_adaptor: beside Megatron: (\{.*\})")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY", re.IGNORECASE)
_IPV4 = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.]*\d)")
_MAYBE_IPV6 = re.compile(r"(?<![\w:])[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:]*(?![\w:])")
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])")
_HOMES = re.compile(r"(?<![\w.])/(?:home|Users|data/home)/[^/\s:,;'\"]+|(?<![\w.])/root(?![\w])")
_CANN_VERSION_FILES = ("version.cfg", "latest/version.cfg", "ascend_toolkit_install.info", "version.info",
                       "latest/compiler/version.info", "latest/toolkit/version.info",
                       "x86_64-linux/ascend_toolkit_install.info",
                       "aarch64-linux/ascend_toolkit_install.info")  # fmt: skip
_NPU_DRIVER_FILES = {
    "driver": "/usr/local/Ascend/driver/version.info",
    "firmware": "/usr/local/Ascend/firmware/version.info",
}
# Usually installed with `pip install -e` from a branch, so that a version number says little.
_CHECKOUTS = ("megatron_adaptor", "transformer_engine", "mindspeed", "mindspeed_llm")
_NVIDIA_QUERY = (
    "index,name,driver_version,memory.total,compute_cap,power.limit,clocks.max.sm,mig.mode.current"
)


def collect(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The environment of this process as a JSON-able dict. Never raises: what cannot be found out is None.

    Args:
        variables: the environment variables to tell of, such as the ranks get; default this process's.
    """
    versions = {name: _version(name) for name in _PACKAGES}
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "os": _os_name(),
        "kernel": _kernel(),
        "cpu": _cpu_model(),
        "cpu count": os.cpu_count(),
        "cpus usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory GiB": _memory_gib(),
        "python": platform.python_version(),
        "torch cuda": _torch_cuda_version(),
        "git commit": _git_commit(),
        "git commits of the stack": _stack_commits(os.environ.get("MEGATRON_PATH")),
        # Of this process; a launcher puts what the ranks say in its place, see with_neighbours().
        "mindspeed active": "mindspeed.megatron_adaptor" in sys.modules,
        "nvidia-smi": _output(["nvidia-smi", f"--query-gpu={_NVIDIA_QUERY}", "--format=csv"]),
        "npu-smi": _without_processes(_output(["npu-smi", "info"])),
        "CANN": _cann_version(),
        **{f"NPU {what}": _first_version_line(path) for what, path in _NPU_DRIVER_FILES.items()},
        "variables": _variables(os.environ if variables is None else variables),
    }
    # Versions are not searched for addresses: 2.32.3.1 is one of NCCL's.
    return {**redact(facts), "packages": {name: v for name, v in versions.items() if v is not None}}


def with_neighbours(facts: Mapping[str, Any], log: Path) -> dict[str, Any]:
    """`facts` with what a rank printed at its end about the packages beside Megatron, if it did."""
    found = None
    with contextlib.suppress(OSError), log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if (match := _NEIGHBOURS.search(line)) is not None:
                found = match[1]
    try:
        told = json.loads(found) if found else None
    except ValueError:  # cut off, or mixed with another rank's line
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("active"), dict):
        return dict(facts)
    return {
        **facts,
        "mindspeed active": "mindspeed.megatron_adaptor" in told["active"],
        "beside Megatron": told,
    }


def redact(value: Any) -> Any:
    """The same value with host and user names, addresses and home folders replaced in every string."""
    if isinstance(value, dict):
        return {redact(k): redact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(v) for v in value]
    return _redact_text(value) if isinstance(value, str) else value


def _redact_text(text: str) -> str:
    home = os.path.expanduser("~")
    if home not in ("/", "~", ""):
        text = re.sub(re.escape(home) + r"(?![\w.\-])", "~", text)
    text = _HOMES.sub("~", text)
    for name in _host_names():
        text = re.sub(rf"(?<![\w\-]){re.escape(name)}(?![\w\-])", "<host>", text)
    for name in _user_names():
        text = re.sub(rf"(?<![\w\-]){re.escape(name)}(?![\w\-])", "<user>", text)
    text = _IPV4.sub("<address>", text)
    text = _MAC.sub("<address>", text)
    return _MAYBE_IPV6.sub(lambda m: "<address>" if _is_ipv6(m[0]) else m[0], text)


def _is_ipv6(text: str) -> bool:
    """Clock times and C++ names have colons too."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return text != "::"


def _host_names() -> list[str]:
    names = {platform.node(), os.environ.get("HOSTNAME", "")}
    with contextlib.suppress(OSError):
        names.add(socket.gethostname())
    names |= {name.split(".")[0] for name in names}
    return sorted((n for n in names if len(n) > 1 and n != "localhost"), key=len, reverse=True)


def _user_names() -> list[str]:
    names = {os.environ.get(v, "") for v in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")}
    with contextlib.suppress(OSError, KeyError):  # a container may lack this user id in /etc/passwd
        names.add(getpass.getuser())
    # root is everybody's name and an ordinary word (CUDA_ROOT)
    return sorted((n for n in names if len(n) > 1 and n != "root"), key=len, reverse=True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda_version() -> str | None:
    """Read from torch/version.py, so that this module need not wait for `import torch`."""
    try:
        spec = importlib.util.find_spec("torch")
        text = (
            (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
            if spec and spec.origin
            else ""
        )
    except (OSError, ValueError):
        return None
    match = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _git_commit() -> str | None:
    """The commit of the checkout this package runs from, `+changes` if it differs; None if installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / "megatron_ce_adaptor").is_dir():
        return None
    return _commit_of(root)


def _commit_of(folder: Path) -> str | None:
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return commit.strip() + ("+changes" if changed and changed.strip() else "")


def _stack_commits(megatron_path: str | None) -> dict[str, str] | None:
    """Commit of each part of the stack that runs from a checkout of its own, `+changes` where it differs."""
    folders = {"megatron-lm": Path(megatron_path).expanduser()} if megatron_path else {}
    for name in _CHECKOUTS:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin and "site-packages" not in spec.origin:
            folders[name] = Path(spec.origin).parent
    commits = {name: commit for name, folder in folders.items() if (commit := _commit_of(folder))}
    return commits or None


def _first_version_line(path: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("version"):
                return line.strip()[:200]
    return None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.platform(terse=True)


def _kernel() -> str:
    """Without what a site appends to the release of its own kernels."""
    release = re.match(r"[\d.]+", platform.release())
    return f"{platform.system()} {release[0] if release else '?'} {platform.machine()}"


def _cpu_model() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    match = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _output(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _without_processes(table: str | None) -> str | None:
    """npu-smi's table ends with the processes of whoever uses the machine: nobody else's business."""
    if table is None:
        return None
    lines = table.splitlines()
    end = next((i for i, line in enumerate(lines) if "Process id" in line), len(lines))
    return "\n".join(lines[:end]).strip()


def _cann_version() -> dict[str, str] | None:
    roots = [os.environ.get("ASCEND_TOOLKIT_HOME"), os.environ.get("ASCEND_HOME_PATH"),
             "/usr/local/Ascend/ascend-toolkit", "/usr/local/Ascend/ascend-toolkit/latest",
             "/usr/local/Ascend/cann"]  # fmt: skip
    for root in filter(None, roots):
        for name in _CANN_VERSION_FILES:
            path = Path(root) / name
            try:
                return {
                    "file": str(path),
                    "content": path.read_text(encoding="utf-8", errors="replace")[:2000],
                }
            except OSError:
                continue
    return None


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_VARIABLE_PREFIXES) and not _SECRET.search(name)
    }
