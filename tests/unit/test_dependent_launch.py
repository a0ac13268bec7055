"""Kernels that start before the one in front of them has ended touch no memory before they have waited."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import pytest
import torch
import triton
from conftest import INTERPRETED

from megatron_ce_adaptor.implementations import cuda, cuda_kernels

INT32 = ("lead", "n_cols", "tiles_per_row")
FLOAT64 = ("label_smoothing", "z_loss_weight")
CONSTANTS: dict[str, Any] = {
    "SMOOTH": True, "Z_LOSS": True, "STATISTICS": True, "WEIGHTED": True, "OVERLAP": True, "KEEP": True,
    "EQUAL_SHARDS": True, "SPLIT_VOCAB": True, "TWO_LEVEL": False, "G_TWO_LEVEL": False,
    "WORLD": 2, "K": 5, "BLOCK": 256, "VEC": 8, "LAYOUT": 1,
}  # fmt: skip


def ptx(kernel: Any) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def type_of(name: str) -> str:
        if name in CONSTANTS:
            return "constexpr"
        if name == name.upper():
            return {"X": "*bf16", "G_X": "*bf16", "Y": "*i64"}.get(name, "*fp32")
        return "i32" if name in INT32 else "fp64" if name in FLOAT64 else "i64"

    signature = {name: type_of(name) for name in kernel.arg_names}
    constants = {(k,): CONSTANTS[name] for k, name in enumerate(kernel.arg_names) if name in CONSTANTS}
    source = ASTSource(kernel, signature, constants)
    options = {"num_warps": 4, "launch_pdl": True}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 is set: kernels are interpreted, not compiled")
@pytest.mark.skipif(not cuda_kernels.HAS_DEPENDENT_LAUNCH, reason="Triton before 3.4 has none")
@pytest.mark.parametrize("name", ["row_statistics_kernel", "merge_kernel", "gradient_kernel"])
def test_waits_before_it_reads_or_writes(name: str) -> None:
    text = ptx(getattr(cuda_kernels, name))
    waits = text.index("griddepcontrol.wait")
    lets_go = text.index("griddepcontrol.launch_dependents")
    accesses = [found.start() for found in re.finditer(r"\b(ld|st|atom|red)\.global", text)]
    assert waits < lets_go < min(accesses)


def test_kernels_of_a_triton_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.7 comes with Triton 3.3, which cannot name the instructions."""
    language = sys.modules["triton.language.extra.cuda"]
    monkeypatch.delattr(language, "gdc_wait", raising=False)
    monkeypatch.delattr(language, "gdc_launch_dependents", raising=False)
    spec = importlib.util.spec_from_file_location("kernels_of_an_old_triton", cuda_kernels.__file__)
    assert spec is not None and spec.loader is not None
    old = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(old)
    assert not old.HAS_DEPENDENT_LAUNCH
    monkeypatch.setattr(cuda, "kernels", old)
    monkeypatch.setattr(cuda, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not cuda._can_overlap.__wrapped__(torch.device("cuda", 0))
    monkeypatch.setattr(cuda, "kernels", cuda_kernels)
    monkeypatch.setattr(cuda_kernels, "HAS_DEPENDENT_LAUNCH", True)
    assert cuda._can_overlap.__wrapped__(torch.device("cuda", 0))
