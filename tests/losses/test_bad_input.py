"""What is wrong is said in one clear sentence: by type, and by the words that name the value."""

from __future__ import annotations

import bad_input_programs as programs
import pytest
import torch
from dense import Problem
from torch import nn

from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing is 1.0, expected 0 <= label_smoothing < 1"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing is -0.1"),
        ({"z_loss_weight": float("nan")}, ValueError, "z_loss_weight is nan, expected a finite number"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index is 1.5, expected an int"),
        ({"ignore_index": True}, TypeError, "ignore_index is True, expected an int"),
    ],
)
def test_loss_options(options, error, words):
    with pytest.raises(error, match=words):
        CrossEntropyLoss(**options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_chunks": 0}, ValueError, "num_chunks is 0, expected at least 1"),
        ({"num_chunks": -3}, ValueError, "num_chunks is -3, expected at least 1"),
        ({"num_chunks": 2.0}, TypeError, "num_chunks is 2.0, expected an int"),
        ({"num_chunks": True}, TypeError, "num_chunks is True, expected an int"),
        ({"accumulation_dtype": torch.bfloat16}, ValueError, "accumulation_dtype is torch.bfloat16"),
        ({"loss": nn.CrossEntropyLoss()}, TypeError, "expected megatron_ce_adaptor.CrossEntropyLoss"),
    ],
)
def test_wrapper_options(options, error, words):
    with pytest.raises(error, match=words):
        ChunkedLossWrapper(**{"loss": CrossEntropyLoss(), **options})


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (Scaled(4, 5), "lm_head is a Scaled, whose forward may compute something else"),
        (nn.Sequential(nn.Linear(4, 5)), "lm_head is a Sequential"),
        (torch.zeros(5, 4), "lm_head is a Tensor, expected a torch.nn.Module"),
        (None, "lm_head is a NoneType"),
    ],
)
def test_heads_that_compute_something_else(head, words):
    with pytest.raises(TypeError, match=words):
        ChunkedLossWrapper(CrossEntropyLoss()).set_lm_head(head)


def test_a_replaced_forward_is_not_overlooked():
    head = nn.Linear(4, 5)
    head.forward = lambda x: nn.Linear.forward(head, x) * 2
    with pytest.raises(TypeError, match="may compute something else"):
        ChunkedLossWrapper(CrossEntropyLoss()).set_lm_head(head)
    later = nn.Linear(4, 5)
    call = ChunkedLossWrapper(CrossEntropyLoss()).set_lm_head(later)
    later.forward = lambda x: nn.Linear.forward(later, x) * 2
    with pytest.raises(TypeError, match="may compute something else"):
        call(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))


def test_no_head_yet():
    with pytest.raises(RuntimeError, match="there is no lm_head yet: call set_lm_head"):
        ChunkedLossWrapper(CrossEntropyLoss())(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))


