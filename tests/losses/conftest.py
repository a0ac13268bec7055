"""Fixtures of the losses' tests: processes with gloo, and the unit tests' helpers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# --import-mode=importlib leaves these out; ranks inherit them
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tp_harness import RankPools


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """Processes that stay up for the session."""
    with contextlib.closing(RankPools()) as pools:
        yield pools
