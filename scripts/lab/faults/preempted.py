"""Sends signals to ``train`` at random times, as schedulers do, and checks its checkpoint and its end.

python -m scripts.lab.faults.preempted --seed 0 --count 100
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal, get_args

from muon_tutorial.training.checkpoints import Saving

from .processes import left_behind, marked
from .starters import TRAIN, Started, start

Under = Literal["launch", "torchrun"]
SCRIPT = Path(__file__).resolve().parents[2] / "distributed_muon.py"
SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1")
STARTING, ENDING = 90.0, 5.0
"""Seconds until the first step must come, and seconds after a signal until the run must have ended."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run and its signal: the ``steps`` it took, the step it ``saved``, seconds from signal to end."""

    under: Under
    ranks: int
    sent: str
    whom: str
    moment: float
    code: int | None
    steps: int
    saved: int | None
    seconds: float
    tracebacks: int
    orphans: tuple[str, ...]
    words: str

    @property
    def is_good(self) -> bool:
        """Whether the run ended in time, with the signal's code, and with a whole checkpoint if it took a
        step.

        If a SIGUSR1 comes before a handler is set, it ends the process, which has nothing to lose yet.
        """
        number = signal.Signals["SIGTERM" if self.sent == "SIGUSR1" else self.sent]
        codes = {128 + number, -number} | (set() if self.steps else {-signal.Signals[self.sent]})
        ended = self.code in codes and self.seconds < ENDING
        return ended and bool(self.saved or not self.steps) and not (self.tracebacks or self.orphans)


def trial(dice: Random, under: Under, ranks: int, number: int, folder: Path) -> Trial:
    """Start a run, send it a signal at a random moment, and record how it ends."""
    every = dice.choice(([], ["--save-every", "5"]))
    starts = dice.random() < 0.25
    moment = dice.uniform(0.0, 8.0 if starts else 3.0)
    sent, whom = dice.choice(SIGNALS), dice.choice(("it", "its group", "every process"))
    later = dice.uniform(0.0, 1.0) if sent == "SIGUSR1" else 0.0
    begun = "" if starts else "metrics.jsonl"
    return preempt(under, ranks, begun, moment, sent, whom, folder, every, number, later)


def preempt(
    under: Under,
    ranks: int,
    begun: str,
    moment: float,
    sent: str,
    whom: str,
    folder: Path,
    options: Sequence[str] = (),
    number: int = 0,
    later: float = 0.0,
) -> Trial:
    """Start a run, and send a signal ``moment`` seconds after its folder holds the file ``begun``.

    If ``begun`` is empty, the seconds count from the start; if it is ".", from the creation of the folder. A
    SIGUSR1 does not end a run, so a SIGTERM follows ``later`` seconds after it.
    """
    job = [*TRAIN[3:], "--dp", str(ranks), "--timeout", "30", *options, "--out", "run"]  # cores may be busy
    starter = ["-m", "muon_tutorial", "torchrun", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    words = [*(TRAIN[:3] if under == "launch" else starter), *job]
    started, run = start(number, folder, words), folder / "here" / "run"
    try:
        while begun and not (run / begun).exists() and started.process.poll() is None:
            time.sleep(0.005)
        started.wait(moment)
        _send(started, sent, whom)
        if sent == "SIGUSR1":
            started.wait(later)
            _send(started, "SIGTERM", whom)
        asked = time.monotonic()
        in_time = started.wait(STARTING)
        seconds = time.monotonic() - asked
    except BaseException:
        started.end()
        raise
    orphans = left_behind(started.mark) if in_time else ("it did not end",)
    started.end()
    left_behind(started.mark)
    steps = (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0
    saved, text = Saving(run).whole_step(print), started.words()
    tracebacks = text.count("Traceback (most recent call last)")
    code = started.process.returncode
    return Trial(under, ranks, sent, whom, moment, code, steps, saved, seconds, tracebacks, orphans, text)


def _send(started: Started, name: str, whom: str) -> None:
    number = signal.Signals[name]
    with contextlib.suppress(ProcessLookupError):
        if whom == "its group":
            os.killpg(started.process.pid, number)
        for pid in marked(started.mark) if whom == "every process" else [started.process.pid]:
            if whom != "its group":
                os.kill(pid, number)


def main() -> int:
    """Run trials under both starters, on 2 and 4 ranks in turn; show each. Returns 1 if one ended badly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    asked = parser.parse_args()
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for number in range(asked.count):
        under, ranks = get_args(Under)[number % 2], (2, 4)[number // 2 % 2]
        with tempfile.TemporaryDirectory() as folder:
            seen.append(trial(Random(f"{asked.seed}/{number}"), under, ranks, number, Path(folder)))
        print(seen[-1] if not seen[-1].is_good else replace(seen[-1], words=""), flush=True)
    print(f"{sum(each.is_good for each in seen)} of {len(seen)} ended correctly")
    return int(not all(each.is_good for each in seen))


if __name__ == "__main__":
    raise SystemExit(main())
