"""The network that only this machine can reach."""

from __future__ import annotations

import socket
import sys


def loopback_variables() -> dict[str, str]:
    """Return what keeps Gloo and NCCL on loopback; nothing on Windows, where Gloo is there by itself."""
    names = [name for _, name in socket.if_nameindex()] if sys.platform != "win32" else []
    found = next((name for name in ("lo", "lo0") if name in names), None)
    return {"GLOO_SOCKET_IFNAME": found, "NCCL_SOCKET_IFNAME": found} if found else {}
