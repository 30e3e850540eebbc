#!/usr/bin/env bash
# Runs ruff and pytest with the lowest versions that pyproject.toml allows, in a separate folder, build/lowest. It does not
# run mypy, because the types of torch and matplotlib change from version to version.
# Arguments go to pytest: bash scripts/lowest.sh tests/step. PYTHON chooses the Python, python3.10 by default.
# uv finds the versions. Its own variables, such as UV_EXTRA_INDEX_URL, may name an index with PyTorch's CPU builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=build/lowest
PY=$VENV/bin/python

[ -x "$PY" ] || "${PYTHON:-python3.10}" -m venv "$VENV"
[ -x "$VENV/bin/uv" ] || "$PY" -m pip install --quiet uv
uv() { "$VENV/bin/uv" pip "$@" --quiet --python "$PY"; }

uv compile --resolution lowest-direct --extra notebooks --extra tests --no-header --no-annotate pyproject.toml -o "$VENV/lowest.txt"
uv install --requirement "$VENV/lowest.txt"
uv install --no-deps --editable .

export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MPLBACKEND=Agg
export PATH="$PWD/$VENV/bin:$PATH"
"$PY" -m ruff check .
exec "$PY" -m pytest -n 2 --dist loadfile -m "not browser and not exhaustive" "$@" </dev/null
