"""Exercises of lesson 11: who gets a tensor, the three functions, shared work, ZeRO-3's bytes, the quiz."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from ..exercises.judge import Diagnosis, Exercise, Par, first, guesses, numbers, value_of, why, written
from ..exercises.on_real_ranks import judge_on_ranks
from . import on_ranks, pictures
from .on_ranks import PATIENCE, FunctionsRun, RankTrial, ThreeFunctions, TrialNote, rows_of, shapes_of
from .shared_work import MixedModel, as_the_package

ALL_CALL = "Only the owner gets the matrix, but every rank calls"
_SIZES = "Gloo aborts the process if sizes differ: each receive must have the size of its send."


def guess(ranks: int) -> Exercise:
    """The prediction: each rank's rows, and what ``gather_fn`` returns there. The last rank is the owner."""
    rows, got = rows_of(on_ranks.bad_rows(ranks), ranks), [None] * (ranks - 1) + ["tensor"]
    fair = "Fair, but torch does not deal rows out one by one: it makes runs of equal length."
    chunks = "torch.chunk gives every rank a run of the same length, for as long as there are rows: "
    chunks += f"{on_ranks.bad_rows(ranks)} / {ranks}, rounded up to {rows[0]}."
    owner = "How many rows a rank holds does not matter here. Who orthogonalizes this matrix?"
    quoted = [str(each) for each in got], "None is written without quotes."
    praise = "A rank that holds nothing can own the matrix. Owner or not, it must call."
    of_rows = "rows", rows, chunks, ([3, *[2] * (ranks - 1)], fair)
    return guesses(of_rows, ("got", got, owner, quoted), praise=praise)


def check_assign(dp: int, tp: int, seed: int, backend: str = "gloo", timeout: float = PATIENCE) -> Exercise:
    def play(assign: Callable) -> FunctionsRun:
        return on_ranks.run_functions(dp, tp, seed, ThreeFunctions(assign), "assign", backend, timeout)

    hint = "dist.get_process_group_ranks(state['group']) lists the global ranks that share your parameters."
    praise = "All ranks of a group name the same owners, by their global numbers."
    return Exercise(judge_on_ranks(play, explain_functions, hint=_SIZES), (hint,), praise, keeps=("assign",))


def check_gather(
    dp: int, tp: int, seed: int, before: Exercise, backend: str = "gloo", timeout: float = PATIENCE
) -> Exercise:
    def play(gather: Callable) -> FunctionsRun:
        return on_ranks.run_functions(dp, tp, seed, functions_of(before, gather), "gather", backend, timeout)

    hints = (
        "dist.gather wants pieces of one size. dist.all_to_all_single takes split sizes, which may be 0.",
        "all_to_all_single(whole, mine.flatten(), take, send, group=…): each list counts elements by rank.",
        "send is mine.numel() for the owner, 0 for all others. take is all zeros except on the owner.",
    )
    praise = "Each owner has the whole matrix, to the bit; every other rank has None."
    return Exercise(judge_on_ranks(play, explain_functions, hint=_SIZES), hints, praise, keeps=("gather",))


def check_redistribute(
    dp: int, tp: int, seed: int, before: Sequence[Exercise], backend: str = "gloo", timeout: float = PATIENCE
) -> Exercise:
    """The exercise: a ``redistribute_fn``, and then all three in ``Muon``, compared with a single process."""
    runs: list[FunctionsRun] = []

    def play(redistribute: Callable) -> FunctionsRun:
        functions = functions_of(before[0], before[1].accepted, redistribute)
        runs.append(on_ranks.run_functions(dp, tp, seed, functions, "step", backend, timeout))
        return runs[-1]

    judge = judge_on_ranks(play, explain_functions, hint=_SIZES)
    hints = (
        "The way back is the way out with the two lists exchanged.",
        "On other ranks the update is None: make an empty tensor there, and make the same call.",
        "state['local_shape'] says what shape this rank's part has.",
    )
    praise = "Three steps of Muon with your functions give the bits of one process, on every rank."
    praise += " Your sharding is plugged in, so this is a good place to stop."

    def bytes_back(redistribute: Callable) -> float:
        notes = (note for trial in runs[-1].trials for note in trial.notes)
        return sum(note.nbytes for note in notes if note.call == "redistribute") / (dp * tp)

    par = Par("bytes a rank on the way back", par_bytes(dp, tp), bytes_back)
    return Exercise(judge, hints, praise, par, ("redistribute",))


def par_bytes(dp: int, tp: int) -> float:
    """Bytes that a rank sends on the way back, on average, if rank i % dp owns matrix i.

    Owners send only the other ranks' rows. Each of the tp groups has matrices of its own.
    """
    sides = enumerate(shapes_of(dp))
    sent = sum((rows - rows_of(rows, dp)[index % dp]) * columns for index, (rows, columns) in sides)
    return tp * 2 * sent / (dp * tp)


