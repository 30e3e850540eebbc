"""Sends Ctrl-C at random times to ``train``, to a script that launches ranks, and to a notebook that does.

python -m scripts.lab.faults.interrupted --seed 0 --count 50
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from jupyter_client.manager import start_new_kernel

from .processes import left_behind
from .starters import TRAIN, start

EARLIEST, LATEST = 0.1, 10.0
"""Seconds after the start at which Ctrl-C comes."""
PATIENCE = 90.0
"""Seconds for a start or an end on a busy machine."""
_STEPS = """
import sys, time
import torch, torch.distributed as dist
from muon_tutorial import launch
def steps(rank, count):
    for _ in range(count):
        x = torch.ones(4)
        dist.all_reduce(x)
        time.sleep(0.01)
    return float(x[0])
"""
_LOOP = "while True:\n    launch(steps, 2, args=(50,))\n"
_AGAIN = "assert launch(steps, 2, args=(1,)) == [2.0, 2.0]"
_SCRIPT = f"""{_STEPS}
try:
    while True:
        launch(steps, 2, args=(50,))
except KeyboardInterrupt:
    {_AGAIN}
    sys.exit(130)
"""


def in_train(dice: Random, number: int, folder: Path) -> str:
    """Interrupt ``train``, then train once more; returns what went wrong, or nothing."""
    wrong = _interrupted(dice, number, folder, [*TRAIN, "--out", "run"])
    if wrong:
        return wrong
    after = folder / "after"
    after.mkdir()
    started = start(number, after, [*TRAIN, "--steps", "1", "--out", "run"])
    started.wait(PATIENCE)
    return "" if started.process.returncode == 0 else f"the next run: {started.words()[-300:]}"


def in_a_script(dice: Random, number: int, folder: Path) -> str:
    """Interrupt a script that launches ranks again and again; after Ctrl-C it launches them once more."""
    return _interrupted(dice, number, folder, ["-c", _SCRIPT])


def in_a_notebook(dice: Random, number: int, folder: Path) -> str:
    """Interrupt a cell that launches ranks again and again; the next cell launches them once more."""
    kernel, client = start_new_kernel(cwd=str(folder), env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        client.execute_interactive(_STEPS, timeout=PATIENCE, output_hook=lambda message: None)
        asked = client.execute(_LOOP)
        time.sleep(dice.uniform(EARLIEST, LATEST))
        kernel.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=PATIENCE))["parent_header"].get("msg_id") != asked:
            pass
        if reply["content"].get("ename") != "KeyboardInterrupt":
            return f"the cell ended with {reply['content']}"
        after = client.execute_interactive(_AGAIN, timeout=PATIENCE, output_hook=lambda message: None)
        return "" if after["content"]["status"] == "ok" else f"the next launch: {after['content']}"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel()


def _interrupted(dice: Random, number: int, folder: Path, words: list[str]) -> str:
    started = start(number, folder, words)
    started.wait(dice.uniform(EARLIEST, LATEST))
    started.process.send_signal(signal.SIGINT)
    ended, code = started.wait(PATIENCE), started.process.returncode
    left = left_behind(started.mark)
    started.end()
    if ended and code in (130, -signal.SIGINT) and not left:
        return ""
    return f"exit code {code}, left behind: {left}: {started.words()[-300:]}"


WHERE: tuple[Callable[[Random, int, Path], str], ...] = (in_train, in_a_script, in_a_notebook)


def main() -> int:
    """Interrupt in the three places in turn, and show each trial; 1 if one ended badly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    asked, good = parser.parse_args(), 0
    for number in range(asked.count):
        place = WHERE[number % len(WHERE)]
        with tempfile.TemporaryDirectory() as folder:
            wrong = place(Random(f"{asked.seed}/{number}"), number, Path(folder))
        print(f"{number} {place.__name__}: {wrong or 'as it should'}", flush=True)
        good += not wrong
    print(f"{good} of {asked.count} interrupted, and what came next worked")
    return int(good < asked.count)


if __name__ == "__main__":
    raise SystemExit(main())
