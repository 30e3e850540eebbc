"""Fixtures and hooks for every test."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from typing import IO

import pytest


def wait_while_another_compiles() -> IO[str] | None:
    """Return a lock. If another process of this checkout collects tests, wait for it, and return None.

    The first process compiles the modules that all of them import; without the wait, each would compile them.
    """
    lock = open(__file__)  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return None
    return lock


_COMPILING = wait_while_another_compiles() if "PYTEST_XDIST_WORKER" in os.environ else None
# jsonschema imports this checker of addresses. Nothing here uses it, and its import takes a second.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # on some CPUs, bits depend on the number of threads

from muon_tutorial.launching import fork_server  # noqa: E402

DEBUG = "TORCH_DISTRIBUTED_DEBUG"
GIVEN = os.environ.get(DEBUG)
AS_USERS_DO = (
    "tests/checkpoint/",
    "tests/configs/",
    "tests/hosts/",
    "tests/lab/",
    "tests/launching/",
    "tests/learn/",
    "tests/notebooks/",
    "tests/optimizer/test_dcp_state.py",
    "tests/timing/",
    "tests/training/",
    "tests/test_cli.py",
    "tests/test_one_page.py",
    "tests/evidence/",
)
"""Tests that run without torch's checks, for one of these reasons: they run a lesson, a checkpoint, a count
of bytes or a training, whose requests other tests check; their ranks break as a user's ranks do; with the
checks, a DistributedDataParallel on a "gloo" group ends in a segmentation fault (torch 2.13); or they count
memory, and the checks would keep some memory."""

RANKS_IMPORT = (
    "pytest",
    "hypothesis.strategies",
    "psutil",
    "rich.console",
    "rich.table",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "muon_tutorial.checkpoint",
    "muon_tutorial.evidence.ledger",
    "muon_tutorial.learn.exercises.judge",
    "muon_tutorial.learn.widgets.shell",
    "muon_tutorial.timing.step_cost",
    "muon_tutorial.training",
)
"""Modules that the warm server imports once.

A rank imports the file that defines its function. Without the server, each rank of each launch would need a
quarter of a second for that file's imports.
"""

_SERVING = "try:\n    serve("
assert _SERVING in fork_server._BOOT
fork_server._BOOT = fork_server._BOOT.replace(
    _SERVING, f"import importlib\nfor name in {RANKS_IMPORT}:\n    importlib.import_module(name)\n{_SERVING}"
)

collect_ignore = ["launching/torchrun_rank.py"]  # a program, not a module

LONGEST = (
    "notebooks/test_runs.py",
    "hosts/test_recipes.py",
    "learn/test_every_widget.py",
    "test_cli.py",
    "configs/test_table.py",
    "training/test_resume.py",
)
"""Files that take minutes. They begin first, because one process runs each of them, and at the end the other
processes would wait for it."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """After collection, let the waiting processes of this checkout go on."""
    try:
        return (yield)
    finally:
        if _COMPILING is not None:
            _COMPILING.close()


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make torch name a rank whose request differs in shape, dtype or order; else it would sum wrong data.

    The checks take a third of the time. Some tests run without the checks, as users do.
    """
    os.environ[DEBUG] = GIVEN or ("OFF" if item.nodeid.startswith(AS_USERS_DO) else "DETAIL")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
