#!/usr/bin/env bash
# Run a command whose ranks share one GPU: NVIDIA MPS around it, and an NCCL that allows several ranks on a device.
#
#   NCCL_LIBRARY=/path/to/libnccl.so.2 bash st_scripts/ranks_on_one_gpu.sh COMMAND...
#
# NCCL_LIBRARY is NCCL 2.32 or newer (nvidia-nccl-cu13==2.32.3 on PyPI); the one that torch 2.11 brings refuses. Step times
# on a shared GPU are contended: they say nothing about speed. Exit status: the command's; 2 if something is missing.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/common.sh
source "$(dirname "$SCRIPT")/common.sh"

case "${1:-}" in
  -h | --help) show_help; exit 0 ;;
  "") die 2 "no command was given; see --help." ;;
esac
[ -z "${NCCL_LIBRARY:-}" ] || NCCL_LIBRARY="$(caller_path "$NCCL_LIBRARY")"
[ -f "${NCCL_LIBRARY:-}" ] || die 2 "NCCL_LIBRARY is ${NCCL_LIBRARY:-not set}: name the libnccl.so.2 of NCCL 2.32 or newer."
command -v nvidia-cuda-mps-control > /dev/null || die 2 "nvidia-cuda-mps-control is not on PATH: MPS is missing."

work="$(mktemp -d)"
export CUDA_MPS_PIPE_DIRECTORY="$work/pipe" CUDA_MPS_LOG_DIRECTORY="$work/log"
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
# Its output detached: the daemon would hold the caller's pipe open.
nvidia-cuda-mps-control -d > /dev/null 2>&1 < /dev/null
stop_mps() {
  # With a time limit: a plain quit waits for every client.
  echo "quit -t 3" | timeout 20 nvidia-cuda-mps-control > /dev/null 2>&1 || true
  rm -rf "$work"
}
trap stop_mps EXIT
# A signal to the group (Ctrl-C, timeout) is the command's to answer; MPS stays until it has ended.
trap : INT TERM HUP
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS="${NCCL_MAX_CTAS:-4}" MCE_RANKS_ON_ONE_DEVICE=1
ln -s "$NCCL_LIBRARY" "$work/libnccl.so.2" # LD_PRELOAD splits a path at spaces
LD_PRELOAD="$work/libnccl.so.2" "$@"
