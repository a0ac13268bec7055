"""CrossEntropyLoss and ChunkedLossWrapper on 2 and 4 processes."""

from __future__ import annotations

import fsdp_programs
import pytest
import rank_programs as programs
import torch
from torch.torch_version import TorchVersion

BOTH = pytest.mark.parametrize("world", [2, 4])


@BOTH
def test_plain_shards_of_every_size(rank_pools, world):
    # HAZARDS 20, 25; the unchunked loss has one collective forward
    assert rank_pools(world).run(programs.plain_shards) == [{"all_gather": 1}] * world


def test_partial_hidden_gradient(rank_pools):
    rank_pools(2).run(programs.partial_hidden_gradient)


@BOTH
def test_dtensor_heads(rank_pools, world):
    # HAZARDS 21, 22
    for counts in rank_pools(world).run(programs.dtensor_heads):
        for forward, _ in counts:
            assert forward.get("all_gather", 0) <= 4 + 1  # one a chunk, and hidden's


@BOTH
def test_colwise_parallel_head(rank_pools, world):
    for counts in rank_pools(world).run(programs.colwise_head):
        for i, (forward, backward) in enumerate(counts):
            sequence_parallel = (i // 2) % 2 == 1
            assert forward == {"all_gather": 4 + sequence_parallel}
            assert backward == {"reduce_scatter" if sequence_parallel else "all_reduce": 1}


def test_fsdp(rank_pools):
    # HAZARDS 34. Forward of the wrapped lm_head gathers once; backward of the whole step scatters once a
    # group of parameters: lm_head (with its norm) and the root's
    for counts in rank_pools(2).run(fsdp_programs.fsdp):
        grouped = counts.pop("grouped")
        assert counts == {
            "head": ({"all_gather": 1}, {"reduce_scatter": 2}),
            "root only": ({}, {"reduce_scatter": 1}),  # still gathered after the root's forward
        }
        if TorchVersion(torch.__version__) < "2.12":  # later, FSDP ends an unfinished group with the root
            assert grouped == ({}, {"reduce_scatter": 2})  # gathered before the norm


def test_fsdp_mixed_precision(rank_pools):
    rank_pools(2).run(fsdp_programs.fsdp_mixed_precision)


def test_fsdp_over_tensor_parallel(rank_pools):
    for forward, backward in rank_pools(4).run(fsdp_programs.fsdp_and_tp):
        assert forward == {"all_gather": 1 + 3}  # FSDP's, and one a chunk
        assert backward == {"all_reduce": 1, "reduce_scatter": 2}
