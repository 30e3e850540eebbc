"""What passes between the launching process, its ranks and the server that forks them: plain records, framed.

Knows nothing of processes or of torch. Every record is a frozen dataclass, sent pickled behind its length.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct("!Q")
_CHUNK = 1 << 20

LEAVE = b"L"  # launcher to rank: everybody is done, go
WHERE = b"W"  # launcher to rank: say where your main thread is


@dataclass(frozen=True, slots=True)
class Job:
    """All a rank needs to do its part; one copy serves every rank. ``timeout`` is in seconds."""

    world_size: int
    backend: str
    timeout: float
    threads: int
    cargo: bytes
    sources: dict[str, list[str]]
    environ: dict[str, str]
    folder: str
    import_path: list[str]
    argv: list[str]


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned; ``value`` is pickled."""

    value: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """The function, or the preparation for it, raised. ``when`` is the machine's monotonic clock, in seconds.

    ``is_echo``: the error only says that another rank was lost, or kept it waiting.
    """

    when: float
    summary: str
    traceback: str
    is_echo: bool
    original: bytes | None


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank's main thread was when asked: one line, and whether that is inside torch.distributed."""

    line: str
    communicating: bool


@dataclass(frozen=True, slots=True)
class Exited:
    """A rank's process ended; ``code`` is negative for a signal, as in ``subprocess``."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A rank's process was stopped by a signal, or goes on again."""

    rank: int
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Started:
    """The process ids of the ranks, in order."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of the server: how many ranks. Their ends and the run's files come as descriptors."""

    world_size: int


@dataclass(frozen=True, slots=True)
class RankEnds:
    """A rank's ends of its line and its output; closed in the launching process once the rank has its own."""

    line: socket.socket
    output: socket.socket


class Mailbox:
    """Records over a stream socket: ``send`` blocks, in any thread; ``receive`` takes what has come."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.at_end_of_file = False
        self._pending = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, record: object) -> None:
        data = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self.end.sendall(_HEADER.pack(len(data)))
            self.end.sendall(data)

    def receive(self) -> list[Any]:
        """Return the whole records that have come, without waiting; notes the end of the file."""
        self._fill()
        return list(self._whole_records())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.end.close()

    def _fill(self) -> None:
        while not self.at_end_of_file:
            try:
                data = self.end.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.at_end_of_file = not data
            self._pending += data

    def _whole_records(self) -> list[Any]:
        records = []
        while len(self._pending) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._pending)
            end = _HEADER.size + size
            if len(self._pending) < end:
                break
            records.append(pickle.loads(bytes(self._pending[_HEADER.size : end])))
            del self._pending[:end]
        return records
