"""Exercises of lesson 04: owners, a skipped offset, two ways to share updates, load balance, the quiz."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ... import Grid, Matrix, Plan, owner, round_robin
from ...newton_schulz import DEFAULT_STEPS
from ...plan.assign import longest_first, newton_schulz_cost
from ...plan.strategies import plan_imbalance
from ..exercises.judge import Diagnosis, Exercise, Par, first, guesses, names_or_none, numbers, written
from ..exercises.on_real_ranks import judge_on_ranks, ring_sent, say_ranks
from . import on_ranks
from .on_ranks import LENGTH, PLACES, SHAPES, WIRE, BufferPlace, Lacking, SharingRun, owner_lacks, place_of

TOY = (8, 7, 6, 5, 4)
"""Costs of five matrices, in any unit; on two owners, costliest first does not give the least makespan."""
TOY_BEST = (0, 0, 1, 1, 1)
"""Owners with the least makespan for ``TOY``."""
TOY_LONGEST_FIRST = longest_first(TOY, (0, 0))
"""Owners of ``TOY`` as the package chooses them: costliest first, each to the less busy of two ranks."""


def loads_of(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    loads = [0.0] * ranks
    for cost, rank in zip(costs, owners, strict=True):
        loads[rank] += cost
    return loads


def toy_makespans() -> dict[str, int]:
    """The makespans of ``TOY`` on two owners: with the costliest first, and the least possible."""
    dealt = {"longest_first": TOY_LONGEST_FIRST, "best": TOY_BEST}
    return {name: int(max(loads_of(TOY, owners, 2))) for name, owners in dealt.items()}


LARGE = on_ranks.gpt_shapes(12, 768)
MOST = 16
WORST = 6
Way = Literal["by index", "longest first"]
WAYS: tuple[Way, Way] = ("by index", "longest first")
COSTS = [DEFAULT_STEPS * newton_schulz_cost(shape) for shape in LARGE.values()]
"""Floating-point operations of Newton–Schulz, all its iterations, for each matrix of the large model."""


def plan_of(ranks: int, way: Way) -> Plan:
    """The package's plan for the large model: round robin, or owners chosen with the costliest first."""
    matrices = [Matrix(number, name, shape) for number, (name, shape) in enumerate(LARGE.items())]
    if way == "by index":
        return round_robin(matrices, Grid.of(dp=ranks), order="index")
    one_bucket = sum(matrix.numel for matrix in matrices) * matrices[0].grad_dtype.itemsize
    return owner(matrices, Grid.of(dp=ranks), round_bytes=one_bucket)


def fair_shares(ranks: int, way: Way = "by index") -> float:
    """The makespan for the large model, relative to a fair share: 1 is perfect."""
    return plan_imbalance(plan_of(ranks, way))


def shares_by_index(costs: Sequence[float], ranks: int) -> float:
    """The exercise's reference: the busiest rank's work over a fair share, if rank i % ranks has matrix i.

    >>> shares_by_index([3, 1, 1], 2)
    1.6
    """
    return in_shares([sum(costs[rank::ranks]) for rank in range(ranks)])


def in_shares(loads: Sequence[float]) -> float:
    """The busiest rank's work, divided by a fair share."""
    return max(loads) * len(loads) / sum(loads)


