# shellcheck shell=bash
# Settings for a run on NVIDIA GPUs; to be sourced. What is set already stays.
export MCE_DEVICE=cuda
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Kernels start in the order they are issued, which Megatron's overlap of computation and communication counts on.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# Every rank compiles its own JIT-fused functions; one compiler process each is enough.
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}"
