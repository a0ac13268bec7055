"""Calls that must raise, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

from megatron_ce_adaptor.mindspore import (
    ChunkedLossWrapper,
    CrossEntropyLoss,
    gather_tensor_parallel_logits,
    loss_parallel_cross_entropy,
    parallel_cross_entropy,
)

# name -> (type, a part of the message)
EXPECTED = {
    "shards of unequal sizes": ("ValueError", "columns on the ranks of the group, expected the same number"),
    "a wrong vocabulary size": ("ValueError", "pass the right global_vocab_size"),
    "gather: a wrong vocabulary size": ("ValueError", "pass the right global_vocab_size"),
    "class weights of another vocabulary": (
        "ValueError",
        "one for each class of the whole vocabulary",
    ),
    "class weights and unequal shards": ("ValueError", "columns on the ranks of the group"),
    "class weights are integers": ("TypeError", "expected a floating-point tensor of class weights"),
    "label out of range": ("ValueError", "target[1] is 99, expected a class in"),
    "negative label": ("ValueError", "target[2] is -1, expected a class in"),
    "float labels": ("TypeError", "expected int64 or int32 class ids"),
    "integer logits": ("TypeError", "expected float16, bfloat16, float32 or float64 logits"),
    "no tensor": ("TypeError", "is a ndarray, expected a mindspore.Tensor"),
    "labels of another shape": ("ValueError", "one for each row of the logits"),
    "four dimensions": ("ValueError", "expected [N, V], [b, s, V] or [s, b, V]"),
    "too few labels": ("ValueError", "3 labels, expected one for each of the 4 rows"),
    "smoothing": ("ValueError", "label_smoothing is 1.0, expected 0 <= label_smoothing < 1"),
    "z-loss": ("ValueError", "z_loss_weight is nan, expected a finite number"),
    "ignore_index": ("TypeError", "ignore_index is 1.5, expected an int"),
    "reduction": ("ValueError", "reduction is 'average', expected one of none, sum, mean"),
    "statistics of a sum": ("ValueError", "statistics are per token"),
    "vocabulary size 0": ("ValueError", "(global_vocab_size) is 0, expected at least 1"),
    "vocabulary size a float": ("TypeError", "global_vocab_size is 8.0, expected an int"),
    "unsplit of another size": ("ValueError", "but it is on one rank"),
    "an unknown group": ("ValueError", "does not contain this process"),
    "a group that is no name": ("TypeError", "expected the name of a MindSpore communication group"),
    "an empty batch's mean": ("ValueError", "the batch is empty"),
    "overwriting": ("NotImplementedError", "overwrite_input=True is not supported on MindSpore"),
    "second derivative": ("RuntimeError", "has no second derivative"),
    "second derivative of the chunked loss": ("RuntimeError", "the chunked loss has no second derivative"),
    "valid tokens": ("ValueError", "global_valid_tokens is -1, expected a number of tokens"),
    "no lm_head": ("RuntimeError", "call set_lm_head(model.lm_head) first"),
    "another layer": ("TypeError", "expected a mindspore.nn.Dense without activation"),
    "a layer with activation": ("TypeError", "expected a mindspore.nn.Dense without activation"),
    "hidden gradient not said": ("ValueError", "say ChunkedLossWrapper(..., reduce_hidden_gradient=True)"),
    "hidden of another width": ("ValueError", "their last dimensions must be equal"),
    "hidden of another dtype": ("TypeError", "cast one of them"),
    "another loss": ("TypeError", "expected megatron_ce_adaptor.mindspore.CrossEntropyLoss"),
    "chunked: a wrong vocabulary size": ("ValueError", "pass the right global_vocab_size"),
    "chunked: label out of range": ("ValueError", "target[1] is 99, expected a class in"),
}


def calls(group: str, world_size: int, rank: int) -> dict[str, Callable[[], Any]]:
    logits, labels = Tensor(np.ones((4, 4)), ms.float32), Tensor(np.array([0, 1, 2, 3]))
    odd = Tensor(np.ones((4, 4 + (rank == 0))), ms.float32)  # the first rank alone has another size
    total = 4 * world_size
    weight = Tensor(np.ones(total), ms.float32)
    loss = loss_parallel_cross_entropy
    bad_labels = Tensor(np.array([0, 99, 2, 3]))
    hidden = Tensor(np.ones((4, 3)), ms.float32)
    head = mint.nn.Linear(3, 4)
    split = CrossEntropyLoss(tp_group=group)
    described = CrossEntropyLoss(tp_group=group, global_vocab_size=total + 1)

    def chunked(criterion: CrossEntropyLoss, layer: Any = head, reduce: bool | None = True) -> Any:
        return ChunkedLossWrapper(criterion, 2, reduce_hidden_gradient=reduce).set_lm_head(layer)

    def twice(x: Tensor) -> Tensor:
        return ms.grad(lambda y: loss(y, labels, group).sum())(x).sum()

    def twice_chunked(x: Tensor) -> Tensor:
        criterion = chunked(CrossEntropyLoss(tp_group=group, bare=True))
        return ms.grad(lambda y: criterion(y, labels))(x).sum()

    return {
        "shards of unequal sizes": lambda: parallel_cross_entropy(odd, labels, dist_process_group=group),
        "a wrong vocabulary size": lambda: loss(odd, labels, group, total),
        "gather: a wrong vocabulary size": lambda: gather_tensor_parallel_logits(odd, group, total),
        "class weights of another vocabulary": lambda: loss(
            logits, labels, group, weight=Tensor(np.ones(total + 1), ms.float32)
        ),
        "class weights and unequal shards": lambda: loss(odd, labels, group, weight=weight),
        "class weights are integers": lambda: loss(
            logits, labels, group, weight=Tensor(np.ones(total, np.int64))
        ),
        "label out of range": lambda: loss(logits, bad_labels, group),
        "negative label": lambda: parallel_cross_entropy(
            logits, Tensor(np.array([0, 1, -1, 3])), dist_process_group=group
        ),
        "float labels": lambda: loss(logits, labels.astype(ms.float32), group),
        "integer logits": lambda: loss(logits.astype(ms.int32), labels, group),
        "no tensor": lambda: loss(np.ones((4, 4)), labels, group),
        "labels of another shape": lambda: loss(logits, labels.reshape(2, 2), group),
        "four dimensions": lambda: parallel_cross_entropy(logits.reshape(1, 2, 2, 4), labels),
        "too few labels": lambda: parallel_cross_entropy(logits, labels[:3]),
        "smoothing": lambda: loss(logits, labels, group, label_smoothing=1.0),
        "z-loss": lambda: parallel_cross_entropy(logits, labels, z_loss_weight=float("nan")),
        "ignore_index": lambda: loss(logits, labels, group, ignore_index=1.5),  # type: ignore[arg-type]
        "reduction": lambda: loss(logits, labels, group, reduction="average"),
        "statistics of a sum": lambda: loss(logits, labels, group, reduction="sum", return_statistics=True),
        "vocabulary size 0": lambda: loss(logits, labels, group, 0),
        "vocabulary size a float": lambda: loss(logits, labels, group, 8.0),  # type: ignore[arg-type]
        "unsplit of another size": lambda: loss(logits, labels, None, 5),
        "an unknown group": lambda: loss(logits, labels, "nobody"),
        "a group that is no name": lambda: loss(logits, labels, 3),
        "an empty batch's mean": lambda: loss(logits[:0], labels[:0], group, reduction="mean"),
        "overwriting": lambda: parallel_cross_entropy(logits, labels, overwrite_input=True),
        "second derivative": lambda: ms.grad(twice)(logits).asnumpy(),
        "second derivative of the chunked loss": lambda: ms.grad(twice_chunked)(hidden).asnumpy(),
        "valid tokens": lambda: split(logits, labels, -1),
        "no lm_head": lambda: ChunkedLossWrapper(split)(hidden, labels),
        "another layer": lambda: chunked(split, nn.LayerNorm((3,))),
        "a layer with activation": lambda: chunked(split, nn.Dense(3, 4, activation="relu")),
        "hidden gradient not said": lambda: chunked(split, reduce=None)(hidden, labels),
        "hidden of another width": lambda: chunked(split)(hidden[:, :2], labels),
        "hidden of another dtype": lambda: chunked(split)(hidden.astype(ms.float16), labels),
        "another loss": lambda: ChunkedLossWrapper(nn.CrossEntropyLoss()),  # type: ignore[arg-type]
        "chunked: a wrong vocabulary size": lambda: chunked(described)(hidden, labels),
        "chunked: label out of range": lambda: chunked(split)(hidden, bad_labels),
    }
