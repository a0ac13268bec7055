"""The chunked loss of a DTensor output layer: which of its mesh dimensions split the vocabulary and which the
tokens, and what the gradients' placements are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from megatron_ce_adaptor.chunked.exchange import NoExchange
from megatron_ce_adaptor.chunked.heads import LocalProblem, Vocabulary
from megatron_ce_adaptor.dtensor.layout import LogitsLayout, local_labels, logits_layout


def dtensor_problem(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocabulary: Vocabulary
) -> LocalProblem:
    """See `heads.local_problem`.

    The hidden states' gradient is Partial on the mesh dimension that splits the vocabulary and the weight's
    on those that split the tokens, so that DTensor adds each up once, where it first has to.

    Collectives: where the hidden states are not Replicate on the vocabulary's mesh dimension, they are made
    so (one all-gather for Shard), and DTensor does the reverse to their gradient.

    Returns:
        A problem whose `wrap` gives a plain tensor for plain labels, which are accepted where the tokens are
        not split, and for DTensor labels a 0-d DTensor: Partial where the tokens are split, else Replicate.
    """
    assert isinstance(hidden, DTensor) and isinstance(weight, DTensor)
    _check_weight(hidden, weight, vocabulary)
    if hidden.numel() == 0:
        raise ValueError(
            f"the batch is empty: hidden states have shape {tuple(hidden.shape)}, expected at least one "
            "token."
        )
    mesh = weight.device_mesh
    of_weight = logits_layout(weight, 0, require_sharded_vocab=False)
    tp = of_weight.tp_dim
    last = hidden.dim() - 1
    placements = [_of_tokens(p, d == tp, last) for d, p in enumerate(hidden.placements)]
    if list(hidden.placements) != placements:
        hidden = hidden.redistribute(mesh, placements)
    layout = LogitsLayout(
        mesh=mesh,
        placements=tuple(Shard(last) if d == tp else p for d, p in enumerate(placements)),
        class_dim=last,
        tp_dim=tp,
        shard=of_weight.shard,
        label_shape=hidden.shape[:-1],
        label_placements=tuple(placements),
    )
    targets = local_labels(labels, layout)
    hidden_gradient = [Partial() if d == tp else p for d, p in enumerate(placements)]
    weight_gradient = [
        Shard(0) if d == tp else Replicate() if p.is_replicate() else Partial()
        for d, p in enumerate(placements)
    ]
    local_bias = None
    if bias is not None:
        if not isinstance(bias, DTensor):
            raise TypeError("lm_head's weight is a DTensor and its bias a plain tensor: distribute both.")
        if bias.placements != weight.placements:
            bias = bias.redistribute(mesh, weight.placements)
        local_bias = _LocalPart.apply(bias, weight_gradient)
    local = _LocalPart.apply(hidden, hidden_gradient)

    def wrap(total: Tensor) -> Tensor:
        if not isinstance(labels, DTensor):
            return total
        return DTensor.from_local(total, mesh, layout.summed_placements, run_check=False)

    return LocalProblem(
        local.reshape(-1, local.shape[-1]),
        _LocalPart.apply(weight, weight_gradient),
        local_bias,
        targets.reshape(-1),
        of_weight.shard,
        NoExchange(),
        wrap,
    )


class _LocalPart(torch.autograd.Function):
    """This rank's part of a DTensor, whose gradient has the given placements.

    As `DTensor.to_local`, which however reckons the gradient's global strides from this rank's sizes: wrong
    ones where shards are uneven.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: list[Placement]) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, grad_placements
        ctx.shape, ctx.stride = tensor.shape, tensor.stride()
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        whole = DTensor.from_local(
            grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )
        return whole, None


def _of_tokens(placement: Placement, splits_vocabulary: bool, last: int) -> Placement:
    """The placement that the hidden states must have: whole rows, and all tokens where the vocabulary is
    split."""
    dim = getattr(placement, "dim", None) if not placement.is_partial() else None
    if splits_vocabulary or placement.is_partial() or dim == last:
        return Replicate()
    return placement


def _check_weight(hidden: DTensor, weight: DTensor, vocabulary: Vocabulary) -> None:
    if hidden.device_mesh != weight.device_mesh:
        raise ValueError(
            f"hidden states are on {hidden.device_mesh} and lm_head's weight on {weight.device_mesh}: both "
            "must be on one mesh."
        )
    split = [d for d, p in enumerate(weight.placements) if p == Shard(0)]
    others = [p for p in weight.placements if p != Shard(0) and not p.is_replicate()]
    if others or len(split) > 1:
        raise ValueError(
            f"lm_head's weight has placements {tuple(weight.placements)}, expected Shard(0) (its rows are "
            "the vocabulary) on at most one mesh dimension and Replicate on the others."
        )
    if vocabulary.tp_group is not None and (
        not split or vocabulary.tp_group is not weight.device_mesh.get_group(split[0])
    ):
        raise ValueError(
            "tp_group is not the group of the mesh dimension that shards lm_head's weight: leave tp_group "
            "out for DTensors."
        )
    total = vocabulary.global_vocab_size
    if total is not None and total != weight.shape[0]:
        raise ValueError(
            f"global_vocab_size is {total}, but lm_head's DTensor weight has {weight.shape[0]} rows: leave "
            "it out for DTensors."
        )
