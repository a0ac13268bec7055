#!/usr/bin/env bash
# Create .venv from the pinned versions in requirements/py312.txt and install this package into it.
#
#   bash st_scripts/setup_env.sh [--python PYTHON] [--help]
#
# A second call with the same requirements returns at once; an interrupted one is started over. About 5 GB of disk.
#   PYTHON=...  the Python to use (3.12 or 3.13); otherwise python3.12, python3.13, python3 and pyenv's are tried
#   VENV=...    the environment's folder, default .venv
#   PIP_INDEX_URL or pip's own configuration: the index that packages come from
# Exit status: 0 ready, 1 the installation failed, 2 no usable Python or bad arguments.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/common.sh
source "$(dirname "$SCRIPT")/common.sh"

while [ $# -gt 0 ]; do
  case "$1" in
    --python) need_value "$1" $#; PYTHON="$2"; shift 2 ;;
    -h | --help) show_help; exit 0 ;;
    *) die 2 "unknown argument $1; see --help." ;;
  esac
done

REQUIREMENTS=requirements/py312.txt
STAMP="$VENV/.setup-complete"   # holds the hash of what was installed
STARTED="$VENV/.setup-started"  # there while an installation runs, or after it was cut off

wanted="$(cat "$REQUIREMENTS" pyproject.toml st_scripts/setup_env.sh | sha256sum | cut -d' ' -f1)"
ready() { [ -f "$STAMP" ] && [ ! -e "$STARTED" ] && [ "$(cat "$STAMP")" = "$wanted" ] && [ -x "$VENV_PYTHON" ]; }
VERSIONS=(3.12 3.13)
[ -z "${PYTHON:-}" ] || find_python PYTHON "${VERSIONS[@]}" > /dev/null # a wrong one is refused, needed or not
leave_if_ready "$VENV" .venvs/setup.lock

began=$SECONDS
if [ -e "$STARTED" ]; then
  say "An earlier set-up was interrupted; starting over."
  rm -rf "$VENV"
fi
if [ ! -x "$VENV_PYTHON" ] || ! usable_python "$VENV_PYTHON" "${VERSIONS[@]}"; then
  python="$(find_python PYTHON "${VERSIONS[@]}")"
  say "Creating $VENV with $("$python" --version) ..."
  rm -rf "$VENV"
  mkdir -p "$VENV"
  touch "$STARTED"
  "$python" -m venv "$VENV"
fi
touch "$STARTED"
rm -f "$STAMP"

# uv installs the 5 GB several times faster than pip does; without it pip does the same work.
uv="$(grep '^uv==' "$REQUIREMENTS")"
if ! "$VENV_PYTHON" -m pip install --quiet "$uv"; then
  say "$uv could not be installed here; pip does the work and takes a few minutes longer."
fi
say "Installing $(grep -c '==' "$REQUIREMENTS") pinned packages ..."
# --no-deps: the list is complete, and nothing outside it may slip in.
install_packages --no-deps -r <(grep -v '^uv==' "$REQUIREMENTS") || die 1 "the packages could not be installed; see above."
install_packages --no-deps --no-build-isolation -e . || die 1 "this package could not be installed; see above."
say "Checking that everything imports ..."
# Also writes the byte code once, which eight ranks starting together would otherwise all do.
"$VENV_PYTHON" -W ignore -c '
import torch, triton, transformers, yaml, megatron.core, megatron.training
import megatron_ce_adaptor
' 2> "$VENV/import-check.log" || { cat "$VENV/import-check.log" >&2; die 1 "the new environment does not import; see above."; }

printf '%s\n' "$wanted" > "$STAMP.partial"
mv "$STAMP.partial" "$STAMP"
rm -f "$STARTED"
say "The environment $VENV is ready after $((SECONDS - began)) s."
