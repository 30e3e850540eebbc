#!/usr/bin/env bash
# Sets everything up, then runs ruff, mypy and pytest. Arguments go to pytest: bash scripts/test.sh tests/test_imports.py
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 # several processes share few cores
export MPLBACKEND=Agg

failed=""
run() {
  echo "test: $*"
  "$PY" -m "$@" </dev/null || failed="$failed $1"
}

run ruff check .
# mypy runs in parallel with pytest and prints its result at the end: it keeps one core busy for a minute.
typed=$(mktemp)
"$PY" -m mypy >"$typed" 2>&1 </dev/null &
types=$!
trap 'kill "$types" 2>/dev/null || true; rm -f "$typed"' EXIT
# Four processes, since tests wait for a third of their time; each takes one file at a time, in order, so that files with few long tests do not come last.
run pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
echo "test: mypy"
wait "$types" || failed="$failed mypy"
cat "$typed"

[ -z "$failed" ] || { echo "test: failed:$failed" >&2 && exit 1; }
echo "test: ruff, mypy and pytest passed"