def functions_of(assigned: Exercise, gather: Any = ..., redistribute: Any = ...) -> ThreeFunctions:
    """The reader's functions; the reference's for those that are ``...``."""
    given = {"assign": assigned.accepted, "gather": gather, "redistribute": redistribute}
    return ThreeFunctions(**{name: function for name, function in given.items() if function is not ...})


def explain_functions(run: FunctionsRun) -> str | Diagnosis | None:
    """What is wrong with a run of the three functions, from its first wrong call."""
    off = ((rank, trial.differs) for rank, trial in enumerate(run.trials) if trial.differs is not None)
    right = "Each call was right, and after some steps"
    steps = (f"{right} matrix {index} differs on rank {rank}." for rank, index in off)
    return first(chain(_wrong_owners(run), _stopped(run), _wrong_values(run), steps))


def _wrong_owners(run: FunctionsRun) -> Iterator[str | Diagnosis]:
    count = len(shapes_of(run.dp))
    for rank, trial in enumerate(run.trials):
        if trial.notes[0].error:
            yield f"assign raised on rank {rank}: {trial.notes[0].error}"
        if not isinstance(trial.owners, dict) or set(trial.owners) != set(range(count)):
            yield f"assign must return a dict with an owner for each of the parameters 0 to {count - 1}."
        if not on_ranks.are_owners(trial.owners, trial.group, count):
            named = trial.owners.items()
            index, owner = next((i, o) for i, o in named if type(o) is not int or o not in trial.group)
            holders = ", ".join(map(str, trial.group))
            what = f"On rank {rank}, parameter {index} goes to {owner!r}, but ranks {holders} share it."
            if owner in range(len(trial.group)):
                what += f" {owner} is a place in that group; an owner is named by its global rank."
            yield Diagnosis(what, ("dist.get_process_group_ranks(group)[place] is a global rank.",))
    for rank, trial in enumerate(run.trials):
        other = run.trials[trial.group[0]]
        pairs = ((other.owners, trial.owners), (run.trials[0].of_all, trial.of_all))
        for (theirs, mine), first_rank in zip(pairs, (trial.group[0], 0), strict=True):
            if theirs != mine:
                what = f"Ranks {first_rank} and {rank} share parameters, and name different owners"
                hint = "What assign returns must not depend on the rank that calls it."
                yield Diagnosis(f"{what}: {theirs} and {mine}.", (hint,))
    for trial in run.trials:
        if len(set(trial.owners.values())) < min(len(trial.group), count):
            shared = ", ".join(map(str, trial.group))
            chosen = ", ".join(map(str, sorted(set(trial.owners.values()))))
            yield f"Ranks {shared} share the work, but only these of them get any: {chosen}."


def _stopped(run: FunctionsRun) -> Iterator[Diagnosis]:
    last = {rank: trial.notes[-1] for rank, trial in enumerate(run.trials)}
    if not (failed := {rank: note for rank, note in last.items() if note.error}):
        return
    loud = {rank: note for rank, note in failed.items() if not note.waited}
    rank, note = next(iter((loud or failed).items()))
    if not loud:
        waited = f"Timeout in {note.call}, matrix {note.index}: rank {rank} waited {run.timeout:g} s"
        silent = [each for each in run.trials[rank].group if not last[each].talked and not last[each].error]
        if silent:
            those = f"rank {', '.join(map(str, silent))}, which had returned without making the call"
            hint = "Test dist.get_rank() == owner after the collective, not before."
            yield Diagnosis(f"{waited} for {those}. {ALL_CALL}.", (hint,))
        hint = "Do all ranks of the group make the same calls, in the same order?"
        yield Diagnosis(f"{waited}: not all ranks of the group made the call.", (hint,))
    if note.call == "step":
        yield Diagnosis(f"Each call was right by itself, but step {note.index} of Muon raised: {note.error}")
    shards = rows_of(shapes_of(run.dp)[note.index][0], run.dp)
    what = f"{note.call} raised on rank {rank} for matrix {note.index}, whose shards have {shards} rows"
    none = "On other ranks the update is None: make an empty tensor there, and call the collective anyway."
    uneven = "Ask local_shape(shape, 'column', place, ranks) for places in the group, not global ranks."
    splits = "Only the owner takes. All ranks send only to its place in the group: ranks.index(owner)."
    if note.call == "redistribute":
        splits = "Only the owner sends. Each rank takes what it sent on the way out: exchange the two lists."
    group = "Does the call name group=state['group']? Without it, all ranks of the grid take part."
    hint = why(
        ("zip()" in note.error, group),
        ("index out of range" in note.error, "Lists go by places in the group: ranks.index(owner)."),
        ("not part of group" in note.error, "src and dst of torch's collectives are global ranks."),
        ("NoneType" in note.error, none),
        ("different dtypes" in note.error, "All tensors of the call are bfloat16, as the update is."),
        (any(word in note.error for word in ("PerRank", "Split sizes", "split size")), splits),
        (any(word in note.error for word in ("size", "split", "shape")), uneven),
        otherwise="Which matrix is it, and how many rows does this rank hold of it?",
    )
    yield Diagnosis(f"{what}: {on_ranks.in_words(note.error)}", (hint,))


