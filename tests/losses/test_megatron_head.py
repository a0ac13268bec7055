"""Megatron's ColumnParallelLinear as lm_head, with the installed Megatron-Core, on 2 processes."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")
import megatron_programs as programs


def test_column_parallel_linear(rank_pools):
    for counts in rank_pools(2).run(programs.column_parallel):
        without, with_sp, tied_sp, tied = counts
        assert without == tied == ({"all_gather": 5}, {"all_reduce": 1})
        assert with_sp == tied_sp == ({"all_gather": 6}, {"reduce_scatter": 1})


def test_agrees_with_megatrons_own_layer(rank_pools):
    rank_pools(2).run(programs.own_forward_agrees)


def test_what_does_not_fit_is_refused_on_all_ranks(rank_pools):
    first, second = rank_pools(2).run(programs.refused)
    assert first == second
    order, flat, weightless, group, vocabulary, fused = first
    assert order.startswith("ValueError: labels have shape (8, 3), expected (3, 8)") and "[b, s]" in order
    assert flat.startswith("ValueError: hidden states have shape (24, 6), expected [s, b, h]")
    assert weightless.startswith("ValueError: lm_head has no weight of its own")
    assert group.startswith("ValueError: tp_group is not lm_head's own")
    assert vocabulary.startswith("ValueError: global_vocab_size is 11, but lm_head has 12 columns")
    assert fused.startswith("ValueError: lm_head adds its weight's gradient to main_grad")
