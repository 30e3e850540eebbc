"""A script for torchrun in tests: joins, uses a group of a mesh, and breaks as its first argument says.

Rank 1 breaks, only in the first attempt; the other rank waits in an all_reduce.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from muon_tutorial.launching.phase import report_phase
from muon_tutorial.launching.torchrun import join_torchrun, joined_by_torchrun
from muon_tutorial.worlds.live import build_mesh
from tests.launching.launch_ranks import group_timeouts, listeners

fault, patience = sys.argv[1], float(sys.argv[2])  # seconds that a rank waits for the broken one
seat = join_torchrun("gloo", 60.0)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
own = set(listeners(seat.rank)) <= {"127.0.0.1", "::1"}
sys.stdout.write(f"{seat.device} {set(group_timeouts().values())} {own} {joined_by_torchrun()}\n")
group = build_mesh({"dp": seat.world_size}).get_group("dp")
report_phase("dp gather · bucket 0")
x = torch.ones(1)
dist.all_reduce(x, group=group)
sys.stdout.write(f"attempt {attempt} sum {x.item():g} pid {os.getpid()}\n")
sys.stdout.flush()
if attempt == 0 and seat.rank == 1:
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])
work = dist.all_reduce(x, group=group, async_op=True)
work.wait(timedelta(seconds=patience))
if attempt == 0:  # a stopped rank that goes on may answer: then both wait here for their agent's end
    time.sleep(patience)
