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
if ready; then
  say "The environment $VENV is up to date."
  exit 0
fi

# Two set-ups at once would spoil each other; the later one waits and then finds the work done.
mkdir -p .venvs
exec 9> .venvs/setup.lock
if command -v flock > /dev/null; then
  flock -n 9 || { say "Another set-up is running; waiting for it."; flock 9; }
  if ready; then
    say "The environment $VENV is up to date."
    exit 0
  fi
fi

# A name on PATH may be a shim that refuses to start, so each candidate is run.
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' > /dev/null 2>&1; }
find_python() {
  local candidates=() candidate
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" || die 2 "PYTHON=$PYTHON is no Python 3.12 or 3.13 with venv that starts; name another one."
    printf '%s\n' "$PYTHON"
    return
  fi
  candidates=(python3.12 python3.13 python3)
  for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python3; do
    [ ! -x "$candidate" ] || candidates+=("$candidate")
  done
  for candidate in "${candidates[@]}"; do
    if usable "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die 2 "no Python 3.12 or 3.13 with venv was found; tried ${candidates[*]}. Install one or set PYTHON=/path/to/python3.12."
}

began=$SECONDS
if [ -e "$STARTED" ]; then
  say "An earlier set-up was interrupted; starting over."
  rm -rf "$VENV"
fi
if [ ! -x "$VENV_PYTHON" ] || ! usable "$VENV_PYTHON"; then
  python="$(find_python)"
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
