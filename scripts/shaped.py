"""Runs a script again behind a limited loopback (scripts/shaped.sh), if the machine can do that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMPOSSIBLE = 77
"""The exit code of scripts/shaped.sh if the loopback cannot be limited."""
STDERR = 2
"""Its file descriptor: this process may have replaced sys.stderr by an object without one."""


def run_shaped(rate: str, script: str, arguments: Sequence[str]) -> bool:
    """Run a Python script behind a loopback of ``rate``, in tc's notation; its output goes to stderr.

    Returns whether this machine can limit the loopback.

    Raises:
        SystemExit: the script failed.
    """
    command = ["bash", str(HERE / "shaped.sh"), rate, sys.executable, str(Path(script).resolve()), *arguments]
    ended = subprocess.run(command, stdout=STDERR, check=False).returncode
    if ended not in (0, IMPOSSIBLE):
        raise SystemExit(f"{Path(script).name} failed behind a loopback of {rate}")
    return ended == 0
