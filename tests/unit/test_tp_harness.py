"""The harness itself: a hang, an error or a death on one rank is a failure with every rank's output, soon."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import tp_cases
from tp_harness import RankFailure, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def test_returns_every_ranks_result(pool: RankPool) -> None:
    assert pool.run(tp_cases.rank_and_sum, 3.0) == [(0, 7.0), (1, 7.0)]
    assert pool.run_each(tp_cases.rank_and_sum, [[1.0], [10.0]]) == [(0, 12.0), (1, 12.0)]


@pytest.mark.slow
def test_failures_end_in_time_and_the_next_call_works(pool: RankPool) -> None:
    pool.run(tp_cases.rank_and_sum, 0.0)
    start = time.monotonic()
    with pytest.raises(
        RankFailure, match=r"(?s)failed on ranks.*rank 0 is here.*rank 1.*no answer.*rank 1 is here"
    ):
        pool.run(tp_cases.print_and_hang, timeout_s=3.0)
    assert time.monotonic() - start < 30
    pool.run(tp_cases.rank_and_sum, 0.0)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 has had enough"):
        pool.run(tp_cases.raise_on_rank_1, timeout_s=300.0)
    pool.run(tp_cases.rank_and_sum, 0.0)
    with pytest.raises(RankFailure, match="rank 0: the process ended"):
        pool.run(tp_cases.die_on_rank_0, timeout_s=300.0)
    assert time.monotonic() - start < 120
    assert pool.run(tp_cases.rank_and_sum, 3.0) == [(0, 7.0), (1, 7.0)]
