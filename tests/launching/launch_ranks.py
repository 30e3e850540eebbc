"""Functions for ranks in the tests of launch(); importable without pytest, which ranks need not load."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from muon_tutorial.engine.collective import Collective, Label, Start, Wait, Walk
from muon_tutorial.launching.group_timeouts import group_timeout
from muon_tutorial.launching.phase_and_line import report_phase
from muon_tutorial.worlds.build_mesh import build_mesh
from muon_tutorial.worlds.live import LiveWorld

FAULTY = 2  # the rank that breaks


def total(rank: int, scale: float = 1.0) -> float:
    """Return the scaled sum of all ranks, by one all_reduce."""
    x = torch.full((4,), float(rank))
    dist.all_reduce(x)
    return scale * x[0].item()


def surroundings(rank: int) -> dict:
    """Return the properties that launch() promises for a rank's process."""
    return {
        "folder": os.getcwd(),
        "variable": os.environ.get("TUTORIAL_TEST"),
        "threads": torch.get_num_threads(),
        "torchrun": "MASTER_ADDR" in os.environ,
        "group": os.getpgrp(),
        "path": sys.path[:],
    }


def fork(rank: int) -> bool:
    """Fork. The child returns at once; this rank waits, and returns True if the child ended."""
    child = os.fork()
    if child == 0:
        return False
    until = time.monotonic() + 20.0
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    return ended == (child, 0)


def chatter(rank: int, lines: int) -> None:
    """Print numbered lines alternately on both streams."""
    for number in range(lines):
        print(f"line {number}", file=(sys.stdout, sys.stderr)[number % 2])


def fail_with(rank: int, fault: str) -> float:
    """Do one all_reduce, break on one rank as `fault` says, and do a second all_reduce."""
    total(rank)
    report_phase(f"dp gather · bucket {rank}")
    if rank == FAULTY:
        print(f"fault at {time.monotonic()}")
        _FAULTS[fault]()
    return total(rank)


def _raise() -> None:
    raise ZeroDivisionError("a planted fault")


def _fail_in_a_download() -> None:
    raise RuntimeError("Connection reset by peer")


def _spin() -> None:
    while True:
        time.sleep(0.01)


_FAULTS = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": _spin,
    "hold the GIL": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "sys.exit": lambda: sys.exit("leaving"),
    "os._exit": lambda: os._exit(0),
    "download": _fail_in_a_download,
    "memory": lambda: torch.empty(1 << 60, dtype=torch.uint8),
}


def stop_the_last(rank: int) -> None:
    """Return at once; the last rank stops itself by SIGSTOP."""
    if rank == dist.get_world_size() - 1:
        _FAULTS["stop"]()


def return_early(rank: int) -> float:
    """Do one all_reduce, and then a second one on all ranks but one."""
    return total(rank) if rank == FAULTY else total(rank) + total(rank)


def exchange(rank: int, in_background: bool) -> None:
    """Send a number to every rank and receive one from each; one rank does neither, and spins."""
    world = LiveWorld(build_mesh({"dp": dist.get_world_size()}))
    if rank == FAULTY:
        _spin()
    world.run(_exchange(dist.get_world_size(), in_background))


def _exchange(ranks: int, in_background: bool) -> Walk:
    each, mine = (1,) * ranks, torch.ones(ranks)
    request = Collective(
        "all_to_all", ("dp",), mine.dtype, mine, ranks, Label("swap"), sends=each, receives=each
    )
    if in_background:
        yield Wait((yield Start(request)))
    else:
        yield request


def ask_differently(rank: int, how: str) -> None:
    """Let one rank's request differ from the others' in shape, dtype or order."""
    odd = rank == FAULTY
    x = torch.ones(6 if odd and how == "shape" else 4, dtype=torch.int32 if odd and how == "dtype" else None)
    if odd and how == "order":
        dist.broadcast(x, 0)
    dist.all_reduce(x)


def wait_on_two_groups(rank: int) -> None:
    """Deadlock: the ranks wait in different groups."""
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=0.5)) for _ in range(2)]
    dist.all_reduce(torch.ones(1), group=groups[rank])


def hang(rank: int, stopped: int | None = None) -> None:
    """Print this process's id, and wait forever; rank ``stopped`` stops itself by SIGSTOP."""
    print(f"pid {os.getpid()}", flush=True)
    if rank == 0:
        _spin()
    if rank == stopped:
        _FAULTS["stop"]()
    total(rank)


def listeners(rank: int, open_one: bool = False) -> list[str]:
    """Use a new group; return the addresses on which, by the kernel's tables, this process then listens."""
    import psutil

    dist.all_reduce(torch.ones(1), group=dist.new_group())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if open_one else None
    found = psutil.Process().net_connections("inet")
    del store
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]


def timeouts(rank: int) -> tuple[dict[str, float], set[float]]:
    """Return the timeouts of the default group, a subgroup, a mesh, and a mesh that sets its own."""
    dist.new_group()
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = group_timeouts()
    own = build_mesh({"dp": 2, "tp": 2}, timeout=7.0)
    return found, {group_timeout(group) for group in own.get_all_groups()}


def group_timeouts() -> dict[str, float]:
    """Return the timeout, in seconds, of every group this process is in, by the group's name."""
    return {group.group_name: group_timeout(group) for group in list(distributed_c10d._world.pg_map)}
