#!/usr/bin/env bash
# Sets everything up, then trains a small GPT with distributed Muon on 4 processes, 2 dp × 2 tp, and again on one.
# Arguments are passed on and override these: bash scripts/demo.sh --dp 4 --tp 2
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

echo "demo: python -m muon_tutorial train --dp 2 --tp 2 --compare${*:+ $*}"
exec "$PY" -m muon_tutorial train --dp 2 --tp 2 --compare "$@"
