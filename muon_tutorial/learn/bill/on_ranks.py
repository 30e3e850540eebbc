"""Lesson 10 on real ranks: bytes that each strategy sends and keeps, and a gather of one shared matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ... import LiveWorld, build_mesh
from ..the_mirror.on_ranks import count_step, parameters_on, plan_of
from .costs import BUILDERS, StepBill, holders, rows_of


def count(rank: int, dp: int, tp: int, seed: int) -> dict[str, StepBill]:
    """Count a step of the package's Muon with each strategy, on this rank. All ranks must call."""
    world = LiveWorld(build_mesh({"dp": dp, "tp": tp}))
    bills = {}
    for name, build in BUILDERS.items():
        muon, ledger = count_step(world, parameters_on(world.at, seed), build)
        kept = sum(state["momentum_buffer"].nbytes for state in muon.state.values())
        bills[name] = StepBill(name, rows_of(ledger, rank), kept)
    return bills


Fetched = tuple[int, bool | None]
"""Bytes that a rank sent for one matrix, and whether it then held all of it (None if it had no work)."""


def fetch_shared(rank: int, dp: int, tp: int, seed: int, sends: Callable[..., Sequence[int]]) -> Fetched:
    """Gather the shared matrix with sizes from ``sends(matrix, length, place, dp)``. All ranks must call."""
    world, plan = LiveWorld(build_mesh({"dp": dp, "tp": tp})), plan_of(dp, tp)
    total = plan.buckets[0].length(plan.buckets[0].model_layout, plan.grid.at(0))
    whole = torch.randn(total, generator=torch.Generator().manual_seed(seed)).bfloat16()
    length, place = total // dp, world.at["dp"]
    metas = plan.dist_meta(plan.grid.at(0))
    meta = max(metas, key=lambda meta: len(holders(meta.global_range, length)))  # in the most slices
    start, stop = meta.global_range
    first, last = max(start, place * length), min(stop, (place + 1) * length)
    mine = whole[first:last]
    out = [list(sends(meta.global_range, length, other, dp)) for other in range(dp)]
    receives = [row[place] for row in out]
    packed = torch.cat([mine.new_empty(0), *(mine[:each] for each in out[place])])
    arrived = mine.new_empty(sum(receives))
    dist.all_to_all_single(arrived, packed, receives, out[place], group=world.mesh.get_group("dp"))
    parts = list(arrived.split(receives))
    parts[place] = mine
    works = place in holders(meta.global_range, length)
    found = torch.cat(parts) if works else mine
    return packed.nbytes, torch.equal(found, whole[start:stop]) if works else None


def say_counted(counted: Sequence[Mapping[str, StepBill]], rank: int = 0) -> str:
    lines = [f"{'strategy':16} {'phase':26} {'bytes sent':>12}"]
    for name, found in counted[rank].items():
        lines += [f"{name:16} {phase:26} {sent:12,}" for phase, sent in found.sent.items()]
    return "\n".join(lines)


def say_fetched(fetched: Sequence[Fetched]) -> str:
    lines = []
    for rank, (sent, whole) in enumerate(fetched):
        holds = "does not work on it" if whole is None else f"holds all of it: {whole}"
        lines.append(f"rank {rank}: sent {sent:,} bytes, {holds}")
    return "\n".join(lines)
