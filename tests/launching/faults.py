"""Seeded faults of ranks: kinds × phases × ranks, the outcome of each launch, and a table of the outcomes.

``python -m tests.launching.faults SEED COUNT`` runs COUNT launches of 4 ranks, and prints the table.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist

from muon_tutorial.errors import RankFailedError
from muon_tutorial.launching.fork_server import warm_server
from muon_tutorial.launching.launch import launch
from muon_tutorial.launching.messages import ProcessState
from muon_tutorial.launching.watch import RankWatcher, WatchedRank
from tests.launching.launch_ranks import total
from tests.launching.launch_traces import still_running

RANKS = 4
TIMEOUT = 2.0  # seconds
SLACK = 2.0  # seconds beyond the timeout within which a launch must have ended


def _send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise(error: BaseException) -> Callable[[], None]:
    def now() -> None:
        raise error

    return now


SIGNALS = {name: signal.Signals[name] for name in ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGTERM", "SIGABRT")}
KINDS: dict[str, Callable[[], None]] = {
    **{name: _send(number) for name, number in SIGNALS.items()},
    "os._exit": lambda: os._exit(3),
    "raise": _raise(ValueError("planted")),
    "MemoryError": _raise(MemoryError("planted")),
    "sys.exit": lambda: sys.exit("planted"),
    "torch's own words": _raise(RuntimeError("planted: Connection reset by peer")),
}
KINDS |= {
    "spins": lambda: time.sleep(1000),
    "holds the GIL": lambda: print(re.match(r"(a+)+$", "a" * 64 + "b")),
    "returns early": lambda: None,
    "asks once more": lambda: None,
}
LATE = ("spins", "holds the GIL", "returns early", "asks once more")
RAISING = ("raise", "MemoryError", "sys.exit", "torch's own words")
PHASES = ("before init", "import", "first", "in a collective", "between", "returning", "teardown")


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one rank and its time; ``delay`` is in seconds from the beginning of the phase."""

    rank: int
    kind: str
    phase: str
    delay: float
    second: Fault | None = None

    def happens(self, phase: str) -> None:
        """Break this process, if it is this rank and phase."""
        if self.second:
            self.second.happens(phase)
        if phase == self.phase and dist.is_initialized() and dist.get_rank() == self.rank:
            time.sleep(self.delay)
            KINDS[self.kind]()


class Tripwire:
    """Breaks the process that unpickles or pickles it."""

    def __init__(self, fault: Fault, phase: str) -> None:
        self.fault, self.phase = fault, phase

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.fault.happens("import")

    def __getstate__(self) -> dict[str, Any]:
        self.fault.happens(self.phase)
        return self.__dict__


def work(rank: int, tripwire: Tripwire) -> Tripwire:
    """Do a few all_reduces, with the fault among them."""
    fault = tripwire.fault
    fault.happens("first")
    x = torch.ones(1000)
    dist.all_reduce(x)
    fault.happens("between")
    if fault.phase == "between" and rank == fault.rank and fault.kind == "returns early":
        return tripwire
    if fault.phase == "in a collective":
        if rank == fault.rank and fault.kind not in RAISING:
            threading.Thread(target=fault.happens, args=(fault.phase,), daemon=True).start()
        if rank == (fault.rank + 1) % RANKS:
            time.sleep(0.3)
        waiting = dist.all_reduce(x, async_op=True)
        if fault.kind in RAISING:
            fault.happens(fault.phase)
        waiting.wait()
    dist.all_reduce(x)
    if rank == fault.rank and fault.kind == "asks once more":
        dist.all_reduce(x)
    if fault.phase == "teardown" and rank == fault.rank:
        threading.Thread(target=fault.happens, args=("teardown",), daemon=True).start()
    return Tripwire(fault, "returning")


def draw(randomly: random.Random) -> Fault:
    """Return a random fault among the possible ones."""
    while True:
        phase, kind = randomly.choice(PHASES), randomly.choice(list(KINDS))
        rank, delay = randomly.randrange(RANKS), randomly.random() * 0.06
        if kind in LATE:
            phase = "between"
        if phase in ("before init", "teardown") and kind not in SIGNALS:
            continue  # only another thread or process can act then
        second = None
        if phase == "between" and kind not in LATE and randomly.random() < 0.5:
            second = Fault((rank + 1) % RANKS, randomly.choice([*SIGNALS, "raise"]), phase, delay + 0.1)
        return Fault(rank, kind, phase, delay, second)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a launch: the rank that was named (None without an error), seconds since all
    ranks had started, and the number of processes left."""

    fault: Fault
    named: int | None
    headline: str
    seconds: float
    left: int

    @property
    def verdict(self) -> str:
        """The outcome in a word or two."""
        if self.left:
            return "left processes"
        if self.seconds > TIMEOUT + SLACK:
            return "hung"
        if self.named == self.fault.rank:
            raised = self.fault.kind in RAISING
            return "unsaid" if raised and "planted" not in self.headline.split("\n")[0] else "named"
        return "went well" if self.named is None and self.fault.phase == "teardown" else "misnamed"


def outcome_of(fault: Fault) -> Outcome:
    """Launch ranks of which one has the fault."""
    pids: list[int] = []
    started: list[float] = []  # when each process had started, in seconds
    note = RankWatcher._note

    def see(self: RankWatcher, rank: WatchedRank, state: ProcessState) -> None:
        if state.pid not in pids:
            pids.append(state.pid)
            started.append(time.monotonic())
            if fault.phase == "before init" and state.rank == fault.rank:
                arguments = (state.pid, SIGNALS[fault.kind])
                threading.Timer(fault.delay, os.kill, arguments).start()
        note(self, rank, state)

    named, headline = None, ""
    with mock.patch.object(RankWatcher, "_note", see):
        try:
            launch(work, RANKS, args=(Tripwire(fault, "never"),), timeout=TIMEOUT, output="quiet")
        except RankFailedError as error:
            named, headline = error.rank, str(error)
        except Exception as error:
            named, headline = -1, repr(error)
    seconds = time.monotonic() - started[-1]
    return Outcome(fault, named, headline, seconds, len(still_running(pids, 1.0)))


def table(outcomes: list[Outcome]) -> str:
    """Return the verdicts by kind and phase."""
    lines = [f"{'':20}" + "".join(f"{phase:>17}" for phase in PHASES)]
    for kind in KINDS:
        cells = []
        for phase in PHASES:
            of = [each for each in outcomes if (each.fault.kind, each.fault.phase) == (kind, phase)]
            good = sum(each.verdict in ("named", "went well") for each in of)
            cells.append(f"{good}/{len(of)}" if of else "–")
        lines.append(f"{kind:20}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join([*lines, str(dict(Counter(each.verdict for each in outcomes)))])


def main(seed: int, count: int) -> None:
    """Run, print the table, and each launch that did not end as it should."""
    randomly = random.Random(seed)
    launch(total, RANKS)  # after this, the server has finished its imports
    outcomes = [outcome_of(draw(randomly)) for _ in range(count)]
    print(table(outcomes))
    print("longest:", f"{max(each.seconds for each in outcomes):.2f} s")
    print("below the server:", len(psutil.Process(warm_server()._child.pid).children()))
    for each in outcomes:
        if each.verdict not in ("named", "went well"):
            print(each.verdict, each.fault, each.named, f"{each.seconds:.2f} s\n   ", each.headline[:1500])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
