"""Runs a script again behind a limited loopback (scripts/shaped.sh), if the machine can do that."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

IMPOSSIBLE = 77
"""The exit code of scripts/shaped.sh if the loopback cannot be limited."""
STDERR = 2
"""The file descriptor of stderr: this process may have replaced sys.stderr by an object without one."""


def run_shaped(rate: str, script: str, arguments: Sequence[str]) -> bytes | None:
    """Run a Python script behind a loopback of ``rate``, in tc's notation; its output goes to stderr.

    Its last argument is a file that it writes, whose content is returned; None if this machine cannot limit
    the loopback.

    Raises:
        SystemExit: the script failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        found, shaped = Path(folder) / "found", str(Path(__file__).with_suffix(".sh"))
        program = [sys.executable, str(Path(script).resolve()), *arguments, str(found)]
        ended = subprocess.run(["bash", shaped, rate, *program], stdout=STDERR, check=False).returncode
        if ended not in (0, IMPOSSIBLE):
            raise SystemExit(f"{Path(script).name} failed behind a loopback of {rate}")
        return found.read_bytes() if ended == 0 else None
