"""Runs torchrun as a child of this process (``start_torchrun``), or in this process (``run_agent``).

Knows torchrun's command line, and nothing about the script. ``run_agent``, which is ``python -m muon_tutorial
torchrun``, differs from plain torchrun in four ways. ``run_agent`` can restart ranks on several machines;
plain torchrun needs ``OWN_STORE`` in its environment for that. If a signal or an error ends the job,
``run_agent`` prints one line; torchrun would print a traceback and exit with 1. At Ctrl-C, ranks that run a
program in ``TRAIN`` get SIGTERM instead of SIGINT. And SIGUSR1 and SIGUSR2, which kill plain torchrun, are
passed on to the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import LaunchError
from .environment import rank_environment
from .errors_of_lost_ranks import in_one_line
from .interrupts import BAD_INPUT, FAILED, said_of
from .standard_streams import say

_PATIENCE = 15.0  # Seconds for torchrun to end its ranks.
_SHOWN = 2000  # Characters of torchrun's output that an error quotes.

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""If this is 1, restarted ranks meet in a new store, which holds no addresses of dead ranks."""

TRAIN = ("distributed_muon.py", "muon_tutorial")
"""Programs whose ranks treat SIGTERM like SIGINT. Other ranks may save only at a ``KeyboardInterrupt``."""


def torchrun_words(script: str, ranks: int, restarts: int, arguments: Sequence[str]) -> list[str]:
    """The words of a torchrun command line, for ranks on this machine.

    >>> " ".join(torchrun_words("job.py", 2, 1, ["--fast"]))
    'torchrun --standalone --nproc-per-node 2 --max-restarts 1 job.py --fast'
    """
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return ["torchrun", *options, script, *arguments]


def start_torchrun(words: Sequence[str], folder: Path, limit: float) -> str:
    """Run ``torchrun_words`` in a folder, and wait at most ``limit`` seconds; returns what torchrun printed.

    torchrun uses this Python and this import path, and keeps its temporary files in the folder, too. torchrun
    listens on all network addresses.

    Raises:
        LaunchError: torchrun failed (the error quotes the end of its output), or exceeded the limit.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {**rank_environment(threads=1), "PYTHONPATH": path, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit)
        except BaseException as error:
            process.terminate()  # torchrun then ends its ranks
            try:
                process.communicate(timeout=_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()  # ranks that called ``join_torchrun`` end when torchrun has ended
            if isinstance(error, subprocess.TimeoutExpired):
                raise LaunchError(f"torchrun did not end within {limit:g} s") from None
            raise
    if process.returncode:
        raise LaunchError(f"torchrun ended with exit code {process.returncode}:\n{printed[-_SHOWN:]}")
    return printed


def die_at_once() -> NoReturn:
    """End this process by SIGKILL, which no process can catch."""
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(137)  # never reached


def run_agent(words: Sequence[str]) -> int:
    """Run torchrun with these arguments; return its exit code, or 128 + N if signal N ended the job."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

    def interrupt(number: int, frame: object) -> None:
        raise SignalException(signal.Signals(number).name, signal.SIGTERM)  # SIGTERM for its ranks

    options = run.parse_args(list(words))
    if options.nnodes not in ("1", "1:1"):
        os.environ.setdefault(OWN_STORE, "1")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: _pass_on(number))
    handled, script = getattr(options, "signals_to_handle", ""), Path(options.training_script).name
    if "SIGINT" in handled and script in TRAIN:  # at SIGINT, a starting Python prints a traceback
        options.signals_to_handle = handled.replace("SIGINT", "SIGTERM")
        signal.signal(signal.SIGINT, interrupt)
    try:
        run.run(options)
        return 0
    except SignalException as ended:
        sent = signal.SIGINT if str(ended) == "SIGINT" else ended.sigval
        return say(f"{said_of(sent.name)}; its ranks on this machine have ended", 128 + sent)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = f"error: rank {rank} {how}; it was the first to fail"
        return say(said, 128 - code if code < 0 else code or FAILED)
    except RendezvousClosedError:
        return say("error: another agent has ended the job, so this one cannot start its ranks", FAILED)
    except RendezvousConnectionError:
        return say("error: the agent at --rdzv-endpoint does not answer", FAILED)
    except Exception as error:  # torch may raise any exception, such as for a wrong option
        said = f"error: torchrun's agent ended: {type(error).__name__}: {in_one_line(str(error))}"
        return say(said, BAD_INPUT if isinstance(error, ValueError) else FAILED)


def _pass_on(number: int) -> None:
    """Send a signal to the ranks, which are the children that lead a Unix process group of their own."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    os.kill(pid, number)
