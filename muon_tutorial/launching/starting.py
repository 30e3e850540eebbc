"""From a job to ranks that run: their lines, their processes, and the end of both whatever happens."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Literal

from .forking import ForkedRanks, warm_server
from .messages import Mailbox, RankEnds
from .output import RankOutput
from .run_files import RunFiles
from .spawn import SpawnedRanks
from .watch import Processes, Rank, Run

Method = Literal["fork", "spawn"]
FITTING: Method = "fork" if sys.platform == "linux" else "spawn"


@contextlib.contextmanager
def started(files: RunFiles, outputs: list[RankOutput], method: Method, timeout: float) -> Iterator[Run]:
    """Start a rank for each output; end them all on the way out."""
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as until_started:
            pairs = [_pairs(stack, until_started) for _ in outputs]
            processes = _processes(files, [ends for _, _, ends in pairs], method)
            stack.callback(processes.close)
            stack.callback(processes.kill)
        ranks = [
            Rank(number, Mailbox(line), output_end, output)
            for number, ((line, output_end, _), output) in enumerate(zip(pairs, outputs, strict=True))
        ]
        run = stack.enter_context(contextlib.closing(Run(ranks, processes, files.board, timeout)))
        yield run


def _pairs(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket, RankEnds]:
    """Return a rank's line and output: this process' ends, which never block, and the rank's."""
    line, rank_line = socket.socketpair()
    output, rank_output = socket.socketpair()
    for end in (line, output):
        end.setblocking(False)
        ours.enter_context(end)
    for end in (rank_line, rank_output):
        theirs.enter_context(end)
    return line, output, RankEnds(rank_line, rank_output)


def _processes(files: RunFiles, ends: list[RankEnds], method: Method) -> Processes:
    return ForkedRanks(warm_server(), files, ends) if method == "fork" else SpawnedRanks(files, ends)
