"""Calls a function or a script in another process, such as one with a limited loopback."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.files import ROOT

IMPOSSIBLE = 77
"""The exit code of scripts/shaped.sh if the loopback cannot be limited."""
STDERR = 2
"""The file descriptor of stderr. sys.stderr may be an object without a descriptor."""
_CALL = (
    "import pathlib, pickle, sys; file = pathlib.Path(sys.argv[1]); "
    "function, arguments = pickle.loads(file.read_bytes()); "
    "file.write_bytes(pickle.dumps(function(*arguments)))"
)


def call_elsewhere(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Call a module's function in another Python; returns what it returned.

    ``environment``: variables that are added to this process's environment.

    Raises:
        CalledProcessError: the other process failed, and has said why on stderr.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "call"
        file.write_bytes(pickle.dumps((function, arguments)))
        program = [sys.executable, "-c", _CALL, str(file)]
        subprocess.run(program, cwd=ROOT, env={**os.environ, **environment}, check=True)
        return pickle.loads(file.read_bytes())


def run_shaped(rate: str, script: str, arguments: Sequence[str]) -> bytes | None:
    """Run a Python script with the loopback slowed to ``rate`` (in tc's notation); its output goes to stderr.

    The script gets a file as an additional last argument, and writes its result there. Returns the file's
    content, or None if this machine cannot limit the loopback.

    Raises:
        SystemExit: the script failed.
    """
    with TemporaryDirectory() as folder:
        found, shaped = Path(folder) / "found", str(Path(__file__).with_name("shaped.sh"))
        program = [sys.executable, str(Path(script).resolve()), *arguments, str(found)]
        ended = subprocess.run(["bash", shaped, rate, *program], stdout=STDERR, check=False).returncode
        if ended not in (0, IMPOSSIBLE):
            raise SystemExit(f"{Path(script).name} failed behind a loopback of {rate}")
        return found.read_bytes() if ended == 0 else None
