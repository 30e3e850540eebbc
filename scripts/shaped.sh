#!/usr/bin/env bash
# Runs a command behind a loopback of limited bandwidth: bash scripts/shaped.sh 200mbit python my_script.py
#
# The command gets its own network namespace (no root needed if user namespaces are allowed), and a token
# bucket limits the namespace's loopback. All ranks share that loopback, as a bus. RATE is in tc's notation:
# 1gbit, 200mbit, 50mbit. Exits with 77 if the machine cannot do it.
set -euo pipefail
rate=$1
shift
unshare -rn true 2>/dev/null || { echo "shaped: no network namespaces here (unshare -rn)" >&2; exit 77; }
command -v tc >/dev/null || { echo "shaped: needs tc and ip (Debian: iproute2)" >&2; exit 77; }
exec unshare -rn bash -c '
  ip link set lo up && tc qdisc add dev lo root tbf rate "$0" burst 128kb limit 64mb ||
    { echo "shaped: tc cannot limit the loopback here" >&2; exit 77; }
  exec "$@"' "$rate" "$@"
