"""Lesson 11: one parameter through assign, gather, Newton–Schulz and redistribute, under four layouts.

``journey_of`` says for each moment what every rank has, and whose entries those are; what a helper's config
does on real ranks is the same, and the tests hold it to that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...plan.grid import Grid
from ...plan.layout import Box, Shard
from ...plan.matrix import Cut, held_box

MOMENTS = ("momentum", "assign", "gather", "Newton–Schulz", "redistribute", "done")
LAYOUTS = {
    "FSDP2": "rows cut over all ranks",
    "HSDP": "rows cut within a replica, replicas alike",
    "TP": "columns cut over all ranks",
    "EP": "every rank has an expert of its own",
}
OWNER = 1


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries in a box of a matrix, and the rank that brought them, or computed them."""

    box: Box
    by: int


@dataclass(frozen=True, slots=True)
class Sending:
    """What one rank hands to another: elements."""

    sender: int
    receiver: int
    elements: int


@dataclass(frozen=True, slots=True)
class JourneyMoment:
    """What every rank has at one moment, and what has just been sent. ``said`` is each rank's own line."""

    name: str
    held: tuple[tuple[Entries, ...], ...]
    sent: tuple[Sending, ...]
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Journey:
    """A parameter's way under one layout. ``owners`` has the owner of each rank's matrix, by rank."""

    layout: str
    grid: Grid
    side: int
    owners: tuple[int, ...]
    moments: tuple[JourneyMoment, ...]

    def replica_of(self, rank: int) -> int:
        """The replica that a rank is in; 0 where there are none."""
        return self.grid.at(rank)["replicate"]

    @property
    def crossing(self) -> int:
        """How many sendings go from one replica to another."""
        every = (each for moment in self.moments for each in moment.sent)
        return sum(self.replica_of(each.sender) != self.replica_of(each.receiver) for each in every)


def grid_of(layout: str, dp: int, tp: int) -> Grid:
    """The ranks in the axes of a layout: for HSDP ``tp`` replicas of ``dp`` ranks."""
    if layout == "HSDP":
        return Grid.of(replicate=tp, shard=dp)
    return Grid.of(**{{"FSDP2": "shard", "TP": "tp", "EP": "ep"}[layout]: dp * tp})


def cuts_of(layout: str) -> tuple[Cut, ...]:
    """What cuts the matrix under a layout."""
    return {
        "FSDP2": (("shard", Shard(0)),),
        "HSDP": (("shard", Shard(0)),),
        "TP": (("tp", Shard(1)),),
        "EP": (),
    }[layout]


def journey_of(layout: str, dp: int, tp: int) -> Journey:
    """The way of one square matrix; of one expert a rank, under EP."""
    grid = grid_of(layout, dp, tp)
    ranks, side = grid.ranks, 2 * len(grid.ranks)
    whole = Box((0, 0), (side, side))
    boxes = [held_box((side, side), cuts_of(layout), grid.at(rank)) for rank in ranks]
    owner = min(OWNER, ranks[-1])
    owners = tuple(ranks) if layout == "EP" else (owner,) * len(ranks)
    near = [rank for rank in ranks if grid.at(rank)["replicate"] == grid.at(owner)["replicate"]]
    kept = tuple((Entries(box, rank),) for rank, box in enumerate(boxes))
    joined = tuple(Entries(boxes[rank], rank) for rank in near)
    full = {rank: kept[rank] if layout == "EP" else joined for rank in set(owners)}
    gathered = tuple(full.get(rank, ()) for rank in ranks)
    computed = tuple((Entries(whole, rank),) if rank in full else () for rank in ranks)
    parts = tuple((Entries(boxes[rank], owners[rank]),) for rank in ranks)
    out = [Sending(rank, owner, boxes[rank].numel) for rank in near if rank != owner and layout != "EP"]
    back = [Sending(owner, rank, boxes[rank].numel) for rank in ranks if rank != owner and layout != "EP"]
    shown = "×".join(map(str, whole.shape))

    def told(of_owner: str, of_others: str) -> tuple[str, ...]:
        return tuple(of_owner if rank in full else of_others for rank in ranks)

    has = tuple(f"has {box.shape[0]}×{box.shape[1]}" for box in boxes)
    moments = (
        JourneyMoment("momentum", kept, (), has),
        JourneyMoment("assign", kept, (), told("is the owner", "is not")),
        JourneyMoment("gather", gathered, tuple(out), told(f"gets {shown}", "gets None")),
        JourneyMoment("Newton–Schulz", computed, (), told("computes", "waits")),
        JourneyMoment("redistribute", parts, tuple(back), tuple(each.replace("has", "gets") for each in has)),
    )
    end = replace(moments[-1], name="done", sent=(), said=("adds its part",) * len(ranks))
    return Journey(layout, grid, side, owners, (*moments, end))


def say_moment(journey: Journey, moment: int) -> str:
    """A moment in words."""
    now = journey.moments[moment]
    count = len(now.sent)
    sent = "nothing travels" if not count else "1 piece travels" if count == 1 else f"{count} pieces travel"
    crossing = sum(journey.replica_of(each.sender) != journey.replica_of(each.receiver) for each in now.sent)
    sent += f", {crossing} of them to another replica" if crossing else ""
    ranks = "; ".join(f"rank {rank} {said}" for rank, said in enumerate(now.said))
    return f"{journey.layout}, {LAYOUTS[journey.layout]}. Moment {moment}, {now.name}: {sent}; {ranks}."
