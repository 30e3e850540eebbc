"""Measures how fast ranks start, compared with torch.multiprocessing.spawn in the same run.

python scripts/measure_launch.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from muon_tutorial import launch
from muon_tutorial.learn.inputs.measure import private_bytes
from scripts.files import parser_of

RANKS, TIMES = 4, 20


def first_collective(rank: int) -> tuple[float, float]:
    """Return the monotonic time (s) when the first collective has finished, and this rank's private MB."""
    dist.barrier()
    return time.monotonic(), private_bytes() / 2**20


def spawned(rank: int, world_size: int, folder: str) -> None:
    """Do the same in a process started by torch.multiprocessing.spawn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    done, memory = first_collective(rank)
    Path(folder, f"rank{rank}").write_text(f"{done} {memory}")
    dist.destroy_process_group()


def time_launch() -> tuple[float, float]:
    """Return the seconds of a launch until every rank's first collective, and the largest private MB."""
    begun = time.monotonic()
    found = launch(first_collective, RANKS)
    return max(done for done, _ in found) - begun, max(memory for _, memory in found)


def time_spawn() -> tuple[float, float]:
    """Return the same two figures for torch.multiprocessing.spawn."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        mp.spawn(spawned, (RANKS, folder), nprocs=RANKS)
        found = [Path(folder, f"rank{rank}").read_text().split() for rank in range(RANKS)]
    return max(float(done) for done, _ in found) - begun, max(float(memory) for _, memory in found)


def main() -> None:
    first, _ = time_launch()
    later, memory = zip(*(time_launch() for _ in range(TIMES)), strict=True)
    spawn, spawn_memory = zip(*(time_spawn() for _ in range(3)), strict=True)
    print(f"{RANKS} ranks to their first collective, and the most private memory of a rank:")
    print(f"  launch(), first time    {first:6.2f} s")
    print(f"  launch(), later         {statistics.median(later):6.2f} s   {max(memory):6.1f} MB")
    print(f"  the worst of {TIMES:<3}        {max(later):6.2f} s")
    print(f"  mp.spawn, each time     {statistics.median(spawn):6.2f} s   {max(spawn_memory):6.1f} MB")


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    main()
