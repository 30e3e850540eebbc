"""Watches the ranks of a launch until they end: shows output, collects values and exit codes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import LaunchError
from .errors_of_lost_ranks import in_one_line, says_gone, text_of
from .fork_server import ForkedRanks
from .messages import LEAVE, WHERE, MessageSocket, ProcessState, RankLocation, RankRaised, read_now
from .phase_and_line import read_phases
from .ship_functions import loads
from .spawn import SpawnedRanks

_TICK = 0.05  # Seconds between two looks at the processes, because not every change wakes this loop.
_GRACE = 0.4  # Seconds for the other ranks to report what they saw, after one has failed.
_DYING = 1.0  # Seconds, after ``_GRACE``, for a rank to end if its connections have closed.
_REVIVING = 5.0  # Seconds added to the timeout of a stopped rank while others run, which may wake it.
_ANSWER = 1.5  # Seconds for a rank to say where it is: on a busy machine 0.3 were too few.
_LEAVING = 5.0  # Seconds for a rank to close its groups and end.
_STARTING = 120.0  # Seconds for the processes to start: torch may be on a slow disk.
_TAIL = 10  # Last lines that are shown at the end if a rank prints too many.
_LONGEST = 10_000  # A line is cut after this many characters.


def print_line(rank: int, line: str) -> None:
    """Print a rank's line to the launching process's current standard output."""
    sys.stdout.write(f"[rank {rank}] {line}\n")
    sys.stdout.flush()


class RankOutput:
    """Splits one rank's output into lines; shows the first `most` of them, and the last few at the end."""

    def __init__(self, rank: int, show: Callable[[int, str], None], most: int) -> None:
        self._rank, self._show, self._most = rank, show, most
        self._partial = b""
        self._lines = 0
        self._held: deque[str] = deque(maxlen=_TAIL)

    def feed(self, data: bytes) -> None:
        """Take bytes that have arrived, and show the lines that they complete."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._partial) > _LONGEST:
            self._line(self._partial)
            self._partial = b""

    def finish(self) -> None:
        """Show the last, unfinished line, and the last of the lines that were held back."""
        if self._partial:
            self._line(self._partial)
        left_out = self._lines - self._most - len(self._held)
        if left_out > 0:
            self._show(self._rank, f"… {left_out:,} lines not shown (launch(max_lines=…) shows more)")
        for line in self._held:
            self._show(self._rank, line)

    def _line(self, data: bytes) -> None:
        self._lines += 1
        # Where a progress bar has overwritten itself, only its last state is kept.
        line = data.decode(errors="replace").rstrip("\r").rpartition("\r")[2][:_LONGEST]
        if self._lines <= self._most:
            self._show(self._rank, line)
        else:
            self._held.append(line)


@dataclass(slots=True)
class WatchedRank:
    """One rank as the launching process sees it: this side of the sockets, and what is known about the rank.

    Times are monotonic seconds. ``phase`` and ``location`` are asked for only when the launch has failed.
    """

    rank: int
    messages: MessageSocket
    output_end: socket.socket
    output: RankOutput
    has_started: bool = False
    returned: bytes | None = None  # the pickled value
    raised: RankRaised | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    stopped_at: float | None = None
    phase: str = ""
    location: RankLocation | None = None

    @property
    def is_done(self) -> bool:
        """Whether the rank's function has ended, in any way."""
        return self.returned is not None or self.raised is not None or self.exit_code is not None

    @property
    def runs(self) -> bool:
        """Whether the rank's function still runs, and the rank is not stopped."""
        return not self.is_done and self.stopped_at is None

    @property
    def failed_itself(self) -> bool:
        """Whether the rank died, or raised an error that is not about another rank."""
        return self.has_died if self.raised is None else not self.raised.is_about_lost_rank

    @property
    def has_died(self) -> bool:
        """Whether the process ended before the function returned, or ended with a non-zero exit code."""
        return self.exit_code is not None and (self.returned is None or self.exit_code != 0)

    def has_failed(self, now: float, patience: float) -> bool:
        """Whether the rank raised, died, or has been stopped for more than `patience` seconds."""
        stopped = self.stopped_at is not None and now - self.stopped_at > patience
        return self.raised is not None or self.has_died or stopped


