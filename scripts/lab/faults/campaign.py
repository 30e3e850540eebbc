"""Runs each case with its starter, and lets ``judge`` decide on it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from muon_tutorial import LaunchError, TutorialError, launch
from muon_tutorial.launching.fork_server import warm_server

from . import broken_saves, strikes, tampering
from .case import STRUCK, TIMEOUT, Case, Outcome, Seen
from .data_faults import FAULTS
from .in_rank import play, play_locally
from .judge import blame, judge
from .processes import MARK, children, left_behind, server, since_struck, wait_until

Show = Callable[[Outcome], None]
_ALIKE = 60  # two ranks' errors count as the same if this many first characters match
_KILLED = re.compile(r"rank (\d+)(?: of \d+)?:? was killed by (SIG\w+)")
_OWN_DEATHS = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")


class Campaign:
    """A campaign in progress; ``close`` removes its files. At most one per process."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="muon-faults-"))
        self.mark = f"campaign-{os.getpid()}"
        os.environ[MARK] = self.mark
        if server() is not None:
            warm_server().close()  # this fork server lacks the mark; the next launch starts another
        self._saves: Path | None = None
        self._usual: list[broken_saves.Undisturbed] = []

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, cases: Sequence[Case], show: Show = lambda outcome: None) -> list[Outcome]:
        """Run cases; returns one outcome per case, in their order."""
        outcomes = []
        for case in cases:
            outcomes.append(self._run_one(case))
            show(outcomes[-1])
        return outcomes

    def _run_one(self, case: Case) -> Outcome:
        begun = time.monotonic()
        try:
            seen = self._play(case)
        except Exception as error:  # one case must not end the campaign
            where = f"the campaign itself, or what it called here, raised {type(error).__name__}: {error}"
            seen = Seen(message=where, message_type=type(error).__name__, named=False)
        orphans = (*seen.orphans, *left_behind(self.mark))
        verdict, detail = judge(case, replace(seen, orphans=orphans))
        return Outcome(case, verdict, detail, time.monotonic() - begun)

    def _play(self, case: Case) -> Seen:
        folder = self._new_folder()
        if case.starter == "LocalWorld":
            return Seen(records=tuple(play_locally(case)))
        if case.starter == "one process":
            return tampering.tampered(case, self.saves, folder)
        if case.kind == broken_saves.TWO_SAVERS:
            return _two_savers(folder)
        if case.kind in broken_saves.SAVING:
            return self._save(case, folder)
        if case.kind in FAULTS:
            return launched(case, folder, play, case, str(folder))
        return _struck(case, folder)

    @property
    def saves(self) -> Path:
        """Two checkpoints of one job, written by four ranks on first use."""
        if self._saves is None:
            self._saves = self._new_folder()
            launch(tampering.prepare, 4, args=(str(self._saves),), output="quiet", timeout=10 * TIMEOUT)
        return self._saves

    def _save(self, case: Case, folder: Path) -> Seen:
        if not self._usual:
            limits: Any = {"output": "quiet", "timeout": 10 * TIMEOUT}
            self._usual = launch(broken_saves.count_files, 2, args=(str(self._new_folder()),), **limits)
        root = folder / "job"
        root.mkdir()
        seen = launched(case, folder, broken_saves.save_or_load, case, str(root), self._usual[case.rank or 0])
        disk = broken_saves.left_on_disk(root)
        return replace(
            seen,
            records=() if seen.message else seen.records,
            message=seen.message if disk.equal is not False else f"{seen.message} / {disk.message}",
            half_loaded=(folder / broken_saves.HALF).exists(),
            equal=disk.equal,
            retry_refused=disk.retry_refused,
        )

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))


def warm_up() -> None:
    """Wait until the server that forks ranks has finished its imports, so that they delay no case."""

    def has_imports(rank: int) -> bool:
        return {"torch._dynamo", "torch.distributed.fsdp"} <= sys.modules.keys()

    wait_until(lambda: all(launch(has_imports, 1, output="quiet")), 60, every=0.5)