def _wrong_values(run: FunctionsRun) -> Iterator[str | Diagnosis]:
    judges = {"gather": _wrong_full, "redistribute": _wrong_part}
    for place, note in enumerate(run.trials[0].notes):
        for rank, trial in enumerate(run.trials):
            if place < len(trial.notes) and note.call in judges:
                yield from judges[note.call](run, rank, trial, trial.notes[place])


def _wrong_full(run: FunctionsRun, rank: int, trial: RankTrial, note: TrialNote) -> Iterator[str | Diagnosis]:
    """What is wrong with the owner's whole matrix, or with another rank's result, which must be None."""
    due, where = run.given("momentum", rank, note.index), f"gather, matrix {note.index}, rank {rank}:"
    if trial.owners[note.index] != rank:
        if note.value is not None:
            yield Diagnosis(f"{where} it is not the owner, so it must return None.", (f"{ALL_CALL}.",))
        return
    if not isinstance(note.value, Tensor):
        yield f"{where} the owner must return the whole matrix, but it returned {note.value or 'None'}."
    elif note.value.shape != due.shape:
        rows, length = rows_of(len(due), run.dp), len(note.value) if note.value.ndim == 2 else -1
        all_there = " All its entries are there: give them their rows and columns back with .view(shape)."
        told = why(
            (note.value.numel() == due.numel(), all_there),
            (length == max(rows) * run.dp > len(due), " That is with padding."),
            (length in rows, " That is one rank's rows."),
        )
        came = f"the whole matrix has shape {tuple(due.shape)}; it returned {tuple(note.value.shape)}."
        yield Diagnosis(f"{where} {came}{told}", _SHAPE_HINTS)
    elif note.value.dtype != due.dtype:
        what = f"{where} {note.value.dtype} came back; the momentum's own dtype is {due.dtype}."
        yield Diagnosis(what, ("mine.new_empty(…) makes tensors of mine's own dtype.",))
    elif not note.value.equal(due):
        found = source_rows(note.value, due)
        picture = pictures.draw_rows(found, rows_of(len(due), run.dp), trial.group, note.index)
        order = "Take the ranks of the group in order, and each rank's rows in order."
        hints = (order, "No row twice, and none left out.")
        place, row = next((place, row) for place, row in enumerate(found) if row != place)
        there = "no row of it, as if it was never filled" if row is None else f"row {row}"
        told = f"the place of row {place} of the matrix holds {there}."
        told = "the shape is right, but none of the matrix's rows is in it." if set(found) == {None} else told
        yield Diagnosis(f"{where} {told}", hints, picture)


_SHAPE_HINTS = (
    "Padding has to be taken off before Newton–Schulz sees it: zero rows change the update.",
    "state['shapes'][state['param_idx']] is the whole shape.",
)


def _wrong_part(run: FunctionsRun, rank: int, trial: RankTrial, note: TrialNote) -> Iterator[str | Diagnosis]:
    whole, where = run.given("update", rank, note.index), f"redistribute, matrix {note.index}, rank {rank}:"
    lengths, place = rows_of(len(whole), run.dp), trial.group.index(rank)
    begin = sum(lengths[:place])
    due = whole[begin : begin + lengths[place]]
    if not isinstance(note.value, Tensor):
        what = f"{where} every rank must return its part, but it returned {note.value or 'None'}."
        yield Diagnosis(what, (f"{ALL_CALL}.",))
    elif note.value.shape != due.shape:
        yield f"{where} its part has shape {tuple(due.shape)}; it returned {tuple(note.value.shape)}."
    elif note.value.dtype != due.dtype:
        what = f"{where} its part is {note.value.dtype}; it must be {due.dtype}, as the update is."
        yield Diagnosis(what, ("A rank without the update makes its empty tensors in that dtype.",))
    elif not note.value.equal(due):
        found = source_rows(note.value, whole)
        rows = f"rows {begin} to {begin + len(due) - 1}"
        what = f"{where} it must return {rows} of the update, but it has {found}."
        flat = "The update of a tall matrix is transposed in memory: send update.contiguous()."
        starts = "Each rank's run starts where the last one's ends."
        hint = flat if set(found) == {None} and not whole.is_contiguous() else starts
        yield Diagnosis(what.replace("None", "no row of it"), (hint,))


