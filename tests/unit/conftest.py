"""Fixtures of the unit tests: on which device and implementation a test runs, and processes for tensor
parallelism.

The whole set runs once per kind: on the CPU with the reference implementation; on the CPU with the Triton
kernels in the interpreter (`TRITON_INTERPRET=1 pytest -m interpreter`, a run of its own because Triton
reads the variable when it is imported), those for NPUs with MCE_TRITON_KERNELS=ascend; on an NVIDIA GPU with
the compiled kernels (`pytest -m gpu`).
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # --import-mode=importlib leaves it out; ranks inherit it

from poison import poisoned_empty as poisoned_empty_context
from tp_harness import RankPools

from megatron_ce_adaptor.implementations import ascend_tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Device:
    """Where a test puts its tensors, and which implementation `MCE_IMPLEMENTATION` asks for."""

    name: str
    type: str
    implementation: str

    def rows(self, wanted: int, vocab: int) -> int:
        """`wanted` rows, or as many of them as the interpreter gets through in a moment (at least one)."""
        return wanted if self.name != "interpreter" else min(wanted, max(1, 40_000 // max(1, vocab)))


REFERENCE = Device("reference", "cpu", "reference")
INTERPRETER = Device("interpreter", "cpu", "triton")
COMPILED = Device("compiled", "cuda", "triton")


ASCEND = os.environ.get("MCE_TRITON_KERNELS") == "ascend"

MOST_INTERPRETED_CASES = 3 if ASCEND else 5
"""Of a parametrised test: the interpreter takes about a second a case, and the other runs take them all."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves a fixed random sample of the interpreter's cases where a test has many, and none in fp64 of the
    kernels for NPUs, which do not have it.
    """
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("interpreter"):
            cases.setdefault((str(item.path), item.originalname), []).append(item)
    dropped: set[int] = set()
    if ASCEND:
        for key, group in cases.items():
            dropped.update(id(item) for item in group if _is_fp64(item))
            cases[key] = [item for item in group if not _is_fp64(item)]
    for (_, name), group in cases.items():
        keep = MOST_INTERPRETED_CASES * (2 if "logits_layouts" in name else 1)
        keep = 1 if ASCEND and name == "test_equals_dense" else keep  # a hundred cases in each
        if len(group) > keep:
            dropped.update(map(id, random.Random(name).sample(group, len(group) - keep)))
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in dropped])
        items[:] = [item for item in items if id(item) not in dropped]


def _is_fp64(item: pytest.Item) -> bool:
    parameters = (
        item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    )
    return torch.float64 in parameters.values() or item.originalname == "test_gradcheck"


def _devices(with_reference: bool = True) -> list[object]:
    if INTERPRETED:
        interpreter = [pytest.param(INTERPRETER, id="cpu/interpreter", marks=pytest.mark.interpreter)]
        why_not = "TRITON_INTERPRET=1 is set: kernels are interpreted, not compiled"
    else:
        interpreter = []
        why_not = "" if torch.cuda.is_available() else "no NVIDIA GPU"
    no_gpu = pytest.mark.skipif(bool(why_not), reason=why_not)
    return [
        *([pytest.param(REFERENCE, id="cpu/reference")] if with_reference else []),
        *interpreter,
        pytest.param(COMPILED, id="cuda/compiled", marks=[pytest.mark.gpu, no_gpu]),
    ]


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The kinds a test runs on, one after the other, with `MCE_IMPLEMENTATION` set accordingly."""
    return _select(request.param, monkeypatch)


@pytest.fixture(params=_devices(with_reference=False))
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """As `device`, for what holds for the Triton kernels and not for the reference implementation."""
    return _select(request.param, monkeypatch)


def _select(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setenv("MCE_IMPLEMENTATION", device.implementation)
    monkeypatch.delenv("MCE_CHECK_LABELS", raising=False)
    monkeypatch.delenv("TE_PARALLEL_CE_FORCE_TRITON", raising=False)
    if ASCEND and zlib.crc32(os.environ.get("PYTEST_CURRENT_TEST", "").encode()) % 2:
        # Half of the cases by the kernels for long rows, with tiles that these rows are longer than.
        monkeypatch.setattr(ascend_tiles, "MOST_SHORT_STATISTICS", 0)
        monkeypatch.setattr(ascend_tiles, "MOST_SHORT_GRADIENT", 0)
        monkeypatch.setattr(ascend_tiles, "STATISTICS_WIDTHS", ((300, 16), (4096, 512)))
        monkeypatch.setattr(ascend_tiles, "GRADIENT_WIDTHS", ((300, 32), (4096, 512)))
    return device


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """`torch.empty` and its relatives hold NaN."""
    with poisoned_empty_context():
        yield


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """Processes that stay up for the session."""
    with contextlib.closing(RankPools()) as pools:
        yield pools
