"""Lines that one rank of a tensor-parallel group says once."""

from __future__ import annotations

import sys
from typing import Any

_said: set[str] = set()


def say_once(text: str, group: Any = None) -> None:
    """Prints the line, unless this process has printed it before or another rank of the group, or another
    data-parallel rank, does."""
    if text in _said:
        return
    _said.add(text)
    if group is not None and group.rank() != 0:
        return
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if (
        parallel_state is not None
        and parallel_state.is_initialized()
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0
    ):
        return
    print(f"megatron_ce_adaptor: {text}", flush=True)
