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
