"""Makes the environment of a launch's ranks: only loopback, few threads, no variables of torchrun."""

from __future__ import annotations

import os
import socket

TORCHRUN_NEEDS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GROUPS = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE")
_ELASTIC = ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE")
_OF_TORCHRUN = {*TORCHRUN_NEEDS, *_GROUPS, *(f"TORCHELASTIC_{name}" for name in _ELASTIC)}


def rank_environment(threads: int) -> dict[str, str]:
    """Return this process's environment, changed for the ranks of a launch."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
    return kept | loopback_variables() | {"OMP_NUM_THREADS": str(threads)}


def loopback_variables() -> dict[str, str]:
    """Return the variables that keep Gloo and NCCL on the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    found = next((name for name in ("lo", "lo0") if name in names), None)
    return {"GLOO_SOCKET_IFNAME": found, "NCCL_SOCKET_IFNAME": found} if found else {}
