"""Starts torchrun from a process that is not a rank, and waits for it; lets a rank die as if it was killed.

Knows torchrun's command line, and nothing about the script.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import LaunchError
from .environment import rank_environment

_PATIENCE = 15.0  # seconds for torchrun to end its ranks
_SHOWN = 2000  # characters of torchrun's output that an error quotes


def torchrun_words(script: str, ranks: int, restarts: int, arguments: Sequence[str]) -> list[str]:
    """The words of the command line that you would type, for ranks on this machine.

    >>> " ".join(torchrun_words("job.py", 2, 1, ["--fast"]))
    'torchrun --standalone --nproc-per-node 2 --max-restarts 1 job.py --fast'
    """
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return ["torchrun", *options, script, *arguments]


def start_torchrun(words: Sequence[str], folder: Path, limit: float) -> str:
    """Run such a command line in a folder, and wait at most ``limit`` seconds; returns what it printed.

    It uses this Python, and can import what this process can; its temporary files are in the folder, too.
    torchrun listens on all network addresses.

    Raises:
        LaunchError: it failed (the error quotes the end of its output), or did not end within the limit.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {**rank_environment(threads=1), "PYTHONPATH": path, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _end(process)
            raise LaunchError(f"torchrun did not end within {limit:g} s") from None
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        raise LaunchError(f"torchrun ended with exit code {process.returncode}:\n{printed[-_SHOWN:]}")
    return printed


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its ranks; kill it if it does not end (ranks that joined it end with it)."""
    process.terminate()
    try:
        process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()


def die_at_once() -> NoReturn:
    """End this process by SIGKILL, which no process can catch; on Windows, by ``os._exit``."""
    if sys.platform != "win32":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(137)
