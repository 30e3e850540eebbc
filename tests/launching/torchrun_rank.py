"""A script for tests under torchrun: ranks use a mesh's group; rank 1 is killed in the first attempt."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

from muon_tutorial.launching.join_torchrun import join_torchrun, joined_by_torchrun
from muon_tutorial.launching.phase_and_line import report_phase
from muon_tutorial.worlds.build_mesh import build_mesh
from tests.launching.launch_ranks import group_timeouts, listeners

seat = join_torchrun("gloo", 60.0)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
own = set(listeners(seat.rank)) <= {"127.0.0.1", "::1"}
watch = next((thread.name for thread in threading.enumerate() if thread.name == "parent watch"), "")
sys.stdout.write(f"{set(group_timeouts().values())} {own} {joined_by_torchrun()} {watch}\n")
group = build_mesh({"dp": seat.world_size}).get_group("dp")
report_phase("dp gather · bucket 0")
x = torch.ones(1)
dist.all_reduce(x, group=group)
sys.stdout.write(f"attempt {attempt} sum {x.item():g}\n")
sys.stdout.flush()
if attempt == 0 and seat.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x, group=group)
