#!/usr/bin/env bash
# Train with `native`, then with `te`, then compare: the long run's verdict from one command.
#
#   bash st_scripts/compare.sh [--config configs/x.yaml] [--steps N] [--out DIR]
#
#   --config FILE  default: the variable CONFIG, else by device as in pretrain_moe_tp2_pp2_ep2_te.sh
#   --steps N      default: the configuration's
#   --out DIR      logs, records and report; default runs/<configuration>
# The variables of pretrain_moe_tp2_pp2_ep2_te.sh hold here too (NPUS_PER_NODE, DATA_PATH, ...).
# Exit status: 0 all gates met, 1 a gate not met or a run failed, 2 refused before the start, 128+N stopped by signal N.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/pretrain_common.sh
source "$(dirname "$SCRIPT")/pretrain_common.sh"

pretrain=()
out=""
while [ $# -gt 0 ]; do
  case "$1" in
    --config) need_value "$1" $#; CONFIG="$(caller_path "$2")"; shift 2 ;;
    --steps) need_value "$1" $#; pretrain+=(--steps "$2"); shift 2 ;;
    --out) need_value "$1" $#; out="$(caller_path "$2")"; shift 2 ;;
    -h | --help) show_help; exit 0 ;;
    *) die 2 "unknown argument $1; see --help." ;;
  esac
done
choose_configuration
[ -n "$out" ] || out="runs/$(basename "$CONFIG" .yaml)"
out="${out#"$REPO"/}"

for impl in native te; do
  say "Training with $impl ..."
  (run_pretrain "$impl" --out "$out" "${pretrain[@]}")
done
say "Comparing ..."
"$(python_of_stack)" -m megatron_ce_adaptor.cli compare "$out"
