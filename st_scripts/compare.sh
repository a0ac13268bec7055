#!/usr/bin/env bash
# Train with `native`, then with `te`, then compare: the long run's verdict from one command.
#
#   bash st_scripts/compare.sh [--config configs/x.yaml] [--steps N] [--out DIR] [--save-every N [--resume]] [--noise-floor]
#
#   --config FILE  default: the variable CONFIG, else by device as in pretrain_moe_tp2_pp2_ep2_te.sh
#   --steps N      default: the configuration's
#   --out DIR      logs, records and report; default runs/<configuration>
#   --save-every N a checkpoint every N steps, the two newest of each run in DIR/checkpoints
#   --resume       continue where an earlier call with the same arguments ended; what is complete is not run again
#   --noise-floor  a third run: native with its first logits off by one ulp, drawn beside te's error in the report
# The variables of pretrain_moe_tp2_pp2_ep2_te.sh hold here too (NPUS_PER_NODE, DATA_PATH, ...).
# Exit status: 0 all gates met, 1 a gate not met or a run failed, 2 refused before the start, 128+N stopped by signal N.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/pretrain_common.sh
source "$(dirname "$SCRIPT")/pretrain_common.sh"

pretrain=()
out=""
resume=0
runs=(native te)
while [ $# -gt 0 ]; do
  case "$1" in
    --config) need_value "$1" $#; CONFIG="$(caller_path "$2")"; shift 2 ;;
    --steps) need_value "$1" $#; pretrain+=(--steps "$2"); shift 2 ;;
    --out) need_value "$1" $#; out="$(caller_path "$2")"; shift 2 ;;
    --save-every) need_value "$1" $#; pretrain+=(--save-every "$2"); shift 2 ;;
    --resume) resume=1; shift ;;
    --noise-floor) runs+=(noise_floor); shift ;;
    -h | --help) show_help; exit 0 ;;
    *) die 2 "unknown argument $1; see --help." ;;
  esac
done
choose_configuration
[ -n "$out" ] || out="runs/$(basename "$CONFIG" .yaml)"
out="${out#"$REPO"/}"
checkpoints="${CKPT_DIR:-}" # below it a folder a run

for run in "${runs[@]}"; do
  more=("${pretrain[@]}")
  # What was never started begins at step 1.
  if [ "$resume" = 1 ] && [ -f "$out/$run.status.json" ]; then more+=(--resume); fi
  [ -z "$checkpoints" ] || CKPT_DIR="$checkpoints/$run"
  implementation="$run"
  if [ "$run" = noise_floor ]; then
    implementation=native
    more+=(--noise-floor)
  fi
  say "Training with $implementation${more[*]:+ (${more[*]})} ..."
  (run_pretrain "$implementation" --out "$out" "${more[@]}")
done
say "Comparing ..."
"$(python_of_stack)" -m megatron_ce_adaptor.cli compare "$out"
