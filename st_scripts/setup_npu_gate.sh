#!/usr/bin/env bash
# Create what `megatron-ce npu-check` compiles with: a Python 3.11 environment with triton-ascend in .venvs/npu_gate, and
# the versions of bishengir-compile in .venvs/ascendnpu-ir/VERSION, from the pins in requirements/npu_gate*.txt.
#
#   bash st_scripts/setup_npu_gate.sh [--python PYTHON] [--help]
#
# No NPU, no CANN and no torch is needed. A second call with the same requirements returns at once; an interrupted one is
# started over. About 0.7 GB of disk.
#   NPU_GATE_PYTHON=...  the Python 3.11 to use; otherwise python3.11 and pyenv's are tried
#   PIP_INDEX_URL or pip's own configuration: the index that packages come from
# Exit status: 0 ready, 1 the installation failed, 2 no usable Python or bad arguments.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/common.sh
source "$(dirname "$SCRIPT")/common.sh"

while [ $# -gt 0 ]; do
  case "$1" in
    --python) need_value "$1" $#; NPU_GATE_PYTHON="$2"; shift 2 ;;
    -h | --help) show_help; exit 0 ;;
    *) die 2 "unknown argument $1; see --help." ;;
  esac
done

GATE=.venvs/npu_gate
COMPILERS=.venvs/ascendnpu-ir
FRONT_END=requirements/npu_gate.txt
BACK_ENDS=requirements/npu_gate_compilers.txt
STAMP="$GATE/.setup-complete" # holds the hash of what was installed

wanted="$(cat "$FRONT_END" "$BACK_ENDS" st_scripts/setup_npu_gate.sh | sha256sum | cut -d' ' -f1)"
ready() { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ] && [ -x "$GATE/bin/python" ]; }
if ready; then
  say "The environment $GATE is up to date."
  exit 0
fi

mkdir -p .venvs
exec 9> .venvs/npu_gate.lock
if command -v flock > /dev/null; then
  flock -n 9 || { say "Another set-up is running; waiting for it."; flock 9; }
  if ready; then
    say "The environment $GATE is up to date."
    exit 0
  fi
fi

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' > /dev/null 2>&1; }
find_python() {
  local candidates=() candidate
  if [ -n "${NPU_GATE_PYTHON:-}" ]; then
    usable "$NPU_GATE_PYTHON" || die 2 "NPU_GATE_PYTHON=$NPU_GATE_PYTHON is no Python 3.11 with venv that starts; triton-ascend 3.2.0 has no wheel for a later one."
    printf '%s\n' "$NPU_GATE_PYTHON"
    return
  fi
  candidates=(python3.11 python3)
  for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python3; do
    [ ! -x "$candidate" ] || candidates+=("$candidate")
  done
  for candidate in "${candidates[@]}"; do
    if usable "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die 2 "no Python 3.11 with venv was found (triton-ascend 3.2.0 has no wheel for a later one); tried ${candidates[*]}. Install one or set NPU_GATE_PYTHON=/path/to/python3.11."
}
[ "$(uname -sm)" = "Linux x86_64" ] || die 2 "the compiler's packages are for Linux on x86_64, and this is $(uname -sm)."

began=$SECONDS
python="$(find_python)"
say "Creating $GATE with $("$python" --version) ..."
rm -rf "$GATE" "$COMPILERS"
mkdir -p "$COMPILERS"
"$python" -m venv "$GATE"
# The programs for other chips and for compiler developers are three quarters of each package.
slim() { find "$1" -path '*/ascendnpuir/bin/*' ! -name bishengir-compile -delete; }

pip() { "$GATE/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --no-deps -r "$FRONT_END" || die 1 "the packages of $FRONT_END could not be installed; see above."
while IFS= read -r pin; do
  folder="$COMPILERS/${pin#*==}"
  pip install --no-deps --no-compile --target "$folder" "$pin" || die 1 "$pin could not be installed; see above."
  slim "$folder"
done < <(grep '^ascendnpu-ir==' "$BACK_ENDS")
# The newest is the environment's own.
site="$("$GATE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
printf '%s\n' "$REPO/$folder" > "$site/ascendnpu_ir.pth"

MCE_AUTO_PATCH=0 PYTHONPATH="$REPO" "$GATE/bin/python" -c '
from megatron_ce_adaptor.npu_check import compiler
compiler.prepare_frontend()
print(compiler.compiler_version(compiler.find_compiler()))
' > "$GATE/import-check.log" 2>&1 || { cat "$GATE/import-check.log" >&2; die 1 "the new environment does not import; see above."; }
printf '%s\n' "$wanted" > "$STAMP.partial"
mv "$STAMP.partial" "$STAMP"
say "The environment $GATE is ready after $((SECONDS - began)) s."
