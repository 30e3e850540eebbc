"""If the process that called launch() is killed, nothing is left behind.

Each test starts a separate process, waits until its ranks report that they run, and breaks it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launching.launch_traces import WITHIN, heed_interrupts, still_running

ROOT = Path(__file__).resolve().parents[2]
HANG = """
from muon_tutorial import launch
from tests.launching.launch_ranks import hang
launch(hang, 3, args=({stopped},), timeout=60.0, method={method!r})
"""
PROMPT = """
import os, torch
import torch.distributed as dist
from muon_tutorial import launch
scale = 2.0
def double(rank):
    x = torch.ones(1)
    dist.all_reduce(x)
    return scale * x.item()

print(launch(double, 2))
"""


def python(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    """Start an interpreter whose temporary files go to `folder`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def said_by(*arguments: str, folder: Path, typed: str | None = None, code: int = 0) -> str:
    """Run an interpreter to its end, and return all its output."""
    parent = python(*arguments, folder=folder)
    said, _ = parent.communicate(typed, timeout=90)
    assert parent.returncode == code, said
    return said


def ranks_of(parent: subprocess.Popen[str], count: int) -> list[int]:
    """Return all descendants of `parent`, once `count` ranks have reported that they run."""
    assert parent.stdout is not None
    said: list[int] = []
    while len(said) < count:
        line = parent.stdout.readline()
        assert line, "the launch ended before its ranks spoke"
        if " pid " in line:
            said.append(int(line.split()[-1]))
    family = {child.pid for child in psutil.Process(parent.pid).children(recursive=True)}
    return sorted(family | set(said))


@pytest.fixture
def hanging(tmp_path, request) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yield a script whose launch hangs, and its descendants' ids. If ranks are forked, one stops itself by
    SIGSTOP."""
    method = getattr(request, "param", "fork")
    script = HANG.format(stopped=1 if method == "fork" else None, method=method)
    parent = python("-c", script, folder=tmp_path)
    yield parent, ranks_of(parent, 3)
    parent.kill()
    parent.communicate()


@pytest.mark.parametrize(("hanging", "kill"), [("fork", os.killpg), ("spawn", os.kill)], indirect=["hanging"])
def test_a_killed_parent_leaves_nothing(hanging, tmp_path, kill) -> None:
    """If ranks are forked, their whole group is killed; ``test_launch_notebook`` kills only the parent."""
    parent, family = hanging
    kill(parent.pid, signal.SIGKILL)
    assert parent.wait(WITHIN) == -signal.SIGKILL
    assert not still_running(family, WITHIN)
    assert not list(tmp_path.iterdir())


def test_a_server_in_the_midst_of_an_import_ends_with_its_parent(tmp_path) -> None:
    """An idle server imports modules, which takes seconds; here, the import never ends."""
    slow = tmp_path / "modules"
    slow.mkdir()
    begun = tmp_path / "begun"
    (slow / "sympy.py").write_text(f"open({str(begun)!r}, 'w').close()\nwhile True:\n    pass\n")
    script = (
        f"import sys, time\nfrom muon_tutorial.launching.fork_server import warm_server\n"
        f"sys.path.insert(0, {str(slow)!r})\nprint(warm_server()._child.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = python("-c", script, folder=tmp_path)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    while not begun.exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.communicate()
    assert not still_running([server], WITHIN)


SERVER = """
import os, signal
from concurrent.futures import ThreadPoolExecutor
from muon_tutorial import LaunchError, launch
from muon_tutorial.launching import fork_server
from tests.launching import launch_ranks as ranks
from tests.launching.launch_traces import WITHIN, still_running

def server():
    return fork_server.warm_server()._child.pid

def failure(_):
    pids = []

    def hear(rank, line):
        pids.append(int(line.split()[-1]))
        if len(pids) == 2:
            os.kill(server(), signal.SIGKILL)

    try:
        launch(ranks.hang, 2, args=(1,), timeout=60.0, output=hear)
    except Exception as error:
        return f"{type(error).__name__}: {error}; {len(still_running(pids, WITHIN))} ranks are left"

launch(ranks.total, 2)
"""


def test_a_killed_server_takes_its_ranks_along_and_a_stopped_one_serves_tells_and_ends(tmp_path) -> None:
    """If the server was killed, several threads get the same error."""
    script = SERVER + (
        "with ThreadPoolExecutor(3) as threads:\n    print(*threads.map(failure, range(3)), sep='\\n')\n"
        "launch(ranks.total, 2)\n"
        "os.kill(server(), signal.SIGSTOP)\n"
        "print(launch(ranks.total, 2))\n"
        "def stop(rank, line):\n"
        "    os.kill(server(), signal.SIGSTOP)\n"
        "try:\n"
        "    launch(ranks.fail_with, 3, args=('kill',), timeout=60.0, output=stop)\n"
        "except LaunchError as error:\n"
        "    print(str(error).splitlines()[0])\n"
        "os.kill(server(), signal.SIGSTOP)\n"
    )
    *killed, served, stopped = said_by("-c", script, folder=tmp_path).splitlines()
    told = "LaunchError: the process that forks ranks ended (exit code -9); launch again; 0 ranks are left"
    assert killed == [told] * 3
    assert served == "[1.0, 1.0]"
    assert stopped.startswith("rank 2 of 3 was killed by SIGKILL")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a stopped process of its parent's end")
def test_a_rank_of_which_only_the_killed_server_knew_ends_with_it(tmp_path) -> None:
    script = (
        "import os, signal\nfrom muon_tutorial.launching.end_with_parent import die_with_parent\n"
        "server, pid = os.getpid(), os.fork()\n"
        "if pid == 0:\n"
        "    die_with_parent(server)\n"
        "    print(' pid', os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    server = python("-c", script, folder=tmp_path)
    assert server.stdout is not None
    rank = int(server.stdout.readline().split()[-1])
    try:
        assert still_running([rank], 0.1) == {rank}
        server.kill()
        server.wait()
        assert not still_running([rank], WITHIN)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def test_functions_typed_at_a_prompt_run_on_ranks(tmp_path) -> None:
    assert "[4.0, 4.0]" in said_by("-q", "-i", folder=tmp_path, typed=PROMPT)
    assert not list(tmp_path.iterdir())


def test_a_script_needs_no_main_guard_and_fails_with_its_ranks(tmp_path) -> None:
    script = tmp_path / "script.py"
    fork = "\npid = os.fork()\nif not pid: raise SystemExit\nos.waitpid(pid, 0)\nprint(launch(double, 2))"
    bad = "\ndef bad(rank):\n    raise ValueError(f'rank {rank} is unhappy')\nlaunch(bad, 2)\n"
    script.write_text(PROMPT + fork + bad)
    said = said_by(str(script), folder=tmp_path, code=1)
    assert said.count("[4.0, 4.0]") == 2  # also after a forked child has ended, which must not end the server
    assert "raise ValueError(f'rank {rank} is unhappy')" in said
    assert list(tmp_path.iterdir()) == [script]
