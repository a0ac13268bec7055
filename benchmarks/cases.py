"""The shapes that are measured: logits [rows, columns] of one rank."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Case:
    """Logits of one rank.

    Attributes:
        rows: tokens.
        columns: of this rank's part of the vocabulary.
        dtype: "bf16" or "fp32".
        padding: columns between the end of a row and the next row (strided logits if not 0).
        host: host time is measured, too.
        batch: the rows are [rows / batch, batch] for peers with three dimensions.
    """

    rows: int
    columns: int
    dtype: str = "bf16"
    padding: int = 0
    host: bool = False
    batch: int = 1

    @property
    def name(self) -> str:
        rows = f"{self.rows // self.batch}x{self.batch}" if self.batch > 1 else f"{self.rows}"
        strided = f" strided by {self.columns + self.padding}" if self.padding else ""
        return f"{rows}x{self.columns} {self.dtype}{strided}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.torch_dtype.itemsize

    @property
    def large(self) -> bool:
        """The bandwidth goals are for these."""
        return self.rows >= 4096 and self.columns >= 32000

    @property
    def regular(self) -> bool:
        """Contiguous, and every row starts at a multiple of 16 bytes."""
        return self.padding == 0 and self.columns * self.torch_dtype.itemsize % 16 == 0


# (rows, columns) that one GPU is measured at in bf16; fp32 at those that fit beside a copy for every peer
_LARGE = ((8192, 32000), (8192, 50304), (8192, 128256), (4096, 151936), (16384, 129280))
_SMALL = ((256, 4096), (2048, 8192))
_ODD = ((8192, 32001), (8192, 50257))
_FP32 = ((256, 4096), (2048, 8192), (8192, 32000), (8192, 50304), (8192, 128256), (4096, 151936))

CUDA_CASES = (
    *(Case(n, v, host=True) for n, v in _SMALL),
    *(Case(n, v) for n, v in _LARGE),
    *(Case(n, v) for n, v in _ODD),
    Case(8192, 32000, padding=64),
    Case(8192, 32000, padding=3),
    *(Case(n, v, "fp32", host=n == 256) for n, v in _FP32),
    Case(8192, 32001, "fp32"),
)
CUDA_QUICK = (CUDA_CASES[0], CUDA_CASES[1], CUDA_CASES[2], Case(8192, 32001), Case(8192, 32000, "fp32"))

# whole vocabularies 32000, 128256, 151936, 129280 over two ranks
TP_CASES = (
    Case(8192, 16000, host=True),
    Case(8192, 64128),
    Case(4096, 75968),
    Case(16384, 64640),
    Case(8192, 64128, "fp32"),
)
TP_QUICK = TP_CASES[:2]

# [s, b, V/tp] of small Megatron runs
_CPU = ((64, 2, 2000), (512, 2, 16160), (1024, 1, 32000))
CPU_CASES = tuple(Case(s * b, v, dtype, batch=b) for s, b, v in _CPU for dtype in ("fp32", "bf16"))
CPU_QUICK = CPU_CASES[:2]

# for tests: no goal is about these
TINY = (Case(12, 96, "fp32", batch=2), Case(12, 96, "bf16", batch=2))
