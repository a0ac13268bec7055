#!/usr/bin/env bash
# Create .venvs/mindspore, the Python 3.11 environment of the MindSpore part, from the pins in requirements/mindspore.txt.
#
#   bash st_scripts/setup_mindspore.sh [--python PYTHON] [--help]
#
# No torch is in it. A second call with the same requirements returns at once; an interrupted one is started over.
# About 3 GB of disk.
#   MINDSPORE_PYTHON=...  the Python 3.11 to use; otherwise python3.11 and pyenv's are tried
#   PIP_INDEX_URL or pip's own configuration: the index that packages come from
# Exit status: 0 ready, 1 the installation failed, 2 no usable Python or bad arguments.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# What common.sh installs into; the caller's VENV is another environment.
export VENV=.venvs/mindspore
# shellcheck source=st_scripts/common.sh
source "$(dirname "$SCRIPT")/common.sh"

while [ $# -gt 0 ]; do
  case "$1" in
    --python) need_value "$1" $#; MINDSPORE_PYTHON="$2"; shift 2 ;;
    -h | --help) show_help; exit 0 ;;
    *) die 2 "unknown argument $1; see --help." ;;
  esac
done

REQUIREMENTS=requirements/mindspore.txt
STAMP="$VENV/.setup-complete" # holds the hash of what was installed

wanted="$(cat "$REQUIREMENTS" st_scripts/setup_mindspore.sh | sha256sum | cut -d' ' -f1)"
ready() { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ] && [ -x "$VENV_PYTHON" ]; }
# The list of pins is for this version.
[ -z "${MINDSPORE_PYTHON:-}" ] || find_python MINDSPORE_PYTHON 3.11 > /dev/null # a wrong one is refused, needed or not
leave_if_ready "$VENV" .venvs/mindspore.lock

[ "$(uname -s)" = "Linux" ] || die 2 "the pinned packages are for Linux, and this is $(uname -s)."

began=$SECONDS
python="$(find_python MINDSPORE_PYTHON 3.11)"
say "Creating $VENV with $("$python" --version) ..."
rm -rf "$VENV" # also what an interrupted set-up left: without a stamp nothing in it is trusted
mkdir -p "$VENV"
"$python" -m venv "$VENV"
# uv installs the 3 GB faster than pip does; without it pip does the same work.
uv="$(grep '^uv==' requirements/py312.txt)"
"$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check "$uv" > /dev/null 2>&1 || true
say "Installing $(grep -c '==' "$REQUIREMENTS") pinned packages ..."
# --no-deps: the list is complete, and nothing outside it may slip in.
install_packages --no-deps -r "$REQUIREMENTS" || die 1 "the packages of $REQUIREMENTS could not be installed; see above."
say "Checking that it imports ..."
# Also writes the byte code once, which the ranks of a job would otherwise all do.
MCE_AUTO_PATCH=0 PYTHONPATH="$REPO" "$VENV_PYTHON" -W ignore -c '
import sys
import pytest
import megatron_ce_adaptor.mindspore
sys.exit("torch" in sys.modules and "torch was imported")
' > "$VENV/import-check.log" 2>&1 || { cat "$VENV/import-check.log" >&2; die 1 "the new environment does not import; see above."; }

printf '%s\n' "$wanted" > "$STAMP.partial"
mv "$STAMP.partial" "$STAMP"
say "The environment $VENV is ready after $((SECONDS - began)) s."
