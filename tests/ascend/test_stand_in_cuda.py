"""torch_npu's transfer_to_npu, which adaptors for Megatron import, makes CUDA's names mean the NPU: `is_cuda`
is true for a tensor on an NPU, whose device is of the type npu still. No kernel for CUDA may be launched.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ce_adaptor import doctor
from megatron_ce_adaptor.chunked import scaling, walk

PACKAGE = Path(scaling.__file__).resolve().parents[1]


class NpuTensor(torch.Tensor):
    """Computes on the CPU, and looks like a tensor on an NPU after transfer_to_npu."""

    is_cuda = True

    @property
    def device(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(type="npu", index=0)


def on_npu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(NpuTensor)


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scaling_takes_pytorchs_operations(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: float
) -> None:
    def no_kernel() -> Any:
        raise AssertionError("the kernel for CUDA was asked for")

    monkeypatch.setattr(scaling, "_kernel", no_kernel)
    monkeypatch.setattr(scaling, "_BLOCK_BYTES", 400)  # several blocks, the last one not full
    gradient = torch.randn(37, 7).to(dtype)
    expected = (gradient.float() * torch.tensor(factor)).to(dtype)
    result = scaling.scaled(on_npu(gradient), on_npu(torch.tensor(factor)), dtype)
    assert result.data_ptr() == gradient.data_ptr()
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("add", [False, True])
def test_products_take_no_overload_of_cuda_alone(add: bool) -> None:
    """`out_dtype` of mm and addmm is CUDA's: the CPU, which stands in here, refuses it as an NPU does."""
    a, b = torch.randn(3, 5).bfloat16(), torch.randn(5, 2).bfloat16()
    out = torch.ones(3, 2)
    expected = torch.mm(a, b).float() + (1.0 if add else 0.0)
    walk.multiply_into(on_npu(out), on_npu(a), on_npu(b), add=add)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("behind", ["npu", "cuda"])
def test_doctor_shows_no_cuda_device_that_is_an_npu(monkeypatch: pytest.MonkeyPatch, behind: str) -> None:
    names = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda _: "a device"
    )
    made = SimpleNamespace(device=SimpleNamespace(type=behind))
    monkeypatch.setattr(torch, "cuda", names)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: made)
    monkeypatch.setattr(torch, "npu", names, raising=False)
    shown = [device for device, _ in doctor._devices()]
    assert shown == ["cpu", *(["cuda:0"] if behind == "cuda" else []), "npu:0"]


def test_the_package_asks_for_the_type_of_a_device() -> None:
    asks = [
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"\.is_cuda\b", line)
    ]
    assert not asks, "is_cuda is true on an NPU with transfer_to_npu; ask device.type: " + "\n".join(asks)
