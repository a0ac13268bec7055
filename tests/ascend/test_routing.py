"""Which implementation runs on an NPU, and how kernels are launched there, with stand-ins for the NPU."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ce_adaptor import implementations
from megatron_ce_adaptor.implementations import SMALL_VOCABULARY, choose, vendor


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "_choices", {})
    for name in ("MCE_IMPLEMENTATION", "TE_PARALLEL_CE_FORCE_TRITON", "MCE_TRITON_KERNELS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def triton_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the installed triton had the NPU's backend."""
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        if name == "triton.backends.ascend":
            return importlib.machinery.ModuleSpec(name, None)
        return find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def name_of(module: Any) -> str:
    return str(module.__name__).rsplit(".", 1)[1]


@pytest.mark.usefixtures("triton_ascend")
@pytest.mark.parametrize(
    ("columns", "split", "expected"),
    [
        (SMALL_VOCABULARY, False, "ascend"),
        (SMALL_VOCABULARY - 1, False, "vendor"),
        (1, False, "vendor"),
        (1, True, "ascend"),
        (151_936, True, "ascend"),
    ],
)
def test_by_size_and_split(columns: int, split: bool, expected: str) -> None:
    choice = choose("npu", columns, split)
    assert name_of(choice.module) == expected
    assert "NPU" in choice.reason
    assert str(SMALL_VOCABULARY) in choice.reason


@pytest.mark.usefixtures("triton_ascend")
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("TE_PARALLEL_CE_FORCE_TRITON", "1", "ascend"),
        ("TE_PARALLEL_CE_FORCE_TRITON", "0", "vendor"),
        ("MCE_IMPLEMENTATION", "triton", "ascend"),
        ("MCE_IMPLEMENTATION", "reference", "reference"),
        ("MCE_IMPLEMENTATION", "auto", "vendor"),
    ],
)
def test_settings_win(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str) -> None:
    monkeypatch.setenv(variable, value)
    choice = choose("npu", 1000, False)
    assert name_of(choice.module) == expected
    if expected != "vendor":
        assert choice.reason == f"{variable}={value}"


def test_the_other_triton_is_no_silent_fallback() -> None:
    """Neither the vendor's operators nor the CUDA kernels are run instead."""
    with pytest.raises(RuntimeError, match="triton-ascend") as error:
        choose("npu", SMALL_VOCABULARY, False)
    assert "no backend for NPUs" in str(error.value)
    assert "MCE_IMPLEMENTATION=reference" in str(error.value)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match=r"megatron-ce-adaptor\[npu\]"):
        choose("npu", 1000, True)


def test_the_interpreter_runs_the_kernels_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert implementations._kernels("cpu") == "cuda"
    monkeypatch.setenv("MCE_TRITON_KERNELS", "ascend")
    assert implementations._kernels("cpu") == "ascend"
    assert implementations._kernels("cuda") == "cuda"
    monkeypatch.setenv("MCE_TRITON_KERNELS", "tpu")
    with pytest.raises(ValueError, match=r"MCE_TRITON_KERNELS is 'tpu'"):
        implementations._kernels("cpu")
    monkeypatch.setenv("MCE_IMPLEMENTATION", "triton")
    with pytest.raises(ValueError, match="MCE_TRITON_KERNELS"):
        choose("cpu", 1000, False)


def test_the_vendors_operators_refuse_a_split_vocabulary() -> None:
    for part in (vendor.row_statistics, vendor.merge):
        with pytest.raises(RuntimeError, match="split over ranks"):
            part(torch.zeros(1, 2), torch.zeros(1), first_column=0)


class StandInNpu:
    """What the launch code needs of torch.npu, with a record of the current device."""

    def __init__(self) -> None:
        self.entered: list[int] = []

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.entered.append(device.index)
        yield


class StandInKernel:
    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append((grid, arguments))


@pytest.mark.parametrize(("work", "programs"), [(70_000, 48), (48, 48), (7, 7), (0, 1)])
def test_grid_is_capped_at_the_vector_cores(
    monkeypatch: pytest.MonkeyPatch, work: int, programs: int
) -> None:
    """HAZARDS 29, 31; the number of cores is the driver's, the device the tensors'."""
    from megatron_ce_adaptor.implementations import ascend

    npu, kernel = StandInNpu(), StandInKernel()
    asked: list[int] = []

    def properties(index: int) -> dict[str, int]:
        asked.append(index)
        return {"num_aicore": 24, "num_vectorcore": 48}

    driver = SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace(get_device_properties=properties)))
    monkeypatch.setattr(ascend.triton.runtime, "driver", driver)
    monkeypatch.setattr(torch, "get_device_module", lambda device: npu)
    ascend.vector_cores.cache_clear()
    device = torch.device("cuda", 3)  # any but the CPU: no torch_npu gives the name npu here
    try:
        ascend._launch(kernel, device, work, "a", "b")
    finally:
        ascend.vector_cores.cache_clear()
    assert kernel.launches == [((programs,), ("a", "b"))]
    assert npu.entered == [3]
    assert asked == [3]
