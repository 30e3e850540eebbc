"""Lesson 04: a run's first wrong place, by rank and matrix, its cause, and what a skipped offset spoils."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..exercises.on_real_ranks import say_ranks
from .on_ranks import LENGTH, PLACES, BufferPlace, Lacking, SharingRun, is_buffer, place_of, updates


def explain(run: SharingRun) -> str | None:
    """What is wrong with a run, by its first wrong interval; None if nothing is."""
    if odd := _not_a_buffer(run):
        return odd
    right = run.expected()
    for rank in range(run.ranks):
        for place in run.wrong_places(rank):
            first = place.start + int((run.after(rank) != right)[place.slice].int().argmax())
            whose = "every rank's" if run.agree() else f"rank {rank}'s"
            since = "" if first == place.start else f", from {first:,} on"
            return (
                f"{_say_case(run)} the first wrong place is that of {place.name}, {place.start:,} to "
                f"{place.stop:,}, in {whose} buffer{since}. "
                f"{_why(run, rank, place, first, right)}{_say_displaced(run)}"
            )
    return None


def _not_a_buffer(run: SharingRun) -> str | None:
    for rank, report in enumerate(run.reports):
        if not isinstance(report.returned, Tensor):
            return f"Return the buffer; rank {rank} returned {type(report.returned).__name__}."
        if not is_buffer(report.returned):
            shape = " × ".join(f"{size:,}" for size in report.returned.shape)
            return f"The buffer has {LENGTH:,} entries; rank {rank} returned {shape}."
    return None


def explain_gathered(run: SharingRun) -> str | None:
    """What is wrong with gathered updates: the first wrong place, and what lies there instead."""
    if odd := _not_a_buffer(run):
        return odd
    for rank in range(run.ranks):
        for place in run.wrong_places(rank):
            there = run.after(rank)[place.slice]
            other = next(
                (name for name, update in updates(run.seed).items() if _begins_alike(there, update)), ""
            )
            what = f"the update of {other} begins" if other else "is something else"
            what = "are zeros" if not bool(there.any()) else what
            return (
                f"On rank {rank}, the first wrong place is that of {place.name}, {place.start:,} to "
                f"{place.stop:,}: there {what}."
            )
    return None


def _begins_alike(there: Tensor, update: Tensor) -> bool:
    return bool(torch.equal(there[:64].to(update.dtype), update[:64]))


def _say_case(run: SharingRun) -> str:
    if not run.lacking:
        return "With all gradients there:"
    lackers: dict[str, list[int]] = {}
    for rank, name in run.lacking:
        lackers.setdefault(name, []).append(rank)
    said = []
    for name, ranks in lackers.items():
        who = "all ranks" if len(ranks) == run.ranks > 1 else say_ranks(ranks)
        said.append(f"{who} {'lack' if len(ranks) > 1 else 'lacks'} the gradient of {name}")
    return f"Where {' and '.join(said)}:"


def ranks_of(flags: int, ranks: int) -> list[int]:
    """The ranks whose bits are set.

    >>> ranks_of(0b101, 4)
    [0, 2]
    """
    return [rank for rank in range(ranks) if flags >> rank & 1]


def _why(run: SharingRun, rank: int, place: BufferPlace, first: int, right: Tensor) -> str:
    owner, writers = place.owner(run.ranks), ranks_of(int(run.writers()[first]), run.ranks)
    if not bool(right[place.slice].any()):
        return f"Nobody has that update, so zeros belong there; {say_ranks(writers or [rank])} wrote there."
    if len(writers) > 1:
        return f"There, entries of {say_ranks(writers)} are added up."
    if run.after(rank)[first] == 0:
        return _why_empty(run, rank, place, owner)
    if run.filled(owner)[first] == right[first]:
        return f"Rank {owner} handed over the right update, but the sum of all buffers is not what came back."
    if writers and writers != [owner]:
        return f"Entries of rank {writers[0]} are there; rank {owner} owns {place.name}."
    return f"What is there is not Newton–Schulz of the gradient of {place.name}."


def _why_empty(run: SharingRun, rank: int, place: BufferPlace, owner: int) -> str:
    if run.found(owner).get(place.name) != place.start:
        return f"It is zero there: rank {owner}, the owner, has not put its update in that place."
    if rank == owner:
        return f"It is zero there. Rank {rank} had handed over its update: is what comes back a sum?"
    return f"It is zero there. Rank {owner} has the update, but it never reached rank {rank}: what sums?"


def _say_displaced(run: SharingRun) -> str:
    """The first update that a rank has put in a wrong place."""
    for rank in range(run.ranks):
        for name, start in run.found(rank).items():
            if off := start - place_of(name).start:
                way = f"{abs(off):,} too {'early' if off < 0 else 'late'}"
                return f" Rank {rank} has put its update for {name} at {start:,}, which is {way}."
    return ""


def early_starts(ranks: int, lacking: Lacking) -> Mapping[str, int]:
    """Where each owner puts its matrix's update if a missing gradient does not move the offset."""
    starts: dict[str, int] = {}
    for rank in range(ranks):
        offset = 0
        for place in PLACES:
            if place.owner(ranks) == rank:
                if (rank, place.name) in lacking:
                    continue
                starts[place.name] = offset
            offset += place.size
    return starts


def early_wrong(ranks: int, lacking: Lacking) -> list[str]:
    """The matrices that come out wrong then: those put in a wrong place, and those that they overwrite."""
    starts = early_starts(ranks, lacking).items()
    moved = {name: start for name, start in starts if start != place_of(name).start}
    return [
        place.name
        for place in PLACES
        if place.name in moved or any(reaches_into(name, start, place) for name, start in moved.items())
    ]


def reaches_into(name: str, start: int, other: BufferPlace) -> bool:
    """Whether a matrix's update, put at ``start``, overlaps the place of another."""
    return start < other.stop and other.start < start + place_of(name).size
