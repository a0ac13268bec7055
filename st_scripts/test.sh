#!/usr/bin/env bash
# Run the tests.
#
#   bash st_scripts/test.sh [--only style|unit|megatron|ascend|mindspore] [--help]
#
#   style      ruff, mypy, import-linter, shellcheck
#   unit       tests/unit, tests/longrun, tests/benchmarks, tests/dtensor and tests/losses, in one run; then the Triton
#              kernels in the interpreter
#   megatron   tests/megatron with Megatron-Core 0.16.1 to 0.19.0, then a short comparison on 8 CPU processes
#   ascend     the NPU's kernels: compiled for the 910B3 with three versions of the compiler, run in the interpreter
#   mindspore  tests/mindspore on 2 processes, in an environment of its own
# What the last parts need is installed in the background while the first ones run.
# All parts run even if one fails. Exit status: 0 all passed, 1 a part failed (it is named), 2 bad arguments.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/common.sh
source "$(dirname "$SCRIPT")/common.sh"

parts=(style unit megatron ascend mindspore)
while [ $# -gt 0 ]; do
  case "$1" in
    --only)
      need_value "$1" $#
      case "$2" in
        style | unit | megatron | ascend | mindspore) parts=("$2") ;;
        *) die 2 "there is no part $2; choose style, unit, megatron, ascend or mindspore." ;;
      esac
      shift 2
      ;;
    -h | --help) show_help; exit 0 ;;
    *) die 2 "unknown argument $1; see --help." ;;
  esac
done

bash st_scripts/setup_env.sh
# One thread a process: tests with several ranks share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

failed=()
attempt() { # attempt NAME COMMAND...: run it, remember NAME if it fails, go on
  local name="$1" began=$SECONDS
  shift
  say "$name: $*"
  if "$@"; then
    say "$name passed after $((SECONDS - began)) s."
  else
    failed+=("$name")
    say "$name FAILED after $((SECONDS - began)) s."
  fi
}
run_pytest() { "$VENV_PYTHON" -m pytest -q "$@"; }
# Two processes: for tests that use one core most of the time. A file's tests stay together, and with them the ranks that
# its fixtures keep.
run_pytest_by_two() { run_pytest -n 2 --dist loadfile "$@"; }

background="$(mktemp -d)"
declare -A process_of=()
trap 'kill "${process_of[@]}" 2> /dev/null || true; rm -rf "$background"' EXIT
begin() { # begin NAME COMMAND...: run it beside what follows
  local name="$1"
  shift
  "$@" > "$background/$name" 2>&1 &
  process_of[$name]=$!
}
finish() { # finish NAME: wait for it, show what it printed, return its status
  local status=0
  wait "${process_of[$1]}" || status=$?
  unset "process_of[$1]"
  cat "$background/$1"
  return "$status"
}

run_style() {
  attempt "style/ruff" "$VENV/bin/ruff" check .
  attempt "style/format" "$VENV/bin/ruff" format --check .
  attempt "style/mypy" "$VENV/bin/mypy"
  attempt "style/imports" "$VENV/bin/lint-imports"
  attempt "style/shellcheck" "$VENV/bin/shellcheck" -x st_scripts/*.sh .ci/run
}

run_unit() {
  attempt "unit" run_pytest_by_two tests/unit tests/longrun tests/benchmarks tests/dtensor tests/losses
  # A process of its own: Triton reads TRITON_INTERPRET when it is imported.
  attempt "unit/interpreter" env TRITON_INTERPRET=1 "$VENV_PYTHON" -m pytest -q -n 2 --dist worksteal tests/unit tests/losses -m interpreter
}

run_megatron() {
  attempt "megatron/versions" finish megatron_versions
  MCE_MEGATRON_WHEELS="$REPO/.venvs/megatron" attempt "megatron" run_pytest_by_two tests/megatron
  attempt "megatron/comparison" bash st_scripts/quickstart.sh --steps 10 --out runs/test
}
# The other versions go beside the environment, each alone in .venvs/megatron/VERSION, to be put on PYTHONPATH.
other_megatrons() {
  local version folder
  for version in 0.16.1 0.17.1 0.18.2 0.19.0; do
    folder=".venvs/megatron/$version"
    [ ! -d "$folder" ] || continue
    rm -rf "$folder.partial"
    install_packages --no-deps --target "$folder.partial" "megatron-core==$version" || return 1
    mv "$folder.partial" "$folder" || return 1
  done
}

run_ascend() {
  attempt "ascend/toolchain" finish npu_toolchain
  attempt "ascend" run_pytest tests/ascend
  attempt "ascend/interpreter" env TRITON_INTERPRET=1 MCE_TRITON_KERNELS=ascend "$VENV_PYTHON" -m pytest -q -n 2 --dist worksteal tests/unit -m interpreter
  attempt "ascend/kernels" env TRITON_INTERPRET=1 "$VENV_PYTHON" -m pytest -q tests/ascend -m interpreter
}

run_mindspore() {
  attempt "mindspore/environment" finish mindspore_environment
  attempt "mindspore" .venvs/mindspore/bin/python -m pytest -q tests/mindspore
}

for part in "${parts[@]}"; do
  case "$part" in
    megatron) begin megatron_versions other_megatrons ;;
    ascend) begin npu_toolchain bash st_scripts/setup_npu_gate.sh ;;
    mindspore) begin mindspore_environment bash st_scripts/setup_mindspore.sh ;;
  esac
done
for part in "${parts[@]}"; do "run_$part"; done
if [ ${#failed[@]} -gt 0 ]; then
  say "FAILED: ${failed[*]}"
  exit 1
fi
say "All parts passed: ${parts[*]}"