def _of_error(case: Case, error: Exception) -> Seen:
    """The observations from a launch's error: its text, its rank, and signals that the fault did not send."""
    kind, text = type(error).__name__, str(error)
    if not isinstance(error, LaunchError):
        return Seen(message=f"{kind}: {text}", message_type=kind, named=isinstance(error, TutorialError))
    theirs = tuple(
        f"{name} on rank {rank}"
        for rank, name in _KILLED.findall(text)
        if name in _OWN_DEATHS and (case.rank != int(rank) or (case.kind != name and case.kind in FAULTS))
    )
    blamed = getattr(error, "rank", None)
    original = getattr(error, "original", None)
    if isinstance(original, TutorialError) and case.rank is not None:
        own, lines = f"{type(original).__name__}: ", text.partition("The other ranks:")[2].splitlines()
        texts = [str(original), *(line.partition(own)[2] for line in lines if own in line)]
        said = next((each for each in texts if blame(each, case.rank) == "named"), texts[0])
        alike = any(each[:_ALIKE] == texts[0][:_ALIKE] for each in texts[1:])
        if alike or blame(said, case.rank) != "unnamed":
            blamed = None  # judge the text instead, because any rank may report the error first
        return Seen(message=said, message_type=kind, blamed=blamed, signals=theirs)
    first = text.split("\n")[0]
    if first.startswith("no rank crashed"):
        blamed = None  # the error is reported for a rank that only waited
    # A data fault must give one of the package's own errors; a killed process need not.
    bare = case.kind in FAULTS and " raised " in first and "muon_tutorial.errors." not in first
    return Seen(message=first, message_type=kind, named=not bare, blamed=blamed, signals=theirs)


def launched(case: Case, folder: Path, fn: Callable[..., Any], *args: Any) -> Seen:
    method: Any = "spawn" if case.starter == "spawn" else "fork"
    try:
        limits: Any = {"output": "quiet", "timeout": TIMEOUT, "limit": 60.0}
        values = launch(fn, case.world_size, args=args, method=method, **limits)
    except Exception as error:
        return replace(_of_error(case, error), seconds=since_struck(folder))
    seconds = max(record.seconds for record in values)
    return Seen(records=tuple(values), seconds=seconds, struck=(folder / STRUCK).exists())


def _struck(case: Case, folder: Path) -> Seen:
    """A launch in which one rank strikes itself, or is struck from outside while it starts."""
    gift = strikes.Gift(case, str(folder))
    if case.phase != strikes.STARTING:
        return launched(case, folder, strikes.suffer, case, gift, str(folder))
    if server() is None:
        warm_up()
    over = threading.Event()
    hitting = threading.Thread(target=_strike_from_outside, args=(case, folder, over))
    hitting.start()
    try:
        return launched(case, folder, strikes.suffer, case, gift, str(folder))
    finally:
        over.set()
        hitting.join()


def _strike_from_outside(case: Case, folder: Path, over: threading.Event) -> None:
    """Send a signal to a rank soon after its fork, before it has joined the others."""
    assert case.rank is not None
    wait, pid = case.random.random() * 0.03, server()
    while pid is not None and not over.is_set():
        ranks = children(pid)
        if len(ranks) > case.rank:
            time.sleep(wait)
            (folder / STRUCK).write_text(str(time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[case.rank], signal.Signals[case.kind])
            return
        time.sleep(0.001)


def _two_savers(folder: Path) -> Seen:
    """Two jobs save to one folder at the same time. If a job's save returns, its state must be there."""

    def run(mine: str, other: str, steps: int) -> str:
        args = (str(folder), mine, other, steps)
        try:
            told = launch(broken_saves.save_beside, 2, args=args, output="quiet", timeout=4 * TIMEOUT)
            return next(filter(None, told), "")
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, "ab", "ba", (tampering.OLD, tampering.NEW))
    return broken_saves.after_two_savers(folder / "both", first, second)
