"""Ranks that torchrun started: told by the environment, joined with an explicit timeout."""

from __future__ import annotations

import atexit
import gc
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import UsageError
from .environment import TORCHRUN_NEEDS, loopback_variables
from .timeouts import let_new_groups_time_out


@dataclass(frozen=True, slots=True)
class TorchrunEnvironment:
    """What torchrun told this process about itself; ``device`` is its own, such as ``"cuda:1"``."""

    rank: int
    local_rank: int
    world_size: int
    device: str


def joined_by_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return all(name in os.environ for name in TORCHRUN_NEEDS)


def join_torchrun(backend: str = "gloo", timeout: float = 30.0) -> TorchrunEnvironment:
    """Initialise the default group from torchrun's environment; must be called by all its ranks.

    `timeout` is in seconds; groups made later have it too. With ``"nccl"`` every local rank takes the GPU of
    its own number. Where all ranks are on one machine, they listen on loopback only.

    Raises:
        UsageError: torchrun did not start this process, or it has no GPU for this local rank.
    """
    if not joined_by_torchrun():
        raise UsageError("torchrun did not start this process; start it with torchrun, or use launch()")
    rank, local_rank, world_size = (int(os.environ[name]) for name in TORCHRUN_NEEDS[:3])
    device = _take_gpu(local_rank) if backend == "nccl" else "cpu"
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        for name, value in loopback_variables().items():
            os.environ.setdefault(name, value)
    let_new_groups_time_out(timeout)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    atexit.register(leave_torchrun)
    return TorchrunEnvironment(rank, local_rank, world_size, device)


def leave_torchrun() -> None:
    """Leave the group that torchrun's processes joined, if it still stands. Runs by itself as a process ends.

    Groups that reference cycles keep alive would be torn down as the interpreter ends, where Gloo aborts: 3
    of 12 runs of two ranks ended with SIGABRT before they were collected here.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _take_gpu(local_rank: int) -> str:
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"NCCL needs a GPU for each local rank: local rank {local_rank} wants cuda:{local_rank}, "
            f"there are {torch.cuda.device_count()}; start fewer ranks, or use --backend gloo"
        )
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"