BAD_CALLS = [
    (
        {"labels": torch.zeros(2, 4, dtype=torch.long)},
        ValueError,
        r"labels have shape \(2, 4\), expected \(2, 3\)",
    ),
    ({"labels": torch.zeros(2, 3)}, TypeError, "labels have dtype torch.float32, expected int64 or int32"),
    ({"labels": torch.zeros(2, 3, dtype=torch.int16)}, TypeError, "labels have dtype torch.int16"),
    ({"labels": torch.zeros(2, 3, dtype=torch.bool)}, TypeError, "labels have dtype torch.bool"),
    ({"labels": [[0, 0, 0]] * 2}, TypeError, "labels are a list, expected a torch.Tensor|labels are a list"),
    ({"labels": torch.full((2, 3), 5)}, ValueError, r"is 5, expected a class in \[0, 5\) or ignore_idx -100"),
    ({"labels": torch.full((2, 3), -1)}, ValueError, "is -1, expected a class"),
    ({"weight": torch.ones(4)}, ValueError, r"weight has shape \(4,\), expected \(5,\)"),
    ({"weight": torch.ones(5, dtype=torch.long)}, TypeError, "weight is (a tensor of )?torch.int64"),
    ({"count": -1}, ValueError, "global_valid_tokens is -1, expected a number of tokens"),
    ({"count": float("nan")}, ValueError, "global_valid_tokens is nan"),
    ({"count": torch.ones(2)}, ValueError, r"global_valid_tokens has shape \(2,\), expected a single number"),
    ({"count": "6"}, TypeError, "global_valid_tokens is '6', expected a number"),
]
BAD_HIDDEN = [
    ({"hidden": torch.zeros(2, 3, 3)}, ValueError, r"hidden states of shape \(6, 3\) do not fit"),
    ({"hidden": torch.zeros(4)}, ValueError, r"hidden has shape \(4,\), expected \[..., H\]"),
    ({"hidden": [1.0]}, TypeError, "hidden is a list, expected a torch.Tensor"),
    (
        {"hidden": torch.zeros(2, 3, 4, dtype=torch.bfloat16)},
        TypeError,
        "cast one of them, or use torch.autocast",
    ),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD_CALLS + BAD_HIDDEN)
def test_chunked_calls(change, error, words):
    change = dict(change)
    call = ChunkedLossWrapper(CrossEntropyLoss(weight=change.pop("weight", None)), num_chunks=2)
    call.set_lm_head(nn.Linear(4, 5))
    hidden = change.pop("hidden", torch.zeros(2, 3, 4))
    with pytest.raises(error, match=words):
        call(hidden, change.pop("labels", torch.zeros(2, 3, dtype=torch.long)), change.pop("count", None))


@pytest.mark.parametrize(("change", "error", "words"), BAD_CALLS)
def test_whole_calls(change, error, words):
    change = dict(change)
    loss_of = CrossEntropyLoss(weight=change.pop("weight", None))
    labels = change.pop("labels", torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(error, match=words):
        loss_of(torch.zeros(2, 3, 5), labels, change.pop("count", None))


def test_on_ranks_all_say_the_same_and_none_hangs(rank_pools):
    first, second = rank_pools(2).run(programs.bad_calls)
    # a label's place is the rank's own where the tokens are split
    assert first == second
    expected = {
        "no reduction named": "ValueError: lm_head is a plain layer whose vocabulary is split over 2 ranks",
        "uneven shards": "ValueError: the vocabulary shards have [5, 4] columns",
        "wrong vocabulary": "ValueError: the vocabulary shards have [5, 4] columns",
        "wrong vocabulary with class weights": "ValueError: the vocabulary shards have [5, 4] columns",
        "uneven shards with class weights": "ValueError: the vocabulary shards have [5, 4] columns",
        "class weight": "ValueError: the class weight has shape (4,), expected (8,)",
        "labels": "ValueError: labels have shape (2, 4), expected (2, 3)",
        "label": "ValueError: target[5] is 8, expected a class in [0, 8)",
        "float labels": "TypeError: labels have dtype torch.float32",
        "plain labels": "ValueError: labels are a plain tensor, but",
        "plain hidden": "TypeError: lm_head's weight is a DTensor",
        "plain head": "TypeError: hidden states are a DTensor and lm_head's weight is a plain tensor",
        "two vocabulary dims": "ValueError: lm_head's weight has placements (Shard(dim=1),)",
        "other mesh": "ValueError: hidden states are on",
        "empty batch": "ValueError: the batch is empty",
        "tp_group with DTensors": "ValueError: global_vocab_size is 9, but lm_head's DTensor weight",
        "Partial logits": "ValueError: ",
        "sharded weight of FSDP": "TypeError: lm_head's weight is a DTensor",
    }
    assert first.keys() == expected.keys()
    for name, words in expected.items():
        assert first[name].startswith(words), f"{name}: {first[name]}"


def test_problem_is_not_empty():
    assert 0 < Problem.make((3, 7), 6, 11).valid < 21
