"""launch() from a real Jupyter kernel: functions of cells, an interrupt, and a kill."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launching.launch_traces import WITHIN, still_running

start_new_kernel = pytest.importorskip("jupyter_client.manager").start_new_kernel
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]
OPENING = """
import os, torch
import torch.distributed as dist
from muon_tutorial.launching.launch import launch
torch.set_num_threads(2)
torch.randn(256, 256) @ torch.randn(256, 256)  # forking this kernel would now be unsound
"""
HANG = """
def hang(rank):
    print("pid", os.getpid(), flush=True)
    while rank == 0:
        pass
    dist.all_reduce(torch.ones(1))

launch(hang, 2, timeout=60.0)
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A running kernel, and its cells' output."""

    manager: Any
    client: Any
    folder: Path

    @property
    def family(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def run(self, code: str, timeout: float = 60.0, until: str | None = None) -> str:
        """Run a cell and return all its output; interrupt it when it prints `until`."""
        said: list[str] = []
        interrupted: list[None] = []

        def hear(message: dict) -> None:
            content = message["content"]
            said.append(content.get("text", "") + "\n".join(content.get("traceback", [])))
            if until and until in said[-1] and not interrupted:
                interrupted.append(self.manager.interrupt_kernel())

        self.client.execute_interactive(code, output_hook=hear, timeout=timeout)
        return "".join(said)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "NO_COLOR": "1"}
    manager, client = start_new_kernel(kernel_name="python3", env=os.environ | environment)
    running = Kernel(manager, client, folder)
    running.run("%colors NoColor\n" + OPENING)
    yield running
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_bug_shows_the_cells_own_line(kernel) -> None:
    said = kernel.run(
        "def buggy(rank):\n"
        "    x = torch.ones(3)\n"
        "    return x @ torch.ones(4 if rank == 2 else 3)  # the bug\n"
        "launch(buggy, 4)"
    )
    assert "RankFailedError" in said
    assert "rank 2 of 4 raised RuntimeError" in said
    assert "line 3, in buggy\n    return x @ torch.ones(4 if rank == 2 else 3)" in said
    assert "Cell In[" in said
    assert "ipykernel" not in said


def test_globals_closures_and_classes_of_cells_come_along_and_lines_back(kernel) -> None:
    kernel.run("class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b")
    kernel.run("weights = torch.arange(3.0)")
    said = kernel.run(
        "def make():\n"
        "    bias = torch.ones(1)\n"
        "    def inner(rank):\n"
        "        print('hello')\n"
        "        return Pair(rank, (weights.sum() + bias).item())\n"
        "    return inner\n"
        "print([(isinstance(p, Pair), p.a, p.b) for p in launch(make(), 2)])"
    )
    assert "[(True, 0, 4.0), (True, 1, 4.0)]" in said
    assert "[rank 1] hello\n" in said


def test_an_interrupted_cell_ends_its_ranks_and_no_more(kernel) -> None:
    said = kernel.run(HANG, until="pid")
    assert "launch() was interrupted" in said
    assert "rank 0: running at Cell In[" in said, said
    assert len(kernel.family) == 1
    assert "[5.0, 5.0]" in kernel.run("print(launch(lambda rank: 5.0, 2))")


def test_an_interrupt_while_the_first_ranks_start_is_an_interrupt(kernel) -> None:
    """Jupyter sends SIGINT to the kernel's process group, and so to the server, which is still importing."""
    cold = "from muon_tutorial.launching.fork_server import warm_server\nwarm_server().close()\n"
    begin = f"{cold}server = warm_server()\nprint('starting', flush=True)\n"
    said = kernel.run(begin + HANG, until="starting")
    assert "KeyboardInterrupt" in said
    assert "launch again" not in said
    kept = kernel.run("print(warm_server() is server, launch(lambda rank: 5.0, 2))")
    assert "True [5.0, 5.0]" in kept


def test_a_restarted_kernel_leaves_nothing(kernel) -> None:
    kernel.client.execute(HANG)
    while "pid" not in kernel.client.get_iopub_msg(timeout=30)["content"].get("text", ""):
        pass
    family = kernel.family
    assert len(family) == 3
    psutil.Process(kernel.pid).kill()
    assert not still_running(family, WITHIN)
    assert not list(kernel.folder.iterdir())
