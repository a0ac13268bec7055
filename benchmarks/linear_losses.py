"""Everyone who computes an output layer and its cross entropy together, behind one shape.

A `LinearLoss` is given hidden states [N, H], a weight [V, H] and labels [N], and returns the mean loss, which
is differentiable once with respect to both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from peers import liger, torchtitan
from peers.base import PeerMissing
from peers.loading import import_from, package_folder, private_module
from torch import Tensor, nn

CCE_VERSION = "25.1.1"

Mean = Callable[[Tensor, nn.Parameter, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class LinearLoss:
    """One way to compute it.

    Attributes:
        name: as in the table; ours begin with "ours".
        make: loads it; raises PeerMissing or ImportError with what is missing.
        chunks: into how many the tokens are cut, where that is told it; None: it decides itself or does not
            cut.
        devices, dtypes: what it runs on.
        slow: measured a few times only.
    """

    name: str
    make: Callable[[], Mean]
    chunks: int | None = None
    devices: tuple[str, ...] = ("cuda", "cpu")
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    slow: bool = False

    @property
    def ours(self) -> bool:
        return self.name.startswith("ours")

    def missing(self, device: str, dtype: torch.dtype) -> str | None:
        """Why it cannot be measured here, or None."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if dtype not in self.dtypes:
            return f"not for {dtype}"
        try:
            self.make()
        except PeerMissing as reason:
            return str(reason)
        except Exception as error:  # whatever a foreign package raises when it is imported
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return None


def linear_losses(chunks: tuple[int, ...], peer_chunks: int) -> list[LinearLoss]:
    """Ours without chunks, in each number of chunks, and in variants; then the others."""
    cut = [
        LinearLoss(f"ours, {c} chunks", functools.partial(_ours_chunked, c, None), chunks=c) for c in chunks
    ]
    middle = 4 if 4 in chunks else chunks[len(chunks) // 2]
    variants = [
        LinearLoss(
            f"ours, {middle} chunks, fp32 accumulation",
            functools.partial(_ours_chunked, middle, torch.float32),
            chunks=middle,
            dtypes=(torch.bfloat16,),
        ),
        LinearLoss(
            f"ours, {middle} chunks, recomputed in backward",
            functools.partial(_ours_per_token, middle),
            chunks=middle,
        ),
    ]
    gpu = ("cuda",)
    return [
        LinearLoss("ours, not cut, in place", functools.partial(_ours_whole, True)),
        LinearLoss("ours, not cut", functools.partial(_ours_whole, False)),
        *cut,
        *variants,
        LinearLoss("torch eager", lambda: functools.partial(_torch_mean, False)),
        LinearLoss(
            "torch eager, fp32 upcast",
            lambda: functools.partial(_torch_mean, True),
            dtypes=(torch.bfloat16,),
        ),
        LinearLoss("torch.compile, fp32 upcast", _compiled, devices=gpu),
        LinearLoss(
            f"TorchTitan, {peer_chunks} chunks",
            functools.partial(torchtitan_chunked, peer_chunks),
            peer_chunks,
        ),
        LinearLoss("Liger fused linear", _liger, devices=gpu),
        LinearLoss("Apple CCE", _apple, devices=gpu, dtypes=(torch.bfloat16,), slow=True),
    ]


def _head(weight: nn.Parameter) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = weight
    return head


def _ours_chunked(chunks: int, accumulation_dtype: torch.dtype | None) -> Mean:
    from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss

    criterion = ChunkedLossWrapper(
        CrossEntropyLoss(bare=True), num_chunks=chunks, accumulation_dtype=accumulation_dtype
    )

    def mean(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
        loss = criterion.set_lm_head(_head(weight))(hidden, labels, labels.numel())
        assert isinstance(loss, Tensor)
        return loss

    return mean


def _ours_per_token(chunks: int) -> Mean:
    from megatron_ce_adaptor.chunked.linear_loss import LinearLossOptions, loss_per_token
    from megatron_ce_adaptor.vocab_shard import VocabShard

    def mean(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
        options = LinearLossOptions(
            shard=VocabShard.of_equal_shards(None, weight.shape[0]),
            chunk_tokens=-(-labels.numel() // chunks),
        )
        return loss_per_token(hidden, weight, labels, options)[0].mean()

    return mean


def _ours_whole(overwrite_input: bool) -> Mean:
    from megatron_ce_adaptor import parallel_cross_entropy

    def mean(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
        loss = parallel_cross_entropy(F.linear(hidden, weight), labels, overwrite_input=overwrite_input)
        assert isinstance(loss, Tensor)
        return loss.mean()

    return mean


def _torch_mean(upcast: bool, hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float() if upcast else logits, labels)


def _compiled() -> Mean:
    return torch.compile(functools.partial(_torch_mean, True), dynamic=False)


def _liger() -> Mean:
    (module,) = import_from("liger_kernel", liger.VERSION, "liger_kernel.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction

    def mean(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
        return function.apply(hidden, weight, labels)[0]

    return mean


def _apple() -> Mean:
    (module,) = import_from("cut_cross_entropy", CCE_VERSION, "cut_cross_entropy")

    def mean(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
        return module.linear_cross_entropy(hidden, weight, labels)

    return mean


class _Configurable:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        pass


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


class _NoTypeChecks:
    """Stands for spmd_types, whose checks are off by default."""

    local = no_typecheck = staticmethod(_nothing)

    @staticmethod
    def is_type_checking() -> bool:
        return False

    @staticmethod
    def register_autograd_function(function: type) -> type:
        return function


def torchtitan_chunked(chunks: int) -> Mean:
    """TorchTitan's ChunkedLossWrapper around its CrossEntropyLoss, from its own file."""
    path = package_folder("torchtitan", torchtitan.VERSION) / "torchtitan/components/loss.py"
    provided = {
        "spmd": _NoTypeChecks,
        "CompileConfig": None,
        "Configurable": _Configurable,
        "current_spmd_mesh": None,
        "spmd_mesh_size": lambda name: 1,
        "get_spmd_backend": lambda: "default",
        "logger": None,
    }
    module = private_module("_peer_torchtitan_loss", path, provided)
    loss = module.CrossEntropyLoss(SimpleNamespace(global_vocab_size=None))
    config = SimpleNamespace(num_chunks=chunks, loss_fn=SimpleNamespace(build=lambda compile_config: loss))
    wrapper: Any = module.ChunkedLossWrapper(config)

    def mean(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
        wrapper.set_lm_head(_head(weight))
        return wrapper(hidden[None], labels[None], float(labels.numel()))[0]

    return mean
