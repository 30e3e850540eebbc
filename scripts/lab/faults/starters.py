"""Disturbs runs that ``torchrun`` or the command line starts, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from muon_tutorial.launching.signals import SENT

from .case import PATIENCE, STRUCK, TIMEOUT, Case, Seen
from .processes import MARK, children, left_behind, since_struck, wait_until

LIMIT = TIMEOUT + PATIENCE
STARTING, LATE = 90.0, 4.0
"""Seconds that a process may take to start on a busy machine, and seconds of watching beyond the limit."""
TORCHRUN = ("SIGKILL", "exception", "SIGSTOP", "sys.exit(3)", "SIGABRT", "the agent is killed", "stuck")
AGENT = "the agent is killed"
_NAMED_BY_A_RANK = re.compile(r"got no answer from rank (\d+)")
"""A rank's own message. torchrun's message blames the rank that ended first, never a stopped one."""

_ROOT_CAUSE = re.compile(r"Root Cause.*?\brank\s*:\s*(\d+)", re.DOTALL)
TRAIN = (
    *("-m", "muon_tutorial", "train", "--dp", "2", "--tp", "1", "--steps", "100000", "--layers", "1"),
    *("--width", "32", "--heads", "2", "--context", "16", "--batch", "4", "--timeout", str(TIMEOUT)),
)


@dataclass(slots=True)
class Started:
    """A process that was started for a case, and its output."""

    process: subprocess.Popen[bytes]
    said: Path
    mark: str

    def words(self) -> str:
        return self.said.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; returns whether it ended in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        return False

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


def start(number: int, folder: Path, words: Sequence[str]) -> Started:
    """Start Python with these arguments in a new folder; the process is marked with ``number``."""
    mark = f"case-{os.getpid()}-{number}"
    said, here = folder / "stderr", folder / "here"
    here.mkdir()
    checkout = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TERM": "dumb"}
    with open(said, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=here,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            preexec_fn=_heed_signals,
        )
    return Started(process, said, mark)


def _heed_signals() -> None:
    """Reset signals: a campaign in a shell may ignore SIGINT or SIGHUP, and children would inherit this."""
    for number in SENT:
        signal.signal(number, signal.SIG_DFL)


def under_torchrun(case: Case, folder: Path) -> Seen:
    """Run one case on two ranks that torchrun starts."""
    kills_agent = case.kind == AGENT
    # A rank stalls, so that the other ranks are waiting for it when the agent is killed.
    stalled = {"kind": "stuck", "phase": "between steps", "rank": 0} if kills_agent else {}
    told = json.dumps({**asdict(case), **stalled})
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.world_size))
    program = ("-m", "scripts.lab.faults.under_torchrun", told, str(folder))
    started = start(case.number, folder, (*run, *program))
    wait_until(lambda: (folder / STRUCK).exists() or started.process.poll() is not None, STARTING)
    if kills_agent:  # without their agent, the ranks must end by themselves
        started.end()
        orphans = left_behind(started.mark)
        return Seen(orphans=orphans, equal=not orphans)
    in_time = started.wait(LIMIT + LATE)
    seconds = since_struck(folder)
    started.end()
    orphans = left_behind(started.mark)  # they count as orphans only if torchrun ended by itself
    words = started.words()
    found = _NAMED_BY_A_RANK.search(words) or _ROOT_CAUSE.search(words)
    own = [
        line for line in words.splitlines() if "muon_tutorial.errors." in line or line.startswith("error: ")
    ]
    blamed = f"rank {found[1]} is named first" if found else "no rank is named"
    return Seen(
        message=" / ".join([*own[:1], blamed]),  # the first of the package's own errors, if there is one
        named=not in_time or started.process.returncode != 0,
        blamed=int(found[1]) if found else None,
        seconds=seconds,
        orphans=orphans if in_time else (),
    )


@dataclass(frozen=True, slots=True)
class Shell:
    """A disturbed run of ``train``: it is started in an unusual way (``words``), or struck later (``act``).

    ``codes``: the exit codes that are allowed. ``moment``: the longest delay of ``act``, in seconds.
    """

    act: Callable[[Started, Random], None] | None = None
    codes: tuple[int, ...] = (1,)
    moment: float = 6.0
    words: tuple[str, ...] = TRAIN


def _send(*numbers: int, to: Callable[[int, int], None] = os.kill) -> Callable[[Started, Random], None]:
    def act(started: Started, dice: Random) -> None:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                to(started.process.pid, number)
            time.sleep(0.05)

    return act


def _send_to_server(number: int, then: int | None = None) -> Callable[[Started, Random], None]:
    """Send a signal to the process that forks the ranks, once it exists."""

    def act(started: Started, dice: Random) -> None:
        wait_until(lambda: children(started.process.pid), 10)
        for pid in children(started.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if then is not None:
            time.sleep(0.3)
            os.kill(started.process.pid, then)

    return act


_RUN = "sys.argv = ['muon_tutorial', *{words!r}]; runpy.run_module('muon_tutorial', run_name='__main__')"


def _after(lines: str) -> tuple[str, ...]:
    """Arguments of a Python that runs these lines, and then a ``train`` of two steps."""
    run = _RUN.format(words=[*TRAIN[2:], "--steps", "2"])
    return ("-c", f"import os, resource, sys, runpy; {lines}; {run}")


_FILES = "resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"
_NOWHERE = "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"

COMMAND_LINE: Mapping[str, Shell] = {
    "SIGTERM while it starts": Shell(_send(signal.SIGTERM), (143, -signal.SIGTERM), moment=2.0),
    "SIGUSR1, then SIGTERM while it starts": Shell(
        _send(signal.SIGUSR1, signal.SIGTERM), (143, -signal.SIGTERM, -signal.SIGUSR1), moment=2.0
    ),
    "Ctrl-C": Shell(_send(signal.SIGINT), (130,)),
    "Ctrl-C in the first two seconds": Shell(_send(signal.SIGINT), (130,), moment=2.0),
    "Ctrl-C twice": Shell(_send(signal.SIGINT, signal.SIGINT), (130,)),
    "Ctrl-C to the group": Shell(_send(signal.SIGINT, to=os.killpg), (130,)),
    "SIGTERM to the group": Shell(_send(signal.SIGTERM, to=os.killpg), (143, -signal.SIGTERM)),
    "SIGUSR1, then SIGTERM": Shell(
        _send(signal.SIGUSR1, signal.SIGTERM), (143, -signal.SIGTERM, -signal.SIGUSR1)
    ),
    "SIGHUP": Shell(_send(signal.SIGHUP), (129, -signal.SIGHUP)),
    "SIGTERM": Shell(_send(signal.SIGTERM), (143, -signal.SIGTERM)),
    "SIGKILL of the launcher": Shell(_send(signal.SIGKILL), (-signal.SIGKILL,)),
    "SIGKILL of the fork server": Shell(_send_to_server(signal.SIGKILL), (1,)),
    "SIGSTOP of the fork server, then Ctrl-C": Shell(_send_to_server(signal.SIGSTOP, signal.SIGINT), (130,)),
    "16 descriptors": Shell(None, (0, 1, 2), words=_after(_FILES.format(16))),
    "24 descriptors": Shell(None, (0, 1, 2), words=_after(_FILES.format(24))),
    "a working directory that is gone": Shell(None, (1, 2), words=_after(_NOWHERE)),
    "a timeout that is NaN": Shell(None, (2,), words=(*TRAIN, "--timeout", "nan")),
    "standard output closed": Shell(None, (0, 1), words=_after("os.close(1)")),
}


def by_command_line(case: Case, folder: Path) -> Seen:
    """Run one disturbed ``train``, which must end in time, with a one-line error and the right exit code."""
    shell, dice = COMMAND_LINE[case.kind], case.random
    started = start(case.number, folder, shell.words)

    def has_begun() -> bool:
        """Whether Python has begun to import the package. Before that, no signal can be handled."""
        with contextlib.suppress(OSError):
            return "/torch/" in Path(f"/proc/{started.process.pid}/maps").read_text()
        return True  # the process has already ended

    if shell.act is not None:
        wait_until(has_begun, STARTING, every=0.005)
        started.wait(dice.uniform(0.0, shell.moment))
        shell.act(started, dice)
    acted = time.monotonic()
    in_time = started.wait(LIMIT + LATE if shell.act is not None else STARTING)
    seconds = time.monotonic() - acted
    code = started.process.poll()
    started.end()
    orphans = left_behind(started.mark)
    words = started.words()
    if not in_time:
        last = ["(nothing)", *(line for line in words.splitlines() if line.strip())][-1]
        return Seen(message=f"{last} (it had to be ended)", seconds=seconds)
    if code == 0:
        return Seen(equal=True, orphans=orphans)
    return Seen(
        message=words.strip() or f"exit code {code}",
        message_type=f"exit code {code}",
        named=code in shell.codes,
        line_due=True,
        seconds=seconds,
        limit=LIMIT if shell.act is not None else STARTING,
        orphans=orphans,
    )
