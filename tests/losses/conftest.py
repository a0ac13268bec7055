"""Fixtures of the losses' tests: processes with gloo, and the unit tests' helpers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# --import-mode=importlib leaves these out; ranks inherit them
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tp_harness import RankPool


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    """`rank_pools(world_size)`: processes that stay up for the session, started on first use."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for started in pools.values():
        started.close()
