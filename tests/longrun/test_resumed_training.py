"""A real Megatron, killed and resumed, against the same run without a fault: nothing is lost.

The whole matrix, with twenty faults, is `st_scripts/fault_matrix.sh`; docs/long_run.md has its result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = """\
DEVICE: cpu
ENV_VARS: {MCE_DEVICE: cpu, OMP_NUM_THREADS: 1, CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --expert-tensor-parallel-size: 1
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --distributed-backend: gloo
  --num-layers: 1
  --hidden-size: 32
  --ffn-hidden-size: 32
  --num-attention-heads: 2
  --seq-length: 8
  --max-position-embeddings: 8
  --position-embedding-type: rope
  --normalization: RMSNorm
  --swiglu: true
  --disable-bias-linear: true
  --untie-embeddings-and-output-weights: true
  --attention-dropout: 0.1  # draws random numbers, whose state must come back too
  --hidden-dropout: 0.1
  --num-experts: 2
  --moe-router-topk: 2
  --moe-token-dispatcher-type: alltoall
  --cross-entropy-loss-fusion: true
  --cross-entropy-fusion-impl: te
  --transformer-impl: local
  --attention-backend: unfused
  --no-gradient-accumulation-fusion: true
  --no-masked-softmax-fusion: true
  --no-bias-swiglu-fusion: true
  --no-bias-dropout-fusion: true
  --no-rope-fusion: true
  --no-persist-layer-norm: true
  --train-iters: 20
  --micro-batch-size: 1
  --global-batch-size: 2
  --optimizer: adam
  --lr: 1.0e-2
  --lr-decay-style: cosine
  --lr-warmup-fraction: 0.2
  --weight-decay: 0.1
  --clip-grad: 1.0
  --seed: 7
  --mock-data: true
  --tokenizer-type: NullTokenizer
  --vocab-size: 300
  --num-workers: 0
  --no-create-attention-mask-in-dataloader: true
  --log-interval: 1
  --eval-iters: 0
  --eval-interval: 1000000
"""


def settings_free() -> dict[str, str]:
    """The environment without our settings, whatever other tests of this process left there."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MCE_")}


@pytest.mark.slow
def test_a_run_with_a_killed_rank_ends_as_the_one_without(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)
    out = tmp_path / "faults"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "megatron_ce_adaptor.longrun.faults",
            "--config",
            str(config),
            "--out",
            str(out),
        ]
        + ["--nproc", "2", "--steps", "30", "--save-every", "8", "--kills", "1", "--seed", "0"],
        env={
            **settings_free(),
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (fault,) = json.loads((out / "faults.json").read_text())["injections"]
    assert fault["fault"] == "SIGKILL to one rank"
    assert fault["exit_code"] == 1
    assert fault["resumed_from"] >= 8, "a checkpoint was loaded"
    log = (out / "broken" / "te.log").read_text()
    assert log.count("successfully loaded checkpoint") == 1
    assert log.count(" arguments ---") == 4, "both starts are in one log"
