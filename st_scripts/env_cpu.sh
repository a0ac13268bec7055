# shellcheck shell=bash
# Settings for a run on CPU cores with gloo; to be sourced. What is set already stays.
export MCE_DEVICE=cpu
# Eight ranks share a few cores: more than one thread each only makes them wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Megatron demands it for tensor parallelism on every device.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# A torch_npu without CANN, if it is installed, would break `import torch`.
export TORCH_DEVICE_BACKEND_AUTOLOAD="${TORCH_DEVICE_BACKEND_AUTOLOAD:-0}"
# On one machine the loopback always works; a host name that does not resolve would stop gloo.
if [ "${NNODES:-1}" = 1 ]; then
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
fi
