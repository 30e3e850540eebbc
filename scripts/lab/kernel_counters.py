"""Reads the kernel's own counters of the bytes that this process has really sent. Linux only.

``tcp_sent`` reads TCP's counter of each socket that the process holds. This counter gives one rank's bytes,
and needs no privilege. ``interface_sent`` reads a network interface. The interface counts all ranks' bytes
with headers and acknowledgements, so nothing else may use the interface; a separate network namespace ensures
that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_SOCKETS = Path("/proc/self/fd")
_INTERFACES = Path("/proc/net/dev")
_BYTES_SENT = 200  # offset of tcpi_bytes_sent in struct tcp_info (linux/tcp.h, since 4.19)
_RETRANSMITTED = 208


def tcp_sent() -> int | None:
    """Bytes that this process's open TCP sockets have sent, each once; None if there is no counter."""
    if not _SOCKETS.is_dir() or not hasattr(socket, "TCP_INFO"):
        return None
    return sum(_sent(int(entry.name)) for entry in _SOCKETS.iterdir() if _is_socket(entry))


def interface_sent(name: str = "lo") -> int | None:
    """Bytes that an interface has sent, with headers and acknowledgements; None if there is no counter."""
    if not _INTERFACES.is_file():
        return None
    for line in _INTERFACES.read_text().splitlines():
        interface, colon, counters = line.partition(":")
        if colon and interface.strip() == name:
            return int(counters.split()[8])
    return None


def _is_socket(entry: Path) -> bool:
    try:
        return os.readlink(entry).startswith("socket:")
    except OSError:  # closed since the folder was listed
        return False


def _sent(descriptor: int) -> int:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) >= _RETRANSMITTED + 8:
                sent, again = struct.unpack_from("QQ", info, _BYTES_SENT)
                return sent - again
    return 0
