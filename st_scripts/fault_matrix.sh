#!/usr/bin/env bash
# Kill a run and damage its checkpoints again and again, resume it each time, and see that nothing is lost.
#
#   bash st_scripts/fault_matrix.sh [--kills N] [--steps N] [--save-every N] [--seed N] [--out DIR] [--config FILE]
#
#   --kills N      faults, default 20: SIGKILL to a rank, to the launcher, to every process; checkpoints cut in half, with
#                  a file missing or a bit flipped, unfinished, a stale tracker file; one start on a disk that is full (from 3 faults on)
#   --steps N      default 160       --save-every N  default 5       --seed N  of what is hit and when, default 0
#   --out DIR      default runs/faults; must be empty
#   --config FILE  default configs/cpu_small.yaml on two ranks (TP2); NPUS_PER_NODE, TP, PP, EP choose another layout
# The run is held against one without faults: losses and gradient norms of every step, and the weights at the end.
# Exit status: 0 nothing was lost, 1 something was, 2 bad arguments.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/pretrain_common.sh
source "$(dirname "$SCRIPT")/pretrain_common.sh"

kills=20
steps=160
save_every=5
seed=0
out=runs/faults
CONFIG="${CONFIG:-configs/cpu_small.yaml}"
while [ $# -gt 0 ]; do
  case "$1" in
    --kills) need_value "$1" $#; kills="$2"; shift 2 ;;
    --steps) need_value "$1" $#; steps="$2"; shift 2 ;;
    --save-every) need_value "$1" $#; save_every="$2"; shift 2 ;;
    --seed) need_value "$1" $#; seed="$2"; shift 2 ;;
    --out) need_value "$1" $#; out="$(caller_path "$2")"; shift 2 ;;
    --config) need_value "$1" $#; CONFIG="$(caller_path "$2")"; shift 2 ;;
    -h | --help) show_help; exit 0 ;;
    *) die 2 "unknown argument $1; see --help." ;;
  esac
done
for name in kills steps save_every; do
  [[ "${!name}" =~ ^[1-9][0-9]*$ ]] || die 2 "--${name//_/-} is a whole number of at least 1, not ${!name}."
done
choose_configuration
if [ -z "${NPUS_PER_NODE:-}" ] && [ "$CONFIG" = configs/cpu_small.yaml ]; then
  export NPUS_PER_NODE=2 TP=2 PP=1 EP=1
fi
if [ -z "${DATA_PATH:-}" ]; then
  [ -f "${PREPARED}_text_document.idx" ] || die 2 "there is no ${PREPARED}_text_document.idx; run megatron-ce prepare-data."
  export DATA_PATH="${PREPARED}_text_document" TOKENIZER_MODEL="${TOKENIZER_MODEL:-${PREPARED}_tokenizer}"
fi
"$(python_of_stack)" -m megatron_ce_adaptor.longrun.faults --config "$CONFIG" --nproc "${NPUS_PER_NODE:-8}" \
  --kills "$kills" --steps "$steps" --save-every "$save_every" --seed "$seed" --full-disk-at $((kills / 2 + 1)) --out "${out#"$REPO"/}"