@dataclass(slots=True)
class RankWatcher:
    """Watches a launch. ``phases``: the path of the file of phases. ``timeout``: the groups' timeout in
    seconds."""

    ranks: list[WatchedRank]
    processes: ForkedRanks | SpawnedRanks
    phases: str
    timeout: float
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        for rank in self.ranks:
            self._selector.register(
                rank.messages.end, selectors.EVENT_READ, partial(self._read_messages, rank)
            )
            self._selector.register(rank.output_end, selectors.EVENT_READ, partial(self._read_output, rank))
        for waitable in self.processes.waitables:
            self._selector.register(waitable, selectors.EVENT_READ, lambda: None)

    def until_settled(self, limit: float | None) -> bool:
        """Wait until all ranks have returned or one has failed; False if `limit` seconds passed first."""
        begun = time.monotonic()
        patience = _STARTING if limit is None else min(limit, _STARTING)
        has_started = self._pump(lambda: all(rank.has_started for rank in self.ranks), patience)
        if not has_started and patience == _STARTING:
            raise LaunchError(f"the ranks' processes did not start within {_STARTING:g} s")
        left = None if limit is None else limit - (time.monotonic() - begun)
        return self._pump(lambda: self.all_returned() or self.has_failed(), left)

    def all_returned(self) -> bool:
        return all(rank.returned is not None for rank in self.ranks)

    def has_failed(self) -> bool:
        now, others_run = time.monotonic(), any(rank.runs for rank in self.ranks)
        patience = self.timeout + (_REVIVING if others_run else 0.0)
        return any(rank.has_failed(now, patience) for rank in self.ranks)

    def dismiss(self) -> None:
        """Let all ranks close their groups and end, now that no rank needs another one."""
        self._tell(LEAVE)
        self._pump(self._all_ended, min(self.timeout, _LEAVING))

    def values(self) -> list[Any]:
        return [_rebuilt(rank.rank, rank.returned) for rank in self.ranks if rank.returned is not None]

    def hear_out(self) -> list[WatchedRank]:
        """Give the ranks a moment to report what they saw and where they are; return the ranks."""
        self.processes.wake()
        self._pump(lambda: all(rank.is_done for rank in self.ranks), _GRACE)
        self._pump(lambda: not self._awaits_a_death(), _DYING)
        self._tell(WHERE)
        able = [rank for rank in self.ranks if rank.stopped_at is None]
        self._pump(lambda: all(rank.is_done or rank.location for rank in able), _ANSWER)
        for rank, phase in zip(self.ranks, read_phases(self.phases, len(self.ranks)), strict=True):
            rank.phase = phase
        return self.ranks

    def close(self) -> None:
        """End the ranks that still run, and show the last output."""
        with self._selector:
            self.processes.kill()
            self._pump(self._all_ended, _LEAVING)
        for rank in self.ranks:
            while data := read_now(rank.output_end, 1 << 16):
                rank.output.feed(data)
            rank.output.finish()

    def _awaits_a_death(self) -> bool:
        """Whether ranks have lost connections to a rank that has not ended yet. Connections close first."""
        losses = [rank.raised for rank in self.ranks if rank.raised is not None]
        explained = any(rank.failed_itself or rank.stopped_at is not None for rank in self.ranks)
        return bool(losses) and not explained and all(says_gone(loss.summary) for loss in losses)

    def _all_ended(self) -> bool:
        return all(rank.exit_code is not None for rank in self.ranks)

    def _tell(self, word: bytes) -> None:
        for rank in self.ranks:
            if not rank.messages.at_end_of_file:
                with contextlib.suppress(OSError):
                    rank.messages.end.send(word)

    def _pump(self, until: Callable[[], bool], limit: float | None) -> bool:
        """Handle messages, output and exits until `until()` is true; False if `limit` seconds pass first."""
        deadline = None if limit is None else time.monotonic() + limit
        while not until():
            if deadline is not None and time.monotonic() > deadline:
                return False
            for key, _ in self._selector.select(_TICK):
                key.data()
            for state in self.processes.news():
                self._note(self.ranks[state.rank], state)
        return True

    def _read_messages(self, rank: WatchedRank) -> None:
        for record in rank.messages.receive():
            if isinstance(record, bytes):
                rank.returned = record
            elif isinstance(record, RankRaised):
                rank.raised = record
            elif isinstance(record, RankLocation):
                rank.location = record
        if rank.messages.at_end_of_file:
            self._forget(rank.messages.end)
            self.processes.wake()  # even a stopped server then reports the rank's end

    def _read_output(self, rank: WatchedRank) -> None:
        data = read_now(rank.output_end, 1 << 16)
        if data:
            rank.output.feed(data)
        elif data is not None:
            self._forget(rank.output_end)

    def _note(self, rank: WatchedRank, state: ProcessState) -> None:
        rank.has_started = True
        if state.exit_code is None:
            rank.stopped_at = time.monotonic() if state.is_stopped else None
        else:
            self._read_messages(rank)
            rank.exit_code, rank.ended_at = state.exit_code, time.monotonic()

    def _forget(self, end: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(end)


def _rebuilt(rank: int, value: bytes) -> Any:
    try:
        return loads(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the value's own class may raise anything
        raise LaunchError(
            f"the value that rank {rank} returned cannot be rebuilt here: {type(error).__name__}: "
            f"{in_one_line(text_of(error))}"
        ) from None
