"""Fixtures of the DTensor tests: processes for a mesh, as tests/unit has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# --import-mode=importlib leaves these out; ranks inherit them. At the end, because other tests import their
# own conftest by name.
sys.path.append(str(Path(__file__).parents[1] / "unit"))
sys.path.append(str(Path(__file__).parent))

from tp_harness import RankPools

Run = Callable[..., list[object]]

CALL_LIMIT_S = 240.0
"""For about a hundred cases on a slow and busy machine."""


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Run]:
    """`run_ranks(world_size, function, *args)`: `function(rank, *args)` on gloo processes that stay up for
    the session; the results in rank order."""
    pools = RankPools()

    def run(
        world_size: int, function: Callable[..., object], *args: object, **options: object
    ) -> list[object]:
        return pools(world_size).run(function, *args, **{"timeout_s": CALL_LIMIT_S, **options})

    yield run
    pools.close()


@pytest.fixture
def no_failures() -> Callable[[list[object]], None]:
    """Fails with what the ranks found wrong: each returned (number of checks, list of sentences)."""

    def check(outcomes: list[object]) -> None:
        counts, failures = zip(*outcomes, strict=True)  # type: ignore[call-overload]
        assert min(counts) > 0, "a rank checked nothing"
        found = [f"rank {rank}: {text}" for rank, texts in enumerate(failures) for text in texts]
        assert not found, f"{len(found)} of {sum(counts)} checks failed:\n" + "\n".join(found[:20])

    return check
