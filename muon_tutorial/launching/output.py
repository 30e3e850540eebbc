"""What ranks print, shown as it comes: whole lines, each behind its rank, and no flood."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

_TAIL = 10  # lines kept back for the end when a rank floods
_LONGEST = 10_000  # characters of a line before it is cut


def print_line(rank: int, line: str) -> None:
    """Print a rank's line to the launching process' own standard output, whatever that is now."""
    sys.stdout.write(f"[rank {rank}] {line}\n")
    sys.stdout.flush()


class RankOutput:
    """Makes lines of one rank's bytes, and shows the first `most` of them, then the last few at the end."""

    def __init__(self, rank: int, show: Callable[[int, str], None], most: int) -> None:
        self._rank, self._show, self._most = rank, show, most
        self._partial = b""
        self._lines = 0
        self._held: deque[str] = deque(maxlen=_TAIL)

    def feed(self, data: bytes) -> None:
        """Take bytes as they came, and show the lines they complete."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._partial) > _LONGEST:
            self._line(self._partial)
            self._partial = b""

    def finish(self) -> None:
        """Show the last unfinished line, and the end of what was held back."""
        if self._partial:
            self._line(self._partial)
        left_out = self._lines - self._most - len(self._held)
        if left_out > 0:
            self._show(self._rank, f"… {left_out:,} lines not shown (launch(max_lines=…) shows more)")
        for line in self._held:
            self._show(self._rank, line)

    def _line(self, data: bytes) -> None:
        self._lines += 1
        line = _as_a_terminal_shows(data)
        if self._lines <= self._most:
            self._show(self._rank, line)
        else:
            self._held.append(line)


def _as_a_terminal_shows(data: bytes) -> str:
    """Decode a line; of a progress bar that returns to its start, keep the last state."""
    text = data.decode(errors="replace").rstrip("\r")
    return text.rpartition("\r")[2][:_LONGEST]
