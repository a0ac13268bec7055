"""Bad input on every rank: each case must raise one clear sentence on all of them. Imported on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_cases import FOUR, Case, cut, example, mesh_of
from mesh_checks import Checks, Outcome
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron_ce_adaptor import (
    gather_tensor_parallel_logits,
    loss_parallel,
    loss_parallel_cross_entropy,
)

BadInput = tuple[str, type[Exception], list[str], Callable[[], object]]
BATCH_TP = FOUR[1]


def in_context(
    logits: Tensor, labels: Tensor, *args: Any, mesh: Any = None, strict: Any = True, **options: Any
):
    with loss_parallel(mesh=mesh, strict=strict):
        return F.cross_entropy(logits, labels, *args, **options)


def both(logits: Tensor, labels: Tensor, **options: Any) -> list[tuple[str, Callable[[], object]]]:
    """The context and the direct API, which must refuse alike."""
    return [
        ("context", partial(in_context, logits, labels, **options)),
        ("direct", partial(loss_parallel_cross_entropy, logits, labels, **options)),
    ]


def distributed_cases() -> list[BadInput]:
    mesh, other, twice = mesh_of(BATCH_TP), mesh_of(FOUR[0]), mesh_of(FOUR[-1])
    dense = example(Case(BATCH_TP, (8, 16), "none"))
    x, y = dense.logits, dense.labels
    sharded, halves = [Shard(0), Shard(1)], [Shard(0), Replicate()]
    good, labels = cut(x, mesh, sharded), cut(y, mesh, halves)
    partial_logits = DTensor.from_local(good.to_local(), mesh, [Partial(), Shard(1)], run_check=False)
    partial_labels = DTensor.from_local(y, mesh, [Partial(), Replicate()], run_check=False)
    unsplit = cut(x, mesh, halves)
    empty = cut(x[:0], mesh, sharded)
    no_labels = cut(y[:0], mesh, halves)
    weight = torch.ones(15)
    cases: list[tuple[str, type[Exception], list[str], list[tuple[str, Callable[[], object]]]]] = [
        ("no TP dimension", ValueError, ["no mesh dimension shards the classes", "Shard(dim=0)"],
         both(unsplit, labels)),
        ("two TP dimensions", ValueError, ["mesh dimensions [0, 1] shard the classes", "2x2"],
         both(cut(x, mesh, [Shard(1), Shard(1)]), labels)),
        ("Partial logits", ValueError, ["mesh dimension 0 is Partial(sum)"], both(partial_logits, labels)),
        ("Partial labels", ValueError, ["labels have placements (Partial(sum), Replicate())"],
         both(good, partial_labels)),
        ("plain labels on a sharded batch", ValueError, ["labels are a plain tensor", "Shard(dim=0)"],
         both(good, y)),
        ("labels sharded elsewhere", ValueError, ["labels have placements", "takes communication"],
         both(good, cut(y, mesh, [Replicate(), Shard(0)]))),
        ("a later cut first", ValueError, ["labels have placements", "takes communication"],
         both(cut(x, twice, [Shard(0), Shard(0), Shard(1)]),
              cut(y, twice, [Replicate(), Shard(0), Replicate()]))),
        ("labels on another mesh", ValueError, ["labels are on mesh 4", "logits on mesh 2x2"],
         both(good, cut(y, other, [Replicate()]))),
        ("wrong length", ValueError, ["labels have shape (7,), expected (8,)"],
         both(good, cut(y[:7], mesh, halves))),
        ("float targets", TypeError, ["torch.float64", "class probabilities"], both(good, good)),
        ("int16 labels", TypeError, ["torch.int16"], both(good, cut(y.to(torch.int16), mesh, halves))),
        ("empty batch", ValueError, ["the batch is empty", "(0, 16)"], both(empty, no_labels)),
        ("class weight of the wrong length", ValueError, ["weight has shape (15,), expected (16,)"],
         both(good, labels, weight=weight)),
        ("integer class weight", TypeError, ["weight is a tensor of torch.int64"],
         both(good, labels, weight=torch.ones(16, dtype=torch.int64))),
        ("sharded class weight", ValueError, ["weight has placements", "Replicate on every dimension"],
         both(good, labels, weight=cut(torch.ones(16), mesh, [Replicate(), Shard(0)]))),
        ("reduction", ValueError, ["reduction is 'median'"], both(good, labels, reduction="median")),
        ("label smoothing", ValueError, ["label_smoothing is 1.5"], both(good, labels, label_smoothing=1.5)),
        ("wrong mesh", ValueError, ["mesh=mesh 4 (tp0) was given", "mesh 2x2"],
         [("context", partial(in_context, good, labels, mesh=other)),
          ("not strict", partial(in_context, good, labels, mesh=other, strict=False))]),
        ("two TP dimensions, not strict", ValueError, ["mesh dimensions [0, 1]"],
         [("context", partial(in_context, cut(x, mesh, [Shard(1), Shard(1)]), labels, strict=False))]),
        ("Partial logits, not strict", ValueError, ["Partial(sum)"],
         [("context", partial(in_context, partial_logits, labels, strict=False))]),
        ("plain logits, DTensor labels", TypeError, ["plain tensor"], both(x, labels)),
        ("wrong vocabulary size", ValueError, ["global_vocab_size is 17", "16 classes"],
         [("direct", partial(loss_parallel_cross_entropy, good, labels, global_vocab_size=17)),
          ("gather", partial(gather_tensor_parallel_logits, good, global_vocab_size=17))]),
        ("another group", ValueError, ["tp_group is not the group of mesh dimension 1"],
         [("direct", partial(loss_parallel_cross_entropy, good, labels, dist.group.WORLD)),
          ("gather", partial(gather_tensor_parallel_logits, good, dist.group.WORLD))]),
        ("statistics of a sum", ValueError, ["return_statistics=True with reduction='sum'"],
         [("direct", partial(loss_parallel_cross_entropy, good, labels, reduction="sum",
                             return_statistics=True))]),
        ("gather without TP", ValueError, ["no mesh dimension shards"],
         [("gather", partial(gather_tensor_parallel_logits, unsplit))]),
    ]  # fmt: skip
    return [
        (f"{name}, {door}", kind, words, call) for name, kind, words, calls in cases for door, call in calls
    ]


def plain_cases(rank: int) -> list[BadInput]:
    """Plain shards of 17 classes on 4 ranks: 5, 5, 5, 2."""
    group, direct = dist.group.WORLD, loss_parallel_cross_entropy
    sizes = [5, 5, 5, 2]
    logits, labels = torch.randn(6, sizes[rank]), torch.tensor([0, 16, 3, -100, 9, 4])
    described = ["[5, 5, 5, 2] columns on the ranks of the group", "a vocabulary of 18"]
    return [
        ("18 of 17 classes", ValueError, described, partial(direct, logits, labels, group, 18)),
        ("16 of 17 classes", ValueError, ["a vocabulary of 16", "[4, 4, 4, 4]"],
         partial(direct, logits, labels, group, 16, torch.ones(16), label_smoothing=0.1)),
        ("gather 18 of 17", ValueError, described, partial(gather_tensor_parallel_logits, logits, group, 18)),
        ("size not given", ValueError, ["[5, 5, 5, 2]"], partial(direct, logits, labels, group)),
        ("size not given, class weight that fits some", ValueError, ["[5, 5, 5, 2]"],
         partial(direct, logits, labels, group, None, torch.ones(20), label_smoothing=0.1)),
        ("the same, mean", ValueError, ["[5, 5, 5, 2]"],
         partial(direct, logits, labels, group, None, torch.ones(8), reduction="mean")),
        ("class weight of another vocabulary", ValueError, ["has shape (8,), expected (20,)"],
         partial(direct, torch.randn(6, 5), labels, group, None, torch.ones(8))),
        ("class weight of no equal shards", ValueError, ["weight has shape (17,), expected"],
         partial(direct, logits, labels, group, None, torch.ones(17))),
        ("no group", ValueError, [f"{sizes[rank]} columns", "tp_group"],
         partial(direct, logits, labels, None, 17)),
        ("size 0", ValueError, ["is 0, expected at least 1"], partial(direct, logits, labels, group, 0)),
        ("size None-like", TypeError, ["global_vocab_size is 17.0"],
         partial(direct, logits, labels, group, 17.0)),
        ("group by name", TypeError, ["'tp'"], partial(direct, logits, labels, "tp", 17)),
        ("wrong length", ValueError, ["(5,)", "(6,)"], partial(direct, logits, labels[:5], group, 17)),
        ("no classes dimension", ValueError, ["scalar"],
         partial(direct, torch.tensor(1.0), torch.tensor(0), group, 17)),
        ("empty batch", ValueError, ["the batch is empty"],
         partial(direct, logits[:0], labels[:0], group, 17, reduction="mean")),
        ("label 17 of 17", ValueError, ["is 17", "[0, 17)"],
         partial(direct, logits, labels.clone().fill_(17), group, 17)),
        ("integer logits to gather", TypeError, ["torch.int64"],
         partial(gather_tensor_parallel_logits, labels, group, 17)),
    ]  # fmt: skip


def from_local_without_shape() -> BadInput:
    """Uneven shards that DTensor.from_local took to be even: each rank believes in another vocabulary."""
    mesh = mesh_of(BATCH_TP)
    place = mesh.get_local_rank(1)
    local = torch.randn(4, [9, 8][place])
    logits = DTensor.from_local(local, mesh, [Replicate(), Shard(1)], run_check=False)
    labels = cut(torch.zeros(4, dtype=torch.int64), mesh, [Replicate(), Replicate()])
    words = ["[9, 8] columns on the ranks", "DTensor.from_local the global shape"]
    return "from_local", ValueError, words, partial(loss_parallel_cross_entropy, logits, labels)


def label_out_of_range_on_one_rank(rank: int) -> BadInput:
    """A mean must not leave the other half of the batch waiting for its count."""
    mesh = mesh_of(BATCH_TP)
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 16, 7])
    logits = cut(torch.randn(8, 16), mesh, [Shard(0), Shard(1)])
    words = ["target[2] is 16"] if rank >= 2 else ["1 labels on other ranks of the batch"]
    return (
        "label 16 of 16",
        ValueError,
        words,
        partial(in_context, logits, cut(labels, mesh, [Shard(0), Replicate()])),
    )


def all_refused(rank: int) -> Outcome:
    checks = Checks()
    cases = [*distributed_cases(), *plain_cases(rank), from_local_without_shape()]
    for name, kind, words, call in [*cases, label_out_of_range_on_one_rank(rank)]:
        checks.raises(kind, words, call, name)
    # No rank waits in a collective that another one left out.
    mesh = mesh_of(BATCH_TP)
    dense = example(Case(BATCH_TP, (8, 16), "sum"))
    logits = cut(dense.logits, mesh, [Shard(0), Shard(1)])
    loss = loss_parallel_cross_entropy(
        logits, cut(dense.labels, mesh, [Shard(0), Replicate()]), reduction="sum"
    )
    checks.close(loss.full_tensor(), dense.loss, 1e-11, "a good call afterwards")
    return checks.outcome


def labels_cut_for_free(rank: int) -> Outcome:
    """Replicated labels are cut to this rank's batch without communication; the result is the same."""
    checks = Checks()
    mesh = mesh_of(BATCH_TP)
    dense = example(Case(BATCH_TP, (9, 17), "sum", ignored="some"))
    logits = cut(dense.logits, mesh, [Shard(0), Shard(1)])
    labels = cut(dense.labels, mesh, [Replicate(), Replicate()])
    loss = in_context(logits, labels, reduction="sum")
    checks.close(loss.full_tensor(), dense.loss, 1e-11, "replicated labels")
    legacy = in_context(logits, labels, size_average=False)
    checks.close(legacy.full_tensor(), dense.loss, 1e-11, "PyTorch's deprecated arguments")
    whole = cut(dense.logits, mesh, [Replicate(), Shard(1)])
    checks.close(
        in_context(whole, dense.labels, reduction="sum").full_tensor(), dense.loss, 1e-11, "plain labels"
    )
    weight = torch.rand(17, dtype=torch.float64) * 0 + 2
    for given in (weight, cut(weight, mesh, [Replicate(), Replicate()])):
        loss = in_context(logits, labels, given, reduction="sum")
        checks.close(loss.full_tensor(), dense.loss * 2, 1e-11, "class weight")
    return checks.outcome
