# shellcheck shell=bash
# Settings for a run on Ascend NPUs, those of MindSpeed's system tests; to be sourced, by a person or a script:
#
#   source st_scripts/env_npu.sh
#
# What is set already stays. Sources CANN's set_env.sh where that was not done yet. Returns 0, or 2 if there is no CANN.
_mce_source() { # CANN's scripts read variables that may be unset; the caller's `set -u` is left as it was
  local nounset=0
  case "$-" in *u*) nounset=1; set +u ;; esac
  # shellcheck source=/dev/null
  source "$1"
  [ "$nounset" = 0 ] || set -u
}
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
  for _mce_cann in "${ASCEND_TOOLKIT_HOME:-}" /usr/local/Ascend/ascend-toolkit /usr/local/Ascend/cann \
    "${HOME:-}/Ascend/ascend-toolkit" "${HOME:-}/Ascend/cann"; do
    if [ -n "$_mce_cann" ] && [ -f "$_mce_cann/set_env.sh" ]; then
      _mce_source "$_mce_cann/set_env.sh"
      break
    fi
  done
  # Ascend Transformer Boost, which some fused operators of MindSpeed need; not there in every installation.
  if [ -n "${ASCEND_HOME_PATH:-}" ] && [ -z "${ATB_HOME_PATH:-}" ] && [ -f /usr/local/Ascend/nnal/atb/set_env.sh ]; then
    _mce_source /usr/local/Ascend/nnal/atb/set_env.sh
  fi
fi
unset -f _mce_source
unset _mce_cann
export MCE_DEVICE=npu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Megatron demands it for tensor parallelism on every device.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# Reductions in a fixed order, so that two runs can be compared.
export HCCL_DETERMINISTIC="${HCCL_DETERMINISTIC:-TRUE}"
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1200}"
export HCCL_WHITELIST_DISABLE="${HCCL_WHITELIST_DISABLE:-1}"
export ASCEND_LAUNCH_BLOCKING="${ASCEND_LAUNCH_BLOCKING:-0}"
export ASCEND_SLOG_PRINT_TO_STDOUT="${ASCEND_SLOG_PRINT_TO_STDOUT:-0}"
export ASCEND_GLOBAL_LOG_LEVEL="${ASCEND_GLOBAL_LOG_LEVEL:-3}"
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"
export COMBINED_ENABLE="${COMBINED_ENABLE:-1}"
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
  # A script that sources this leaves the word to the check before the start.
  [ -n "${BASH_SOURCE[1]:-}" ] || echo "env_npu.sh: no CANN was found; source the set_env.sh of yours, then this again." >&2
  return 2
fi
