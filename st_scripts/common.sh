# shellcheck shell=bash
# Shared by the scripts of this folder; to be sourced, after `set -euo pipefail`. Changes into the repository's root.
REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CALLER_DIR="$PWD"
cd "$REPO" || exit 1
VENV="${VENV:-.venv}"
VENV_PYTHON="$VENV/bin/python"

say() { printf '==> %s\n' "$*"; }
die() { # die STATUS SENTENCE...
  local status="$1"
  shift
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit "$status"
}
# The comment block at the head of the calling script is its help.
show_help() { awk 'NR == 1 { next } /^#/ { sub(/^# ?/, ""); print; next } { exit }' "$SCRIPT"; }
# A path that the caller gave, relative to where they called from.
caller_path() { case "$1" in /*) printf '%s\n' "$1" ;; *) printf '%s/%s\n' "$CALLER_DIR" "$1" ;; esac; }
need_value() { [ "$2" -ge 2 ] || die 2 "$1 needs a value; see --help."; } # need_value --flag "$#"
# A name on PATH may be a shim that refuses to start, so each candidate is run.
usable_python() { # usable_python PYTHON VERSION...
  local python="$1"
  shift
  "$python" -c 'import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:])' "$@" > /dev/null 2>&1
}
# Prints the first usable one of pythonVERSION..., python3 and pyenv's; of $NAME alone where that is set.
find_python() { # find_python NAME VERSION...
  local name="$1" version candidate candidates=()
  shift
  if [ -n "${!name:-}" ]; then
    usable_python "${!name}" "$@" || die 2 "$name=${!name} is no Python of version $* with venv that starts; name another one."
    printf '%s\n' "${!name}"
    return
  fi
  for version in "$@"; do candidates+=("python$version"); done
  candidates+=(python3)
  for version in "$@"; do
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python3; do
      [ ! -x "$candidate" ] || candidates+=("$candidate")
    done
  done
  for candidate in "${candidates[@]}"; do
    if usable_python "$candidate" "$@"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die 2 "no Python of version $* with venv was found; tried ${candidates[*]}. Install one or set $name=/path/to/python."
}
# Ends the script if `ready` says that FOLDER is complete; two set-ups at once would spoil each other, so the later one
# waits and then finds the work done. The lock is the script's until it ends.
leave_if_ready() { # leave_if_ready FOLDER LOCK
  if ! ready; then
    mkdir -p "$(dirname "$2")"
    exec 9> "$2"
    if command -v flock > /dev/null && ! flock -n 9; then
      say "Another set-up is running; waiting for it."
      flock 9
    fi
    ready || return 0
  fi
  say "The environment $1 is up to date."
  exit 0
}
# pip's index, if the user set one (a mirror), is used by uv too; uv itself does not read pip's configuration.
install_packages() { # install_packages ARGUMENTS... of `pip install`, into $VENV
  if [ -x "$VENV/bin/uv" ]; then
    if [ -z "${UV_DEFAULT_INDEX:-}" ]; then
      local index="${PIP_INDEX_URL:-}"
      [ -n "$index" ] || index="$("$VENV_PYTHON" -m pip config get global.index-url 2>/dev/null || true)"
      [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
    fi
    "$VENV/bin/uv" pip install --quiet --python "$VENV_PYTHON" "$@"
  else
    "$VENV_PYTHON" -m pip install --quiet "$@"
  fi
}
