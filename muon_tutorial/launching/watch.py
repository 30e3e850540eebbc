"""The launching process' side of a run: gathers output, values and news of the ranks until it is over."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import LaunchError
from .failure_message import RankStory
from .messages import LEAVE, WHERE, Exited, Mailbox, Raised, Returned, Started, Stopped, Whereabouts
from .output import RankOutput
from .phase import read_phases
from .ship_functions import loads

_TICK = 0.05  # seconds between looks at processes that announce nothing
_GRACE = 0.4  # seconds for the other ranks to say what they saw, once one has failed
_ANSWER = 0.3  # seconds for a rank to say where it is
_LEAVING = 5.0  # seconds for a rank to close its groups and end
_STARTING = 120.0  # seconds for the processes to be there: torch may have to come from a slow disk


class Processes(Protocol):
    """The processes behind a run, however they were started."""

    def waitables(self) -> Sequence[socket.socket]:
        """Return what becomes readable when there is news."""
        ...

    def news(self) -> Sequence[Started | Exited | Stopped]:
        """Return what happened since the last call, without waiting."""
        ...

    def kill(self) -> None:
        """End every process that still runs, stopped ones too."""
        ...

    def close(self) -> None:
        """Give back what the processes held here; wait for those of our own."""
        ...


@dataclass(slots=True)
class Rank:
    """One rank as seen from the launching process."""

    rank: int
    mailbox: Mailbox
    output_end: socket.socket
    output: RankOutput
    returned: Returned | None = None
    raised: Raised | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    stopped_at: float | None = None
    whereabouts: Whereabouts | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to come from its function."""
        return self.returned is not None or self.raised is not None or self.exit_code is not None

    def has_failed(self, now: float, timeout: float) -> bool:
        """Whether it raised, died, or has been stopped for longer than `timeout` seconds."""
        died = self.exit_code is not None and (self.returned is None or self.exit_code != 0)
        stopped = self.stopped_at is not None and now - self.stopped_at > timeout
        return self.raised is not None or died or stopped

    def story(self, phase: str) -> RankStory:
        """Return what is known of it, for a report."""
        return RankStory(
            self.rank,
            phase,
            self.raised,
            self.exit_code,
            self.ended_at,
            self.stopped_at,
            self.returned is not None,
            self.whereabouts,
        )


@dataclass(slots=True)
class Run:
    """A run in progress. ``timeout`` is the ranks' own, in seconds."""

    ranks: list[Rank]
    processes: Processes
    board: str
    timeout: float
    _has_started: bool = False
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        for rank in self.ranks:
            self._selector.register(rank.mailbox, selectors.EVENT_READ, rank)
            self._selector.register(rank.output_end, selectors.EVENT_READ, rank)
        for waitable in self.processes.waitables():
            self._selector.register(waitable, selectors.EVENT_READ, None)

    def until_settled(self, limit: float | None) -> bool:
        """Wait until all ranks returned or one failed; False when `limit` seconds passed first.

        Raises:
            LaunchError: the processes could not be started.
        """
        begun = time.monotonic()
        patience = _STARTING if limit is None else min(limit, _STARTING)
        if not self._pump(lambda: self._has_started, patience) and patience == _STARTING:
            raise LaunchError(f"the ranks' processes did not start within {_STARTING:g} s")
        left = None if limit is None else limit - (time.monotonic() - begun)
        return self._pump(lambda: self.all_returned() or self.has_failed(), left)

    def all_returned(self) -> bool:
        """Whether every rank's function returned."""
        return all(rank.returned is not None for rank in self.ranks)

    def has_failed(self) -> bool:
        """Whether a rank failed."""
        now = time.monotonic()
        return any(rank.has_failed(now, self.timeout) for rank in self.ranks)

    def dismiss(self) -> None:
        """Let all ranks close their groups and end, now that none needs another."""
        self._tell(LEAVE)
        self._pump(self._all_ended, _LEAVING)

    def values(self) -> list[Any]:
        """Return what the ranks' functions returned."""
        return [loads(rank.returned.value) for rank in self.ranks if rank.returned is not None]

    def stories(self) -> list[RankStory]:
        """Hear the ranks out, briefly, and return what is known of each."""
        self._pump(lambda: all(rank.is_done for rank in self.ranks), _GRACE)
        self._tell(WHERE)
        self._pump(lambda: all(rank.is_done or rank.whereabouts for rank in self.ranks), _ANSWER)
        phases = read_phases(self.board, len(self.ranks))
        return [rank.story(phase) for rank, phase in zip(self.ranks, phases, strict=True)]

    def close(self) -> None:
        """End what still runs, and show the last output."""
        with self._selector:
            self.processes.kill()
            self._pump(self._all_ended, _LEAVING)
            self._drain_output()

    def _all_ended(self) -> bool:
        return all(rank.exit_code is not None for rank in self.ranks)

    def _tell(self, word: bytes) -> None:
        for rank in self.ranks:
            if not rank.mailbox.at_end_of_file:
                with contextlib.suppress(OSError):
                    rank.mailbox.end.send(word)

    def _pump(self, until: Callable[[], bool], limit: float | None) -> bool:
        """Take what comes until `until` holds; False when `limit` seconds passed first."""
        deadline = None if limit is None else time.monotonic() + limit
        while not until():
            if deadline is not None and time.monotonic() > deadline:
                return False
            self._take_what_came()
        return True

    def _take_what_came(self) -> None:
        for key, _ in self._selector.select(_TICK):
            if isinstance(key.fileobj, Mailbox):
                self._read_mail(key.data)
            elif key.data is not None:
                self._read_output(key.data)
        for event in self.processes.news():
            self._note(event)

    def _read_mail(self, rank: Rank) -> None:
        for record in rank.mailbox.receive():
            if isinstance(record, Returned):
                rank.returned = record
            elif isinstance(record, Raised):
                rank.raised = record
            elif isinstance(record, Whereabouts):
                rank.whereabouts = record
        if rank.mailbox.at_end_of_file:
            self._forget(rank.mailbox)

    def _read_output(self, rank: Rank) -> None:
        data = _read_now(rank.output_end)
        if data:
            rank.output.feed(data)
        elif data is not None:
            self._forget(rank.output_end)

    def _note(self, event: Started | Exited | Stopped) -> None:
        if isinstance(event, Started):
            self._has_started = True
        elif isinstance(event, Exited):
            rank = self.ranks[event.rank]
            self._read_mail(rank)
            rank.exit_code, rank.ended_at = event.code, time.monotonic()
        elif isinstance(event, Stopped):
            self.ranks[event.rank].stopped_at = time.monotonic() if event.is_stopped else None

    def _forget(self, waitable: Mailbox | socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(waitable)

    def _drain_output(self) -> None:
        for rank in self.ranks:
            while data := _read_now(rank.output_end):
                rank.output.feed(data)
            rank.output.finish()


def _read_now(end: socket.socket) -> bytes | None:
    """Return the bytes that have come: none at all at the end of the file, None when there are none yet."""
    try:
        return end.recv(1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""
