"""The messages between the launching process, its ranks and the fork server, as plain records.

Knows nothing about processes or torch. Every record is a frozen dataclass; its length is sent before its
pickle.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20

LEAVE = b"L"  # Launcher to rank: all ranks are done, so exit.
WHERE = b"W"  # Launcher to rank: say where your main thread is.


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything that a rank needs; one copy serves every rank. ``timeout`` is in seconds.

    ``call``: the pickled function with its arguments. ``sources``: the text of cells that only the launching
    process knows. ``handled``: the signals that the launching process handles, so that ranks can ignore them.
    """

    world_size: int
    backend: str
    timeout: float
    threads: int
    call: bytes
    sources: dict[str, list[str]]
    environ: dict[str, str]
    folder: str
    import_path: list[str]
    argv: list[str]
    handled: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankRaised:
    """An error that the function raised, or that was raised before the function was called.

    If the function returns, the rank sends the bytes of the pickled value instead of a record.

    ``when`` is in seconds, on the machine's monotonic clock. ``is_about_lost_rank``: the error only says that
    another rank was lost, or kept this rank waiting.
    """

    when: float
    summary: str
    traceback: str
    is_about_lost_rank: bool
    original: bytes | None


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The line of code that a rank's main thread was at, and whether it was inside torch.distributed."""

    line: str
    communicating: bool


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A rank's process, as its parent reports it when the process starts, stops, continues or ends.

    ``exit_code`` is negative for a signal, as in ``subprocess``, and None while the process runs.
    """

    rank: int
    pid: int
    exit_code: int | None = None
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class RankEnds:
    """A rank's ends of two sockets: one for messages, one for standard output and error."""

    messages: socket.socket
    output: socket.socket


class MessageSocket:
    """Sends and receives records over a stream socket.

    Any thread may call ``send``, which may block. ``receive`` never blocks.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.at_end_of_file = False
        self._pending = bytearray()
        self._sending = threading.Lock()

    def send(self, record: object) -> None:
        data = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self.end.sendall(_LENGTH.pack(len(data)))
            self.end.sendall(data)

    def receive(self) -> list[Any]:
        """Return the complete records that have arrived; set ``at_end_of_file`` if no more can arrive."""
        while not self.at_end_of_file and (data := read_now(self.end, _CHUNK)) is not None:
            self.at_end_of_file = not data
            self._pending += data
        records = []
        while len(self._pending) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._pending)[0]
            if len(self._pending) < end:
                break
            records.append(pickle.loads(bytes(self._pending[_LENGTH.size : end])))
            del self._pending[:end]
        return records


def read_now(end: socket.socket, most: int) -> bytes | None:
    """Return the bytes that have arrived: ``b""`` at the end of the file, None if nothing has arrived yet."""
    try:
        return end.recv(most)
    except BlockingIOError:
        return None
    except OSError:
        return b""
