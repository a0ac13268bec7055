"""Logits, labels and upstream gradients of a case, fp64 results of some of its rows, and calls on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from cases import Case
from peers import Peer
from torch import Tensor

CONFIDENT_LOGIT = 20.0


class _Intermediate(torch.autograd.Function):
    """Gives `logits` back as the result of an operation, as in a model: not a leaf, and its gradient, which
    goes to `keep`, is not copied into a leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, logits: Tensor, keep: list[Tensor]) -> Tensor:
        ctx.keep = keep
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.keep.append(gradient)
        return None, None, None


@dataclasses.dataclass
class Inputs:
    """What every peer is given.

    Attributes:
        master: logits [N, C] of this rank, never handed out.
        work: their copy that is handed out, of the case's strides; a call may overwrite it.
        labels: [N], of the whole vocabulary, valid, the same on all ranks.
        upstream: [N] fp32, a tenth of it zeros.
        checked: how many of the first rows are compared with fp64; the first half of them are confident:
            their target's logit is 20 above the others' mean.
    """

    case: Case
    master: Tensor
    work: Tensor
    labels: Tensor
    upstream: Tensor
    checked: int
    group: Any

    @classmethod
    def make(cls, case: Case, device: torch.device, group: Any = None) -> Inputs:
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        n, c, dtype = case.rows, case.columns, case.torch_dtype
        shared = torch.Generator().manual_seed(n * 1000003 + c)
        labels = torch.randint(0, c * world, (n,), generator=shared)
        upstream = torch.rand(n, generator=shared) + 0.5
        upstream[torch.randperm(n, generator=shared)[: n // 10]] = 0.0
        own = torch.Generator(device=device).manual_seed(n * 7919 + c * 31 + rank)
        master = torch.empty(n, c, dtype=dtype, device=device)
        step = max(1, 2**28 // c)
        for start in range(0, n, step):
            block = master[start : start + step]
            block.copy_(torch.randn(block.shape, generator=own, device=device))
        checked = min(128, n)
        confident = torch.arange(checked // 2)
        local = labels[: checked // 2] - rank * c
        here = (local >= 0) & (local < c)
        master[confident[here].to(device), local[here].to(device)] = CONFIDENT_LOGIT
        stride = c + case.padding
        work = torch.empty(n * stride, dtype=dtype, device=device).as_strided((n, c), (stride, 1))
        return cls(case, master, work, labels.to(device), upstream.to(device), checked, group)

    def restore(self) -> None:
        self.work.copy_(self.master)

    def of_dims(self, peer: Peer) -> tuple[Tensor, Tensor]:
        """(logits, labels) with the peer's number of dimensions, on `work`'s memory."""
        if peer.dims == 2 or (peer.dims == 0 and self.case.batch == 1):
            return self.work, self.labels
        b = self.case.batch
        return self.work.unflatten(0, (-1, b)), self.labels.view(-1, b)


class Call:
    """One peer on one case: `forward` and `backward`, with everything that is not the peer's done before."""

    def __init__(self, peer: Peer, loss_per_token: Callable[..., Tensor], inputs: Inputs) -> None:
        self.peer = peer
        self.loss_per_token = loss_per_token
        self.inputs = inputs
        self._logits, self._labels = inputs.of_dims(peer)
        self._anchor = torch.zeros((), device=inputs.work.device, requires_grad=True)
        self._upstream: dict[tuple[torch.dtype, torch.Size], Tensor] = {}
        self._gradients: list[Tensor] = []
        self._prepared: Tensor | None = None

    def prepare(self) -> None:
        """Before each call: forget the last gradient, make logits that are an intermediate result."""
        self._gradients.clear()
        self._prepared = _Intermediate.apply(self._anchor, self._logits, self._gradients)

    def forward(self) -> Tensor:
        logits, self._prepared = self._prepared, None
        return self.loss_per_token(logits, self._labels, self.inputs.group)

    def backward(self, loss: Tensor) -> None:
        loss.backward(self.upstream_like(loss))

    def upstream_like(self, loss: Tensor) -> Tensor:
        key = (loss.dtype, loss.shape)
        if key not in self._upstream:
            self._upstream[key] = self.inputs.upstream.to(loss.dtype).view(loss.shape)
        return self._upstream[key]

    def both(self) -> Tensor:
        with self.peer.context():
            loss = self.forward()
            self.backward(loss)
        return loss

    def gradient(self) -> Tensor:
        """[N, C] of the last call."""
        (gradient,) = self._gradients
        return gradient.reshape(self.inputs.work.shape)

    def clear(self) -> None:
        self._gradients.clear()


@dataclasses.dataclass
class Exact:
    """fp64 results of the first `checked` rows."""

    loss: Tensor
    gradient: Tensor  # of this rank's columns

    @classmethod
    def of(cls, inputs: Inputs) -> Exact:
        rows, group = inputs.checked, inputs.group
        shard = inputs.master[:rows].contiguous()
        rank, logits = 0, shard
        if group is not None and group.size() > 1:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            torch.distributed.all_gather(shards, shard, group=group)
            rank, logits = group.rank(), torch.cat(shards, 1)
        x = logits.detach().double()
        labels = inputs.labels[:rows, None]
        # without the target's column, so that the loss of a confident token keeps its digits
        target = x.gather(1, labels)
        others = x.scatter(1, labels, -torch.inf).logsumexp(1, keepdim=True)
        loss = torch.nn.functional.softplus(others - target)
        log_total = torch.logaddexp(others, target)
        gradient = (x - log_total).exp().scatter(1, labels, torch.expm1(-loss))
        gradient *= inputs.upstream[:rows, None].double()
        c = inputs.case.columns
        return cls(loss[:, 0], gradient[:, rank * c : (rank + 1) * c])


def errors(call: Call, loss: Tensor, exact: Exact) -> dict[str, float]:
    """Largest absolute loss error and relative gradient error, of ordinary and of confident rows.

    The gradient error is ||g - exact|| / ||exact|| over the rows; NaN anywhere gives NaN.
    """
    rows = call.inputs.checked
    half = rows // 2
    loss_error = (loss.detach().reshape(-1)[:rows].double() - exact.loss).abs()
    difference = call.gradient().detach()[:rows].double() - exact.gradient
    group = call.inputs.group
    found = {}
    for name, chosen in (("confident_", slice(0, half)), ("", slice(half, rows))):
        squares = torch.stack([difference[chosen].square().sum(), exact.gradient[chosen].square().sum()])
        if group is not None and group.size() > 1:
            torch.distributed.all_reduce(squares, group=group)
        found[f"{name}loss_error"] = float(loss_error[chosen].max())
        found[f"{name}gradient_error"] = float((squares[0] / squares[1]).sqrt())
    return found
