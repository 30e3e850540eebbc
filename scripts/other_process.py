"""Runs a script in another process, behind a limited loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

IMPOSSIBLE = 77
"""The exit code of scripts/shaped.sh if the loopback cannot be limited."""
STDERR = 2
"""The file descriptor of stderr. sys.stderr may be an object without a descriptor."""


def run_shaped(rate: str, script: str, arguments: Sequence[str]) -> bytes | None:
    """Run a Python script with the loopback slowed to ``rate`` (in tc's notation); its output goes to stderr.

    The script gets a file as an additional last argument, and writes its result there. Returns the file's
    content, or None if this machine cannot limit the loopback. Raises SystemExit if the script failed.
    """
    with TemporaryDirectory() as folder:
        found, shaped = Path(folder) / "found", str(Path(__file__).with_name("shaped.sh"))
        program = [sys.executable, str(Path(script).resolve()), *arguments, str(found)]
        ended = subprocess.run(["bash", shaped, rate, *program], stdout=STDERR, check=False).returncode
        if ended not in (0, IMPOSSIBLE):
            raise SystemExit(f"{Path(script).name} failed with the loopback limited to {rate}")
        return found.read_bytes() if ended == 0 else None
