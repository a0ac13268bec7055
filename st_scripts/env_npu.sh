# shellcheck shell=bash
# Settings for a run on Ascend NPUs, those of MindSpeed's system tests; to be sourced. What is set already stays.
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
  for cann in "${ASCEND_TOOLKIT_HOME:-}" /usr/local/Ascend/ascend-toolkit "$HOME/Ascend/ascend-toolkit"; do
    if [ -n "$cann" ] && [ -f "$cann/set_env.sh" ]; then
      set +u # CANN's script reads variables that may be unset
      # shellcheck source=/dev/null
      source "$cann/set_env.sh"
      set -u
      break
    fi
  done
fi
export MCE_DEVICE=npu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
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
