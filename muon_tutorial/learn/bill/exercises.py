"""Exercises of lesson 10: which ranks run Newton–Schulz, a bill by hand, a boundary gather, and the quiz."""

from __future__ import annotations

from ... import Grid, zero1
from ..exercises.judge import Exercise, Par, guesses, numbers, written
from ..my_muon.reference import bill as bill
from ..the_mirror.on_ranks import small_matrices
from . import costs
from .costs import bill_of, plans_of

GRIDS = ((2, 2), (4, 1), (1, 4), (3, 2), (8, 4))


def runs_exercise(dp: int, tp: int) -> Exercise:
    """The prediction: how many ranks run Newton–Schulz on the matrix o, by strategy."""
    right = costs.runs_of(plans_of(dp, tp), "o")
    lies = "Where does o lie in the bucket? Every rank whose slice has a part of o works on all of o."
    position = "One dp place owns it, and all tp ranks at that place work on it."
    return guesses(
        ("replicated", right["replicated"], "Every rank does everything."),
        ("round_robin", right["round_robin"], position),
        ("zero1", right["zero1"], lies),
        ("owner", right["owner"], "An owner is one rank of the whole grid."),
        praise="If several ranks do the same work, no rank has to send the answer.",
    )


_BILL_HINTS = {
    "gradient reduce_scatter": (
        "A ring sends (dp − 1) pieces of total // dp entries each. In fp32 each is 4 bytes.",
    ),
    "dp gather": (
        "The input of Newton–Schulz is bfloat16: 2 bytes an entry. How many pieces does a ring send?",
    ),
    "tp gather": ("A rank passes on tp − 1 pieces of every matrix that it works on, in bfloat16.",),
    "parameter all_gather": ("New weights are fp32, and every rank needs all slices.",),
}


def bill_exercise(dp: int, tp: int) -> Exercise:
    """The reader's bill is compared with the ledger's on several grids, for two models."""
    due: dict[tuple[int, ...], dict[str, int]] = {}
    grids = [Grid.of(dp=each[0], tp=each[1]) for each in dict.fromkeys(((dp, tp), *GRIDS))]
    models = small_matrices(), costs.gpt_matrices(2, 96)
    for plan in (zero1(matrices, grid) for grid in grids for matrices in models):
        for at in map(plan.grid.at, {0, plan.grid.world_size - 1}):
            sent = bill_of("zero1", plan, at.rank).sent
            case = costs.entries_of_rank(plan), costs.touched_entries(plan, at), at.size("dp"), at.size("tp")
            due[case] = {phase: sent.get(phase, 0) for phase in _BILL_HINTS}
    own = plans_of(dp, tp)["zero1"]
    entries = costs.entries_of_rank(own), costs.touched_entries(own, own.grid.at(0))
    par = Par("bytes", bill_of("zero1", own).total, lambda bill: sum(bill(*entries, dp, tp).values()))
    praise = "Your bytes of every phase are the ledger's, on every grid that was tried."
    return written(
        lambda *case: due[case],
        list(due),
        say="total {:,}, touched {:,}, dp={} and tp={}",
        hints_of=_BILL_HINTS,
        praise=praise,
        par=par,
        keeps=("bill",),
    )


def sends(matrix: tuple[int, int], length: int, place: int, dp: int) -> list[int]:
    """The exercise's reference: entries of a matrix that dp position ``place`` sends to each dp position."""
    held = [max(0, min(matrix[1], (p + 1) * length) - max(matrix[0], p * length)) for p in range(dp)]
    return [held[place] if held[p] and p != place else 0 for p in range(dp)]


def sends_exercise() -> Exercise:
    tried = [((3, 9), 6, 2), ((0, 6), 6, 3), ((4, 20), 6, 4), ((11, 13), 6, 3), ((6, 12), 6, 2)]
    cases = [(matrix, length, place, dp) for matrix, length, dp in tried for place in range(dp)]
    hints = (
        "How many entries does each place hold? That is local_range of lesson 05: the overlap of two ranges.",
        "A place that holds nothing of the matrix neither sends nor receives. No place sends to itself.",
    )
    say = "matrix {0[0]} to {0[1]}, slices of {1}, place {2} of {3}"
    praise = "Every holder gets what it lacks, and no other place gets anything."
    return written(sends, cases, say=say, hints=hints, praise=praise)


def quiz(dp: int, tp: int) -> Exercise:
    plans = plans_of(dp, tp)
    saved = bill_of("", plans["zero1"]).total - bill_of("", plans["zero1, boundary"]).total
    slices = "How many slices hold a part of up? For each of these slices, all tp ranks work on up."
    kept = "Muon keeps 4 bytes for each entry of a slice, which is 1 / dp of the bucket."
    return numbers(
        ("saved", saved, "Subtract the total of “zero1, boundary” from that of zero1."),
        ("state", bill_of("", plans["zero1"]).state, kept),
        ("runs", len(plans["zero1"].workers(0)), slices),
    )


def all_exercises(dp: int, tp: int) -> tuple[Exercise, ...]:
    return (runs_exercise(dp, tp), bill_exercise(dp, tp), sends_exercise(), quiz(dp, tp))
