# Sourced by demo.sh, test.sh and lab.sh. Fills .venv, sets $PY to its Python, and changes to the project's root;
# or stops with a one-line error. PYTHON=/path/to/python chooses the Python to start from;
# MUON_EXTRAS=hosts installs an extra of pyproject.toml in addition to the usual ones.
# shellcheck shell=bash
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
PY=$VENV/bin/python
FILLING=$VENV/.filling # exists while the folder is being filled, and holds that process's id
STAMP=$VENV/.filled    # the versions from which the folder was filled
EXTRAS=notebooks,tests${MUON_EXTRAS:+,$MUON_EXTRAS}
NEEDED_MB=${MUON_NEEDED_MB:-2000}

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}

# Keep other environments, active or configured, out of ours. pip's other settings (indexes, caches, proxies) stay.
forget_other_environments() {
  unset VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUSERBASE __PYVENV_LAUNCHER__
  unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV
  export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONNOUSERSITE=1
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null </dev/null; }

is_new_enough() {
  local major=${1%%.*} rest=${1#*.}
  [ "$major" -gt 3 ] || { [ "$major" -eq 3 ] && [ "${rest%%.*}" -ge 10 ]; }
}

# Prints the first Python that is new enough and can make virtual environments.
find_python() {
  local candidate version too_old="" no_venv=""
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
    version=$(version_of "$candidate") || continue
    if ! is_new_enough "$version"; then
      too_old=${too_old:-"Python $version ($(command -v "$candidate"))"}
    elif ! "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null; then
      no_venv=${no_venv:-"$version ($(command -v "$candidate"))"}
    else
      printf '%s\n' "$candidate"
      return
    fi
  done
  [ -z "$no_venv" ] || die "Python $no_venv cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv"
  [ -z "$too_old" ] || die "Python 3.10 or newer is needed, and only $too_old was found; install one, or set PYTHON=/path/to/python3"
  die "no Python found; install Python 3.10 or newer, or set PYTHON=/path/to/python3"
}

refuse_full_disk() {
  local free_mb
  free_mb=$(df -Pk "$ROOT" 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }') || return 0
  [ -z "$free_mb" ] || [ "$free_mb" -ge "$NEEDED_MB" ] ||
    die "disk full: $free_mb MB free in $ROOT, and the environment needs about $NEEDED_MB MB"
}

# Prints in one line why pip (or venv) failed, from its output.
explain() {
  local output=$1
  matches() { printf '%s\n' "$output" | grep -qiE "$1"; }
  if matches 'no space left on device|errno 28|disk quota exceeded|errno 122'; then
    die "disk full while filling $VENV (or the temporary folder ${TMPDIR:-/tmp}); free about $NEEDED_MB MB and run this again"
  elif matches 'connection ?error|newconnection|failed to establish|name resolution|getaddrinfo|unreachable|connection refused|proxyerror|proxy error|timed out|timeout|connection broken|connection aborted'; then
    rm -f "$FILLING" # pip downloads everything before it installs anything, so the folder is unchanged
    die "no network: pip could not reach its package index; connect (or set pip's proxy or index) and run this again"
  elif matches 'certificate_verify_failed|sslerror'; then
    die "no trusted network: pip could not verify the package index's certificate; set PIP_CERT to your CA bundle and run this again"
  elif matches 'permission denied|errno 13|read-only file system|errno 30'; then
    die "cannot write to $VENV; make the project's folder writable and run this again"
  fi
  die "could not fill $VENV: $(printf '%s\n' "$output" | grep -E '^(ERROR|error|Error)' | tail -n 1 || printf '%s\n' "$output" | tail -n 1)"
}

show_milestones() { grep --line-buffered -oE 'Downloading .*\(([0-9.]{4,} M|[0-9.]+ G)B\)|^Installing collected packages' || true; }

# Runs a command and shows only its milestones. Its output is kept in memory, so that a full disk cannot hide an error.
attempt() {
  local output
  { output=$("$@" 2>&1 </dev/null | tee >(show_milestones >&3)); } 3>&1 || explain "$output"
}

fingerprint() {
  printf '%s\n' "$ROOT"
  cat constraints.txt pyproject.toml | cksum
  printf '%s\n' "$EXTRAS"
}

was_moved() { [ -e "$STAMP" ] && [ "$(head -n 1 "$STAMP")" != "$ROOT" ]; }

works() { [ -x "$PY" ] && is_new_enough "$(version_of "$PY" || echo 0.0)"; }

mark_filling() { { echo $$ >"$FILLING"; } 2>/dev/null || die "cannot write to $VENV; is the disk full, or the folder read-only?"; }

make_venv() {
  local base
  base=$(find_python) || exit 1
  refuse_full_disk
  say "making $VENV with Python $(version_of "$base") ($(command -v "$base"))"
  { rm -rf "$VENV" && mkdir "$VENV"; } 2>/dev/null || die "cannot write to $ROOT; make the project's folder writable and run this again"
  mark_filling
  attempt "$base" -m venv "$VENV" --upgrade-deps # an old pip takes half a minute longer to find the versions
}

fill_venv() {
  mark_filling
  say "installing the tested versions from constraints.txt; the first time takes a few minutes"
  attempt "$PY" -m pip install --progress-bar off --constraint constraints.txt --editable ".[$EXTRAS]"
  fingerprint >"$STAMP"
  rm -f "$FILLING"
  say "done: $VENV"
}

ready_venv() {
  if [ -e "$FILLING" ]; then
    ! kill -0 "$(cat "$FILLING")" 2>/dev/null || die "process $(cat "$FILLING") is filling $VENV just now; wait for it to end and run this again"
    say "an earlier run did not finish: starting over"
    make_venv
  elif was_moved || ! works; then
    make_venv
  elif [ -e "$STAMP" ] && [ "$(fingerprint)" = "$(cat "$STAMP")" ]; then
    say "using $VENV (already filled)"
    return
  else
    say "constraints.txt, pyproject.toml or MUON_EXTRAS changed, or .venv was made by hand: bringing $VENV up to date"
  fi
  fill_venv
}

cd "$ROOT"
forget_other_environments
ready_venv
export PATH="$VENV/bin:$PATH"