def check_fair_shares() -> Exercise:
    cases = [([4, 1, 1, 4, 1, 2], 2), ([4, 1, 1, 4, 1, 2], 3), ([5, 5], 4), ([1, 2, 3, 4, 5, 6], 4)]

    def in_blocks(costs: Sequence[float], ranks: int) -> float:
        many = -(-len(costs) // ranks)
        return in_shares([sum(costs[rank * many :][:many]) for rank in range(ranks)])

    def longest(costs: Sequence[int], ranks: int) -> float:
        return in_shares(loads_of(costs, longest_first(costs, [0] * ranks), ranks))

    def work(costs: Sequence[float], ranks: int) -> float:
        return max(sum(costs[rank::ranks]) for rank in range(ranks))

    def over_least(costs: Sequence[float], ranks: int) -> float:
        return work(costs, ranks) / (min(sum(costs[rank::ranks]) for rank in range(ranks)) or 1e-9)

    one = "That is the costliest matrix. Add up the costs of each rank's matrices: which sum is largest?"
    slips = (
        ("That is the work itself. Divide it by a fair share.", work),
        ("Divide by a fair share, not by the least work of a rank.", over_least),
        ("With round robin, rank r gets the matrices r, r + ranks, r + 2 · ranks, …", in_blocks),
        (one, lambda costs, ranks: max(costs) * ranks / sum(costs)),
        ("That is longest first. Here matrices are dealt out round robin.", longest),
        ("That is the other way round.", lambda costs, ranks: 1 / shares_by_index(costs, ranks)),
    )
    hints = ("costs[rank::ranks] are the costs of one rank's matrices.",)
    praise = "1 would be perfect; as many fair shares as ranks would mean that one rank does everything."
    return written(shares_by_index, cases, *slips, say="costs {} and {} ranks", hints=hints, praise=praise)


def explain(run: SharingRun) -> str | None:
    """The first wrong place in a run, and why it is wrong; None if all are right."""
    if odd := _not_a_buffer(run):
        return odd
    right = run.expected()
    for rank in range(run.ranks):
        for place in run.wrong_places(rank):
            start = place.start + int((run.after(rank) != right)[place.slice].int().argmax())
            whose = "every rank's" if run.agree() else f"rank {rank}'s"
            since = "" if start == place.start else f", from {start:,} on"
            where = f"that of {place.name}, {place.start:,} to {place.stop:,}, in {whose} buffer{since}"
            why = f"{_why(run, rank, place, start, right)}{_say_displaced(run)}"
            return f"{_say_case(run)} the first wrong place is {where}. {why}"
    return None


def _not_a_buffer(run: SharingRun) -> str | None:
    for rank, report in enumerate(run.reports):
        if not isinstance(report.returned, Tensor):
            return f"Return the buffer; rank {rank} returned {type(report.returned).__name__}."
        if not on_ranks.is_buffer(report.returned):
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
            start = there[:64].to(WIRE)
            right = on_ranks.updates(run.seed).items()
            other = next((name for name, update in right if torch.equal(start, update[:64])), "")
            what = f"the update of {other} begins" if other else "is something else"
            what = what if bool(there.any()) else "are zeros"
            where = f"that of {place.name}, {place.start:,} to {place.stop:,}"
            return f"On rank {rank}, the first wrong place is {where}: there {what}."
    return None


def _say_case(run: SharingRun) -> str:
    if not run.lacking:
        return "With all gradients there:"
    said = []
    for name in dict.fromkeys(name for _, name in run.lacking):
        ranks = [rank for rank, lacked in run.lacking if lacked == name]
        who = "all ranks" if len(ranks) == run.ranks > 1 else say_ranks(ranks)
        said.append(f"{who} {'lack' if len(ranks) > 1 else 'lacks'} the gradient of {name}")
    return f"Where {' and '.join(said)}:"


def ranks_of(flags: int, ranks: int) -> list[int]:
    """The ranks whose bits are set."""
    return [rank for rank in range(ranks) if flags >> rank & 1]


def _why(run: SharingRun, rank: int, place: BufferPlace, at: int, right: Tensor) -> str:
    owner, writers = place.owner(run.ranks), ranks_of(int(run.writers()[at]), run.ranks)
    if not bool(right[place.slice].any()):
        return f"No rank has that update, so zeros belong there; {say_ranks(writers or [rank])} wrote there."
    if len(writers) > 1:
        return f"There, entries of {say_ranks(writers)} are added up."
    if run.after(rank)[at] == 0:
        if run.found(owner).get(place.name) != place.start:
            return f"It is zero there: rank {owner}, the owner, has not put its update in that place."
        said = f"has the update, but rank {rank} never got it. Which call adds up the buffers?"
        said = "put its update there: does the collective add up the buffers?" if rank == owner else said
        return f"It is zero there. Rank {owner} {said}"
    if run.filled(owner)[at] == right[at]:
        return f"Rank {owner} handed over the right update, but the sum of all buffers is not what came back."
    if writers and writers != [owner]:
        return f"Entries of rank {writers[0]} are there; rank {owner} owns {place.name}."
    return f"The entries there are not Newton–Schulz of the gradient of {place.name}."


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
    """The matrices that the early code gets wrong: the misplaced, and those whose places they reach into."""
    starts = early_starts(ranks, lacking).items()
    moved = {name: start for name, start in starts if start != place_of(name).start}
    hit = {p.name for p in PLACES for name, start in moved.items() if reaches_into(name, start, p)}
    return [place.name for place in PLACES if place.name in moved or place.name in hit]


def reaches_into(name: str, start: int, other: BufferPlace) -> bool:
    """Whether a matrix's update, put at ``start``, overlaps the place of another."""
    return start < other.stop and other.start < start + place_of(name).size


LACKING = "k1"


def guess(ranks: int) -> Exercise:
    """The prediction: with one more rank, the last matrix's owner, and the fraction of zeros in buffers."""
    more = ranks + 1
    last = len(PLACES) - 1
    now = "That is so only with the current number of ranks."
    from_0 = f"Numbers begin at 0, so the last of {last + 1} has number {last}."
    wrong_owners = (last % ranks, now), ((last + 1) % more, from_0)
    wrong_parts = (1 / more, "That is the part that is filled."), (1 - 1 / ranks, now)
    return guesses(
        ("owner_of_last", last % more, f"Matrix i belongs to rank i modulo {more}.", *wrong_owners),
        ("zeros", ranks / more, "Look at one place: on how many ranks is it zero?", *wrong_parts),
        hints=(
            "The last matrix has number 11. Deal out 0, 1, 2 … in turn.",
            "Every place is filled on one rank, and zero on all others.",
        ),
        praise="Each place is filled once. On all other ranks it is zero.",
        within=0.005,
    )


def predict(ranks: int) -> Exercise:
    """The prediction: which matrices come out wrong if a missing gradient does not move the offset?"""
    lacking = owner_lacks(LACKING, ranks)
    right = early_wrong(ranks, lacking)

    def judge(answer: object) -> str | None:
        said = names_or_none(answer, SHAPES)
        if said is None:
            return 'Give a list of names, such as ["q1", "v2"].'
        if extra := [name for name in said if name not in right]:
            why = "Its owner puts the update in its place, and no other rank writes there."
            if extra[0] == LACKING:
                why = "No rank has an update for it, so its place stays zero, and its weight does not change."
            return f"{extra[0]} comes out as it should. {why}"
        if missing := [name for name in right if name not in said]:
            return f"{missing[0]} comes out wrong, too. {_why_wrong(missing[0], ranks, lacking)}"
        return None

    hints = (
        "After k1, at which offset does k1's owner write? It is too early by the number of k1's elements.",
        "Two kinds are wrong: misplaced updates, and updates that these overlap.",
    )
    praise = "Misplaced updates are wrong, and so are the updates whose places they reach into."
    return Exercise(judge, hints, praise)


def _why_wrong(name: str, ranks: int, lacking: Lacking) -> str:
    starts, place = early_starts(ranks, lacking), place_of(name)
    mine = starts.get(name, place.start)
    if mine != place.start:
        return f"Rank {place.owner(ranks)} puts its update at {mine:,}; its place begins at {place.start:,}."
    upon = (other for other in starts if other != name and reaches_into(other, starts[other], place))
    other = place_of(next(upon))
    said = f"puts its update for {other.name} at {starts[other.name]:,}, and reaches into this place."
    return f"Rank {other.owner(ranks)} {said}"


def check_share(ranks: int, backend: str = "gloo", seed: int = 0) -> Exercise:
    """The exercise: real ranks put each update in its place, even if a rank lacks a gradient."""
    nobody_has, two = tuple((rank, "up1") for rank in range(ranks)), owner_lacks("q1", ranks)
    cases = [(), owner_lacks(LACKING, ranks), nobody_has, two + owner_lacks("o2", ranks)]
    play = partial(on_ranks.run_cases, ranks=ranks, cases=cases, backend=backend, seed=seed)
    judge = judge_on_ranks(play, lambda runs: first(map(explain, runs)), on_ranks.say_trouble)
    hints = (
        "The offset must be the same on all ranks. What may it depend on?",
        "`continue` skips the rest of the loop, and the last line of the loop moves the offset.",
        "Fill a place only if it is yours and there is a gradient. Move the offset in any case.",
    )
    praise = "Whatever is missing, every other update is in its place, on every rank."
    return Exercise(judge, hints, f"{praise} You have repaired a bug that raises no error.")


def check_gather(ranks: int, backend: str = "gloo", seed: int = 0) -> Exercise:
    """The exercise: share all updates with fewer bytes than the zero-filled all_reduce sends."""
    summed, par = ring_sent("all_reduce", LENGTH * 2, ranks), on_ranks.predict_ring(ranks)
    sent: list[int] = []

    def judge(runs: list[SharingRun]) -> str | Diagnosis | None:
        sent.append(runs[0].sent)
        if wrong := explain_gathered(runs[0]):
            return wrong
        if sent[-1] >= summed > par:
            hint = "Leave the zeros at home: a rank brings its own updates, one after the other, and no more."
            if sent[-1] == 2 * par and not runs[0].reports[0].handed:  # no all_reduce, but twice the bytes
                hint = "Your buffer is float32, as torch makes it. Updates are bfloat16: half as many bytes."
            said = f"a rank sends {sent[-1]:,} bytes, and the all_reduce of the whole buffer {summed:,}."
            return Diagnosis(f"All updates arrive. But {said}", (hint,))
        if ranks > 1 and not sent[-1]:
            return "All updates are there, and no all_gather was called: how did they get there?"
        fewer = f"a rank sends {sent[-1]:,} bytes, too few for the updates that others lack"
        asked = "did every rank compute all of them?"
        return f"All updates are there, but {fewer}: {asked}" if sent[-1] < par else None

    play = partial(on_ranks.run_cases, ranks=ranks, cases=[()], backend=backend, seed=seed)
    hints = (
        "Rank r owns parameters[r::ranks]. Its share has their updates in this order, padded to the longest.",
        "dist.all_gather(segments, mine) wants a list of empty tensors, each as long as mine.",
        "For matrix i: from segment i % ranks take the next p.numel() entries.",
    )
    praise = "Every rank has every update, and hardly a zero has travelled."
    judge_it = judge_on_ranks(play, judge, on_ranks.say_trouble)
    return Exercise(judge_it, hints, praise, Par("bytes", par, lambda _: sent[-1]), ("gathered_share",))


def check_toy() -> Exercise:
    """The prediction: the makespans of five matrices on two owners, with the costliest first and at best."""
    longest, best = toy_makespans().values()
    return guesses(
        ("longest_first", longest, "In this order, each goes to the owner with less so far."),
        ("best", best, f"Which costs add up to half of {sum(TOY)}? No less is possible."),
        praise="Longest first puts 8 and 7 apart. The best way keeps them together.",
    )


def quiz(ranks: int) -> Exercise:
    own = sum(place.size for place in PLACES if place.owner(ranks) == 0)
    printed = f"Your fair_shares has printed it for {WORST} ranks, and the picture says it, too."
    return numbers(
        ("zeros", LENGTH - own, "Rank 0 fills its own matrices' places, and leaves zeros in all others."),
        ("busiest", fair_shares(WORST), printed),
        ("bytes", on_ranks.predict_ring(ranks), "It is your all_gather's par: a segment per other rank."),
        within=1e-6,
    )


def all_exercises(dp: int, backend: str, seed: int) -> tuple[Exercise, ...]:
    fixed, less = check_share(dp, backend, seed), check_gather(dp, backend, seed)
    return guess(dp), predict(dp), fixed, less, check_fair_shares(), check_toy(), quiz(dp)
