"""Short runs of the real Megatron on the CPU, in processes of their own, and what their logs say."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import shlex
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "megatron_ce_adaptor.megatron.pretrain"
FORKED = "megatron_ce_adaptor.megatron.forked_torchrun"

# A GPT that trains in milliseconds; the caller adds parallel sizes and data.
TINY_GPT = shlex.split(
    """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 8
    --max-position-embeddings 8 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --optimizer adam --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --seed 7
    --distributed-backend gloo --transformer-impl local --attention-backend unfused
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
    --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --no-create-attention-mask-in-dataloader
    --log-interval 1 --eval-iters 0 --eval-interval 1000000 --cross-entropy-loss-fusion
"""
)

EIGHT_RANK_MOE = shlex.split(
    """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1 --sequence-parallel --use-distributed-optimizer --global-batch-size 4
    --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall
"""
)


@dataclass(frozen=True)
class Run:
    """What a run left: exit status, both streams as one text, and the figures of Megatron's log lines."""

    status: int
    log: str

    @property
    def losses(self) -> list[float]:
        return [float(value) for value in re.findall(r"lm loss: (\S+)", self.log)]

    @property
    def grad_norms(self) -> list[float]:
        return [float(value) for value in re.findall(r"grad norm: (\S+)", self.log)]

    @property
    def calls(self) -> dict[int, tuple[int, int, str]]:
        """Rank -> (te calls, native calls, implementation)."""
        lines = re.findall(
            r"\[rank (\d+)\] cross entropy: te (\d+) calls, native (\d+) calls, implementation (.+)", self.log
        )
        return {int(rank): (int(te), int(native), name) for rank, te, native, name in lines}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what would change a run, plus `extra`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MCE_", "MEGATRON_", "TRITON_", "TE_", "PYTEST"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    kept.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", MCE_DEVICE="cpu")
    kept.update(extra)
    return kept


def run_python(*words: str, timeout: float = 300, **extra_environment: str) -> Run:
    """Run ``python words...`` in the repository's root and wait for it."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(**extra_environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Run(done.returncode, done.stdout)


def _run_and_exit(body: Callable[..., None], arguments: dict[str, object]) -> None:
    torch.set_num_threads(1)  # a fork has none of its parent's OpenMP threads
    try:
        body(**arguments)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def in_a_fork(body: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a fork of the test process: what it changes in torch or Megatron, nobody else sees."""

    @functools.wraps(body)
    def test(**arguments: object) -> None:
        child = multiprocessing.get_context("fork").Process(target=_run_and_exit, args=(body, arguments))
        child.start()
        child.join(120)
        assert child.exitcode == 0

    return test


def write_token_files(prefix: Path, documents: int = 40, length: int = 60, vocabulary: int = 299) -> Path:
    """Write ``prefix.bin`` and ``prefix.idx`` in Megatron's format, from its description alone."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, documents * length, dtype=np.uint16)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    uint16_code = 8
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, uint16_code, documents, documents + 1)
    lengths = np.full(documents, length, dtype=np.int32)
    pointers = np.arange(documents, dtype=np.int64) * length * tokens.itemsize
    boundaries = np.arange(documents + 1, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(
        header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes()
    )
    return prefix
