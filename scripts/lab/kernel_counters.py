"""Reads how many bytes the kernel has sent for this process, from the TCP counter of each of its sockets.

Reading these counters needs Linux, and no privilege.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_SOCKETS = Path("/proc/self/fd")
_BYTES_SENT = 200  # offset of tcpi_bytes_sent in struct tcp_info (linux/tcp.h, since 4.19)
_RETRANSMITTED = 208


def tcp_sent() -> int | None:
    """Bytes that this process's open TCP sockets have sent, each once; None if there is no counter."""
    if not _SOCKETS.is_dir() or not hasattr(socket, "TCP_INFO"):
        return None
    return sum(_sent(int(entry.name)) for entry in _SOCKETS.iterdir() if entry.is_socket())


def _sent(descriptor: int) -> int:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) >= _RETRANSMITTED + 8:
                sent, again = struct.unpack_from("QQ", info, _BYTES_SENT)
                return sent - again
    return 0
