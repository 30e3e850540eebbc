"""Shows what ranks print as it comes: in whole lines with the rank's number, and a limited number of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

_TAIL = 10  # last lines that are shown at the end if a rank prints too many
_LONGEST = 10_000  # characters after which a line is cut


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
        """Take bytes as they come, and show the lines that they complete."""
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
