"""Which implementation computes row statistics and gradients, and why.

Each implementation is a module with the functions `row_statistics`, `merge`, `forward` (both in one, for an
unsplit vocabulary) and `gradient`, all of the signatures in `reference`, a NAME, its payload's HEADER, and
READS_ADDRESSES: its kernels need tensors that have memory, which traced ones do not.
They never import each other.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import NamedTuple

from megatron_ce_adaptor.settings import setting

CHOICES = ("auto", "triton", "reference")

# On an NPU, an unsplit vocabulary of fewer columns goes to the vendor's operators.
SMALL_VOCABULARY = 16384


class Choice(NamedTuple):
    """What `choose` decided: the implementation's module, its name, and the reason in words."""

    module: ModuleType
    name: str
    reason: str


_last_used: str | None = None
_choices: dict[tuple[str, bool, str, str], Choice] = {}


def choose(device_type: str, columns: int, split: bool) -> Choice:
    """The implementation for logits on a device of this type ('cpu', 'cuda', 'npu', ...).

    MCE_IMPLEMENTATION=auto|triton|reference overrides the choice; TE_PARALLEL_CE_FORCE_TRITON=1 means triton.
    On CPU, `triton` is Triton's interpreter, running the kernels of MCE_TRITON_KERNELS=cuda|ascend
    (read once).

    Args:
        columns: this rank's columns of the vocabulary.
        split: the vocabulary is split over a group of several ranks.

    Raises:
        ValueError: MCE_IMPLEMENTATION or MCE_TRITON_KERNELS has an unknown value.
        RuntimeError: what was asked for cannot run here, with the reason; nothing else is run instead.
    """
    large = split or columns >= SMALL_VOCABULARY
    key = (device_type, large, setting("MCE_IMPLEMENTATION"), setting("TE_PARALLEL_CE_FORCE_TRITON"))
    choice = _choices.get(key)
    if choice is None:
        choice = _choices[key] = _decide(*key)
    return choice


def note_use(name: str) -> None:
    """Remembers the implementation of the latest call, for logs."""
    global _last_used
    _last_used = name


def last_used() -> str | None:
    """The implementation that the latest call ran ('cuda', 'cuda (interpreter)', 'reference'), None before
    any.
    """
    return _last_used


def _decide(device_type: str, large: bool, requested: str, force_triton: str) -> Choice:
    requested = requested or "auto"
    if requested not in CHOICES:
        raise ValueError(f"MCE_IMPLEMENTATION is {requested!r}, expected one of {', '.join(CHOICES)}.")
    why = f"MCE_IMPLEMENTATION={requested}"
    if requested == "auto" and force_triton == "1":
        requested, why = "triton", "TE_PARALLEL_CE_FORCE_TRITON=1"
    if requested == "auto":
        if device_type == "cuda":
            requested, why = "triton", "logits on a CUDA device"
        elif device_type == "cpu":
            requested, why = "reference", "logits on the CPU"
        elif device_type == "npu" and large:
            requested, why = "triton", f"logits on an NPU, split or at least {SMALL_VOCABULARY} columns"
        elif device_type == "npu":
            why = f"logits on an NPU, unsplit and less than {SMALL_VOCABULARY} columns"
            module = importlib.import_module("megatron_ce_adaptor.implementations.vendor")
            return Choice(module, module.NAME, why)
        else:
            raise RuntimeError(
                f"there is no kernel for logits on a {device_type!r} device in this version; "
                "set MCE_IMPLEMENTATION=reference to compute with PyTorch operations instead."
            )
    if requested == "reference":
        module = importlib.import_module("megatron_ce_adaptor.implementations.reference")
        return Choice(module, module.NAME, why)
    return _triton(device_type, why)


def _triton(device_type: str, why: str) -> Choice:
    if device_type not in ("cuda", "npu", "cpu"):
        raise RuntimeError(
            f"{why} asks for Triton kernels, but there are none for a {device_type!r} device in this version."
        )
    kernels = _kernels(device_type)
    package, extra = ("triton", "cuda") if kernels == "cuda" else ("triton-ascend", "npu")
    advice = (
        f"install {package} (pip install 'megatron-ce-adaptor[{extra}]') or set MCE_IMPLEMENTATION=reference"
    )
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise RuntimeError(
            f"{why} asks for Triton kernels, but triton cannot be imported ({error}); {advice}."
        ) from error
    if device_type == "npu" and importlib.util.find_spec("triton.backends.ascend") is None:
        raise RuntimeError(
            f"{why} asks for Triton kernels, but the installed triton has no backend for NPUs: {advice}. "
            "Both are the package 'triton': remove the other one first."
        )
    module = importlib.import_module(f"megatron_ce_adaptor.implementations.{kernels}")
    if device_type == "cpu" and not module.INTERPRETED:
        raise RuntimeError(
            f"{why} asks for Triton kernels on CPU tensors, which only Triton's interpreter runs: set "
            "TRITON_INTERPRET=1 before Python starts, or MCE_IMPLEMENTATION=reference."
        )
    return Choice(module, module.NAME, why)


def _kernels(device_type: str) -> str:
    """The module with the launch code: in the interpreter, MCE_TRITON_KERNELS says whose kernels are run."""
    if device_type != "cpu":
        return "ascend" if device_type == "npu" else "cuda"
    wanted = setting("MCE_TRITON_KERNELS") or "cuda"
    if wanted not in ("cuda", "ascend"):
        raise ValueError(f"MCE_TRITON_KERNELS is {wanted!r}, expected cuda or ascend.")
    return wanted