def source_rows(value: Tensor, whole: Tensor) -> list[int | None]:
    """For each row of ``value``, the number of the equal row in the whole matrix, or None."""
    same = [(row == whole).all(1).nonzero().flatten().tolist() for row in value]
    return [rows[0] if rows else None for rows in same]


def check_shared_work(model: MixedModel) -> Exercise:
    """The exercise: an ``assign_fn`` for matrices that not every rank may own, scored by its makespan."""
    par = model.makespan(as_the_package(model))

    def judge(assign: Callable) -> str | Diagnosis | None:
        answers = [value_of(assign, model.params_at(rank), dict(model.state)) for rank in model.ranks]
        for rank, owners in enumerate(answers):
            if wrong := _not_allowed(model, owners):
                return wrong
            if owners != answers[0]:
                what = f"Ranks 0 and {rank} name different owners. Only the shards differ between them."
                hint = "Take the work from state['shapes'], which is the same on all ranks."
                return Diagnosis(what, (hint,))
        mine = model.makespan(answers[0])
        if mine <= par * (1 + 1e-9):
            return None
        busiest = model.loads(answers[0]).index(mine)
        what = f"The busiest rank, {busiest}, has {mine:.1f} GFLOP; par is {par:.1f}."
        return Diagnosis(what, (), pictures.draw_loads(model, answers[0]))

    hints = (
        "The costliest first, each to the holder who has the least work so far.",
        "Count work with lesson.cost_of(shape), not rows: a square matrix costs more.",
        "min(state['holders'][index], key=…) picks among the ranks that may own it.",
    )

    def busiest_of(assign: Callable) -> float:
        return round(model.makespan(assign(model.params_at(0), dict(model.state))), 1)

    praise = "No rank owns a matrix that it does not hold, and the work is spread."
    return Exercise(judge, hints, praise, Par("GFLOP on the busiest rank", round(par, 1), busiest_of))


def _not_allowed(model: MixedModel, owners: Any) -> str | Diagnosis | None:
    count = len(model.matrices)
    if not isinstance(owners, dict) or set(owners) != set(range(count)):
        return f"Return a dict with an owner for each of the parameters 0 to {count - 1}."
    for index, owner in owners.items():
        matrix = model.matrices[index]
        if owner not in matrix.holders:
            who = ", ".join(map(str, matrix.holders))
            what = f"{matrix.name} (parameter {index}) goes to {owner!r}; only ranks {who} hold rows of it."
            return Diagnosis(what, ("state['holders'][index] lists who may own it.",))
    return None


def sent(entries: int, ranks: int, item: int, times: tuple[int, int] = (2, 3)) -> dict[str, int]:
    """The exercise's reference: bytes a rank sends in a step. ``times``: collectives of ZeRO-1, of ZeRO-3."""
    once = (ranks - 1) * entries * item // ranks
    return {"ZeRO-1": times[0] * once, "ZeRO-3": times[1] * once}


def check_sent() -> Exercise:
    """The exercise: what the gathers of ZeRO-3 cost beside ZeRO-1's."""
    slips = (
        ("ZeRO-3 drops weights after forward. What does backward need?", partial(sent, times=(2, 2))),
        ("A rank needs only its part of the sum; AdamW has no x to gather.", partial(sent, times=(3, 4))),
        ("On a ring, a rank sends all shares but one.", lambda n, ranks, item: sent(2 * n, 2, item)),
        ("An entry has `item` bytes.", lambda n, ranks, item: sent(n, ranks, 1)),
    )
    cases = [(8 * 10**9, 8, 2), (10**9, 2, 4), (640, 64, 2)]
    praise = "ZeRO-3 sends half as much again, so that no rank has to keep the weights whole."
    return written(sent, cases, *slips, say="{} entries, {} ranks, {} bytes each", praise=praise)


def quiz() -> Exercise:
    return numbers(
        ("empty", 3, "Nine rows over eight ranks make runs of two. How many runs does that make?"),
        ("step", 2, "Read the trap with the gradient again: the first step came near the right update."),
    )


def all_exercises(dp: int, tp: int, seed: int, backend: str) -> tuple[Exercise, Exercise, Exercise, Exercise]:
    assigned = check_assign(dp, tp, seed, backend)
    gathered = check_gather(dp, tp, seed, assigned, backend)
    return guess(dp * tp), assigned, gathered, check_redistribute(dp, tp, seed, (assigned, gathered), backend)
