#!/usr/bin/env bash
# From nothing to a verdict: environment, data, training with `native` and with `te`, comparison, report.
#
#   bash st_scripts/quickstart.sh [--steps N] [--impl native|te|both] [--config FILE] [--out DIR] [--help]
#
#   --steps N      steps of each run, default 100; 2000 is the long run
#   --impl WHICH   train only `native` or only `te`, default both; compared as soon as DIR holds both
#   --config FILE  default configs/cpu_small.yaml: Megatron-Core on 8 CPU processes, TP2 PP2 EP2, a MoE GPT
#   --out DIR      logs, records and report; default runs/<configuration>
# A second call reuses the environment and the data. DATA_PATH (prefix, ends in _text_document) and TOKENIZER_MODEL
# name other data than the slice of English Wikipedia that is prepared here; NPUS_PER_NODE another number of processes.
# Exit status: 0 all gates met, 1 a gate not met or a run failed, 2 refused before the start, 128+N stopped by signal N.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/pretrain_common.sh
source "$(dirname "$SCRIPT")/pretrain_common.sh"

steps=100
implementations=(native te)
out=""
CONFIG=configs/cpu_small.yaml
while [ $# -gt 0 ]; do
  case "$1" in
    --steps) need_value "$1" $#; steps="$2"; shift 2 ;;
    --impl) need_value "$1" $#; choose_implementations "$2"; shift 2 ;;
    --config) need_value "$1" $#; CONFIG="$(caller_path "$2")"; shift 2 ;;
    --out) need_value "$1" $#; out="$(caller_path "$2")"; shift 2 ;;
    -h | --help) show_help; exit 0 ;;
    *) die 2 "unknown argument $1; see --help." ;;
  esac
done
[[ "$steps" =~ ^[1-9][0-9]*$ ]] || die 2 "--steps is a whole number of at least 1, not $steps."
[ -f "$CONFIG" ] || die 2 "there is no configuration $CONFIG."
# The device that the configuration is made for; a quick start does not look for accelerators by itself.
export MCE_DEVICE="${MCE_DEVICE:-$(sed -n 's/^DEVICE: *\([a-z]*\).*/\1/p' "$CONFIG")}"
export MCE_DEVICE="${MCE_DEVICE:-cpu}"
choose_configuration
[ -n "$out" ] || out="runs/$(basename "$CONFIG" .yaml)"
out="${out#"$REPO"/}"

began=$SECONDS
bash st_scripts/setup_env.sh
python="$(python_of_stack)"
if [ -z "${DATA_PATH:-}" ]; then
  say "Preparing the slice of English Wikipedia ..."
  "$python" -m megatron_ce_adaptor.cli prepare-data --output-prefix "$PREPARED"
fi

for implementation in "${implementations[@]}"; do
  say "Training $steps steps with $implementation ..."
  (run_pretrain "$implementation" --steps "$steps" --out "$out")
done

status=0
if [ -f "$out/native.log" ] && [ -f "$out/te.log" ]; then
  say "Comparing ..."
  "$python" -m megatron_ce_adaptor.cli compare "$out" || status=$?
else
  say "No comparison yet: $out holds only the log of ${implementations[*]}."
fi
say "Done after $((SECONDS - began)) s. The results:"
for file in report.html metrics.json env.json native.log te.log; do
  if [ -f "$out/$file" ]; then printf '  %s\n' "$out/$file"; fi
done
exit "$status"
