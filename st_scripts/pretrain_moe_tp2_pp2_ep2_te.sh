#!/usr/bin/env bash
# Pretrain the MoE GPT on TP2 PP2 EP2 with Megatron's cross entropy `te`, on NPUs, GPUs or CPU cores.
#
#   bash st_scripts/pretrain_moe_tp2_pp2_ep2_te.sh [--steps N] [--out DIR] [--save-every N [--resume]] [--dry-run] ...
#
# and all else that `megatron-ce pretrain --help` lists.
#
# Variables, as in MindSpeed's system tests; what is not set is as the configuration says:
#   NPUS_PER_NODE (8) NNODES (1) NODE_RANK (0) MASTER_ADDR MASTER_PORT   processes and machines
#   TP PP EP CP                                                          parallel sizes
#   MBS GBS TRAIN_ITERS                                                  micro and global batch in samples, steps
#   DATA_PATH (prefix, ends in _text_document) TOKENIZER_MODEL CKPT_DIR  data, tokenizer folder, checkpoints
#   CONFIG       configs/a2_8p.yaml on NPUs, configs/gpu_moe_8rank.yaml on GPUs, configs/cpu_small.yaml else
#   MCE_DEVICE   npu, cuda or cpu; by default the first of them that is there
#   PYTHON       the Python with Megatron and this package; default .venv/bin/python
#   MEGATRON_PATH  a Megatron-LM checkout whose pretrain_gpt.py is run
# Exit status: 0 the run is complete, 1 it failed, 2 refused before the start, 128+N stopped by signal N.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/pretrain_common.sh
source "$(dirname "$SCRIPT")/pretrain_common.sh"
run_pretrain te "$@"
