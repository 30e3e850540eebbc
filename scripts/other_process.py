"""Calls a function in another process, such as one in a network namespace of its own."""

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

_CALL = (
    "import pathlib, pickle, sys; file = pathlib.Path(sys.argv[1]); "
    "function, arguments = pickle.loads(file.read_bytes()); "
    "file.write_bytes(pickle.dumps(function(*arguments)))"
)


def call_elsewhere(
    prefix: Sequence[str], function: Callable[..., Any], *arguments: Any, **environment: str
) -> Any:
    """Call a module's function in a Python that the command ``prefix`` starts; returns what it returned.

    ``environment``: variables in addition to this process's.

    Raises:
        CalledProcessError: the other process failed; its ``stderr`` says why.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "call"
        file.write_bytes(pickle.dumps((function, arguments)))
        program = [*prefix, sys.executable, "-c", _CALL, str(file)]
        variables = {**os.environ, **environment}
        subprocess.run(program, cwd=ROOT, env=variables, check=True, stderr=subprocess.PIPE, text=True)
        return pickle.loads(file.read_bytes())
