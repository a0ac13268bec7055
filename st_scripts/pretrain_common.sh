# shellcheck shell=bash
# The common part of pretrain_moe_tp2_pp2_ep2_{native,te}.sh; to be sourced after `set -euo pipefail` and SCRIPT=...
# shellcheck source=st_scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# The variables that a configuration may read. One that is set but not read would be ignored silently, so it is refused.
PASSED_ON=(TP PP EP CP MBS GBS LR WARMUP TRAIN_ITERS DATA_PATH TOKENIZER_TYPE TOKENIZER_MODEL VOCAB_FILE MERGE_FILE CKPT_DIR TRANSFORMER_IMPL)

# What `megatron-ce prepare-data` and quickstart.sh make, used where DATA_PATH is not set.
PREPARED=data/enwiki/enwiki

choose_implementations() { # choose_implementations native|te|both: sets the array `implementations`
  # shellcheck disable=SC2034 # the calling scripts read it
  case "$1" in
    native | te) implementations=("$1") ;;
    both) implementations=(native te) ;;
    *) die 2 "--impl is native, te or both, not $1." ;;
  esac
}

choose_device() {
  local made_for=""
  if [ -n "${CONFIG:-}" ] && [ -f "$CONFIG" ]; then made_for="$(sed -n 's/^DEVICE: *\([a-z]*\).*/\1/p' "$CONFIG")"; fi
  if [ -n "${MCE_DEVICE:-}" ]; then
    printf '%s\n' "$MCE_DEVICE"
  elif [ -n "$made_for" ]; then
    printf '%s\n' "$made_for"
  elif npu-smi info > /dev/null 2>&1; then
    echo npu
  elif nvidia-smi -L > /dev/null 2>&1; then
    echo cuda
  else
    echo cpu
  fi
}

# Sets DEVICE and CONFIG and the device's environment.
choose_configuration() {
  DEVICE="$(choose_device)"
  case "$DEVICE" in
    cpu) source "$REPO/st_scripts/env_cpu.sh"; CONFIG="${CONFIG:-configs/cpu_small.yaml}" ;;
    cuda) source "$REPO/st_scripts/env_gpu.sh"; CONFIG="${CONFIG:-configs/gpu_moe_8rank.yaml}" ;;
    # Without CANN it returns 2; whether that matters, the check before the start says.
    npu) source "$REPO/st_scripts/env_npu.sh" || true; CONFIG="${CONFIG:-configs/a2_8p.yaml}" ;;
    *) die 2 "MCE_DEVICE=$DEVICE is unknown; choose cpu, cuda or npu." ;;
  esac
  CONFIG="${CONFIG#"$REPO"/}"
  [ -f "$CONFIG" ] || die 2 "there is no configuration $CONFIG; set CONFIG to one of configs/*.yaml."
}

# Where there is no .venv, PYTHON names the Python of the Ascend stack (MegatronAdaptor, torch_npu).
python_of_stack() {
  local python="${PYTHON:-$VENV_PYTHON}"
  "$python" -c '' 2> /dev/null || die 2 "$python does not start; set PYTHON, or run st_scripts/setup_env.sh."
  printf '%s\n' "$python"
}

run_pretrain() { # run_pretrain IMPLEMENTATION ARGUMENTS...
  local implementation="$1" name python
  shift
  case "${1:-}" in -h | --help) show_help; exit 0 ;; esac
  choose_configuration
  NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
  NNODES="${NNODES:-1}"
  # Before anything is computed with them; a process a card would otherwise be started to find out.
  for name in NPUS_PER_NODE NNODES TP PP EP CP MBS GBS TRAIN_ITERS SAVE_INTERVAL; do
    [ -z "${!name:-}" ] || [[ "${!name}" =~ ^[1-9][0-9]*$ ]] || die 2 "$name is ${!name}: expected a whole number of at least 1."
  done
  local processes=$((NPUS_PER_NODE * NNODES))
  if [ "${WORLD_SIZE:-$processes}" != "$processes" ]; then
    die 2 "WORLD_SIZE=$WORLD_SIZE, but NPUS_PER_NODE $NPUS_PER_NODE x NNODES $NNODES = $processes; unset WORLD_SIZE."
  fi
  unset WORLD_SIZE # torchrun sets it for every rank
  export NPUS_PER_NODE NNODES
  if [ -z "${DATA_PATH:-}" ] && [ -f "${PREPARED}_text_document.idx" ]; then
    DATA_PATH="${PREPARED}_text_document"
    TOKENIZER_MODEL="${TOKENIZER_MODEL:-${PREPARED}_tokenizer}"
    say "DATA_PATH is not set: training on $DATA_PATH." >&2
  fi
  for name in "${PASSED_ON[@]}"; do
    [ -n "${!name:-}" ] || continue
    grep -qF -e "\${${name}}" -e "\${${name}:-" "$CONFIG" || die 2 "$CONFIG does not read $name; write the value there or unset $name."
    export "${name?}"
  done

  python="$(python_of_stack)"
  exec "$python" -m megatron_ce_adaptor.cli pretrain --config "$CONFIG" --impl "$implementation" --device "$DEVICE" "$@"
}
