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
# triton-ascend 3.2.0 has no wheel for a later one.
[ -z "${NPU_GATE_PYTHON:-}" ] || find_python NPU_GATE_PYTHON 3.11 > /dev/null # a wrong one is refused, needed or not
leave_if_ready "$GATE" .venvs/npu_gate.lock

[ "$(uname -sm)" = "Linux x86_64" ] || die 2 "the compiler's packages are for Linux on x86_64, and this is $(uname -sm)."

began=$SECONDS
python="$(find_python NPU_GATE_PYTHON 3.11)"
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
