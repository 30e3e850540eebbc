#!/usr/bin/env bash
# Sets everything up, then opens the notebooks in JupyterLab, on this machine only.
# Arguments are passed on: bash scripts/lab.sh --no-browser --port 8899
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

export JUPYTER_PREFER_ENV_PATH=1 # use our kernel, not one of the same name in the home folder
as_root=()
[ "$(id -u)" -ne 0 ] || as_root=(--allow-root)
echo "lab: opening notebooks/ in JupyterLab; stop it with Ctrl-C"
exec "$PY" -m jupyterlab --ServerApp.ip=localhost --ServerApp.root_dir="$ROOT/notebooks" ${as_root[@]+"${as_root[@]}"} "$@"
