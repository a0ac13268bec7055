"""What a measured implementation of the cross entropy is: one common shape for ours and everyone else's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
FLOATS = (torch.bfloat16, torch.float32)


class LossPerToken(Protocol):
    """Loss of each token, differentiable with respect to the logits, which are not a leaf.

    logits: [N, V/W] or, for a peer with `dims` 3, [N, 1, V/W]; labels: [N] or [N, 1] int64 of the whole
    vocabulary; group: the W ranks over which the vocabulary is split, None on one rank.
    """

    def __call__(self, logits: Tensor, labels: Tensor, group: Any = None) -> Tensor: ...


class PeerMissing(Exception):
    """This peer cannot be measured here; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """One implementation.

    Attributes:
        name: as in the tables.
        version: of the published package; read when the peer is loaded.
        make: loads the implementation; raises PeerMissing, ImportError or OSError with what is missing.
        dims: the number of dimensions its logits have; 0: it takes both, and gets [s, b, V] in a case with a
            batch, [N, V] in others.
        in_place: the gradient takes the logits' memory (in a table: no extra memory is expected).
        saves: what is kept from forward to backward, in words.
        devices: torch device types it runs on.
        dtypes: of the logits.
        splits_vocabulary: it can compute over logits split across ranks.
        only_split: it exists for split vocabularies only.
        needs_process_group: torch.distributed must be initialised, on one rank too.
        compiles: it goes through torch.compile, so each shape is compiled for itself.
        ours: it is this package's.
        declines: why it does not take logits of (columns, elements from row to row, dtype), or None. What it
            declares here is no missing comparison; an error while it runs is.
        context: entered around forward and backward.
    """

    name: str
    version: Callable[[], str]
    make: Callable[[], LossPerToken]
    dims: int = 2
    in_place: bool = False
    saves: str = ""
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    splits_vocabulary: bool = False
    only_split: bool = False
    needs_process_group: bool = False
    compiles: bool = False
    ours: bool = False
    declines: Callable[[int, int, torch.dtype], str | None] = lambda columns, stride, dtype: None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def available(self, device: str, world_size: int = 1) -> str | None:
        """Why it cannot run on such a device with so many ranks, or None if it can."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if world_size > 1 and not self.splits_vocabulary:
            return "has no split vocabulary"
        if world_size == 1 and self.only_split:
            return "is for split vocabularies only"
        try:
            self.make()
        except PeerMissing as reason:
            return str(reason)
        except Exception as error:  # whatever a foreign package raises when it is imported
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return None
