#!/usr/bin/env bash
# Runs a command whose loopback carries only so much: bash scripts/shaped.sh 200mbit python my_script.py
#
# The command gets a network namespace of its own (no root needed where user namespaces are allowed), whose
# loopback a token bucket limits. All its ranks share that one loopback, as a bus. RATE is as tc writes it:
# 1gbit, 200mbit, 50mbit. Ends with 77 where the machine cannot do it.
set -euo pipefail
rate=$1
shift
unshare -rn true 2>/dev/null || { echo "shaped: no network namespaces here (unshare -rn)" >&2; exit 77; }
command -v tc >/dev/null || { echo "shaped: needs tc and ip (Debian: iproute2)" >&2; exit 77; }
exec unshare -rn bash -c '
  ip link set lo up && tc qdisc add dev lo root tbf rate "$0" burst 128kb limit 64mb ||
    { echo "shaped: tc cannot limit the loopback here" >&2; exit 77; }
  exec "$@"' "$rate" "$@"
