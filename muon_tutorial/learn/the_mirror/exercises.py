"""Exercises of lesson 09: the mirror, a flat matrix, the way back, a lost line, the whole step, a quiz."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ... import Coordinate, Grid, Hop, LocalWorld, Owned, Partial, Plan, Replicate, Route, Shard
from ...engine.collective import Collective, Label, Walk
from ...engine.travel import travel
from ...plan.bucket import DistMeta
from ...plan.layout import Placement
from ..exercises import judge
from ..exercises.judge import Diagnosis, Exercise, MistakeError, Par, first, lines_of, numbers, value_of
from . import on_ranks
from .compare import first_difference
from .on_ranks import StepOfBucket, Unpack, plan_of, record_here
from .recording import PHASES, say_phase

GRIDS = ((2, 2), (3, 2), (1, 4), (4, 1), (2, 3))
STEP_GRIDS = ((2, 1), (1, 2), (3, 2))
PAR_LINES = 12

LOST_LINE = """for group in groups:                 # before phase 2
    params = group["params"]
    for param in params:
        add_to_momentum(param)

for group in groups:                 # before phase 7
    for param in params:
        update(param, group["lr"])
"""


def run_lost_line() -> dict[str, int]:
    """How often ``LOST_LINE``'s second loop updates each matrix of two groups, [up, o] and [down]."""
    done: list[str] = []
    names: dict[str, Any] = {
        "groups": [{"params": ["up", "o"], "lr": 0.1}, {"params": ["down"], "lr": 0.3}],
        "add_to_momentum": lambda param: None,
        "update": lambda param, lr: done.append(param),
    }
    exec(LOST_LINE, names)
    return {name: done.count(name) for name in ("up", "o", "down")}


def found_mirror(plan: Plan) -> dict[str, Any]:
    """Which phase cannot be undone, and which phases send nothing in a step recorded on this grid."""
    recording = record_here(plan.grid.size("dp"), plan.grid.size("tp"), 0)
    last = len(PHASES) + 1
    loud = {sent.phase for diary in recording.diaries for sent in diary.sent}
    silent = [phase for phase in range(1, last) if phase not in loud]
    bucket = plan.buckets[0]
    routes = bucket.gradient, bucket.compute, bucket.entries[0].route
    sums = [any(isinstance(hop.src, Partial) for hop in route.hops) for route in routes]
    lost = next((number for number, is_sum in enumerate(sums, 1) if is_sum), 1)
    return {"lost": lost, "silent": silent}


def mirror_exercise(plan: Plan) -> Exercise:
    """The prediction: which phase of the way out cannot be undone, and which phases send nothing."""

    def judge(lost: object, silent: Iterable[int]) -> str | None:
        if isinstance(silent, int):
            return "Give silent as a list of phases, such as [1, 2]."
        if lost not in (1, 2, 3):
            return f"lost: give one phase of the way out, 1, 2 or 3, not {lost!r}."
        if lost != 1:
            kept = f"phase {len(PHASES) + 1 - int(str(lost))} lets each rank keep its own part again."
            return f"Phase {lost} only joins what ranks still have: {kept}"
        recording = record_here(plan.grid.size("dp"), plan.grid.size("tp"), 0)
        right = set(found_mirror(plan)["silent"])
        extra = (f"Phase {p} does send: {say_phase(recording, p)}." for p in sorted(set(silent) - right))
        quiet = (f"Phase {p} ({PHASES[p - 1]}) sends nothing either." for p in sorted(right - set(silent)))
        return first((*extra, *quiet))

    hints = (
        "After which phase is something lost that all ranks together cannot restore?",
        "Who needs help: a rank that lacks something, or one that drops something?",
    )
    back = "On the way back they only drop the rows and columns of others."
    return Exercise(judge, hints, f"On the way out ranks ask each other. {back}")


def way_back_exercise() -> Exercise:
    """The exercise: the way back for a way out, judged on several grids, on routes of one and two hops."""

    def judge(way_back: Callable[..., Walk]) -> str | None:
        _refuse_blanks(way_back)
        ends: tuple[Placement, Placement] = (Replicate(), Owned(0))
        grids = [Grid.of(dp=dp, tp=tp) for dp, tp in GRIDS]
        return first(_judge_way_back(way_back, grid, end) for grid in grids for end in ends)

    hints = (
        "Two things turn around: the order of the hops, and each hop itself.",
        "reversed(route.hops) is the order; hop.inverse is the hop the other way.",
    )
    praise = "The last hop goes back first, and each hop goes the opposite way."
    return Exercise(judge, hints, praise, keeps=("way_back",))


def _refuse_blanks(function: Any) -> None:
    """Raise an error if a stub still has its ``...``, or if the answer is no function."""
    if not callable(function):
        raise MistakeError("Give a function.")
    if ... in getattr(getattr(function, "__code__", None), "co_consts", ()):
        raise judge.OpenAnswerError


def _judge_way_back(way_back: Callable[..., Walk], grid: Grid, end: Placement) -> str | None:
    """Judge ``way_back`` on two hops. The second brings the whole matrix to all ranks, or to one owner."""
    rows, columns, asked = 2 * grid.size("dp"), 3 * grid.size("tp"), list[str]()
    hops = (Hop("dp", Shard(0), Replicate(), (rows, 3)), Hop("tp", Shard(1), end, (rows, columns)))
    route = Route(hops, torch.float32)

    def there_and_back(at: Coordinate) -> Walk:
        mine = torch.arange(6.0).view(2, 3) + 10 * at.rank
        whole = yield from travel(mine, route, at, Label("the way out"))
        back = value_of(way_back, whole, route, at, Label("the way back"))
        if not inspect.isgenerator(back):
            raise MistakeError("way_back makes no request: take each hop with yield from take(…).")
        return mine, (yield from back)

    def observe(request: Collective, at: Coordinate) -> None:
        asked.extend([request.kind] if request.label.phase == "the way back" else [])

    world, raised = LocalWorld(grid, observers=[observe]), ""
    try:
        found = world.run([there_and_back(grid.at(rank)) for rank in grid.ranks])
    except MistakeError:
        raise
    except Exception as error:
        where, said = f"dp={grid.size('dp')}, tp={grid.size('tp')}", str(error).splitlines()[0]
        raised = f"On {where} it raised {type(error).__name__}: {said}"
        raised += f".{_NOT_WALKED}" if "generator" in said else ""
    if isinstance(end, Replicate) and asked:
        return f"It asked for {asked[0]}; each rank has all it needs already. Take the hop the other way."
    if set(asked) - {"scatter"}:
        return f"From an owner it asked for {asked[0]}; the opposite of a gather is a scatter."
    if raised:
        return raised
    return first(_judge_return(grid.at(rank), *pair) for rank, pair in enumerate(found))


def _judge_return(at: Coordinate, mine: Tensor, came: Any) -> str | None:
    if not isinstance(came, Tensor):
        ended = "a generator" if inspect.isgenerator(came) else repr(came)
        return f"{at} ended with {ended}: return x at the end.{_NOT_WALKED if ended != repr(came) else ''}"
    if came.shape != mine.shape:
        went = f"went out with {tuple(mine.shape)} and came back with {tuple(came.shape)}"
        return f"On {at.grid}, {at} {went}. Which hop has to go first?"
    if not torch.equal(came, mine):
        owner = int(came.flatten()[0]) // 10
        return f"On {at.grid}, {at} came back with entries that rank {owner} brought. Which hop goes first?"
    return None


def unpack_exercise() -> Exercise:
    def judge(unpack: Unpack) -> str | None:
        _refuse_blanks(unpack)
        for plan in (plan_of(dp, tp) for dp, tp in GRIDS):
            for at in map(plan.grid.at, plan.grid.ranks):
                flat = torch.arange(float(plan.buckets[0].length(plan.buckets[0].model_layout, at)))
                for meta in plan.dist_meta(at):
                    if wrong := _judge_unpacked(value_of(unpack, flat, meta), flat, meta, at):
                        return wrong
        return None

    hints = (
        "meta.global_range says where the piece lies in flat, and meta.shape which shape it has.",
        "flat[start:stop].view(meta.shape)",
    )
    return Exercise(judge, hints, "Rows and columns are back.", keeps=("unpack",))


def _judge_unpacked(came: Any, flat: Tensor, meta: DistMeta, at: Coordinate) -> str | None:
    if not isinstance(came, Tensor):
        return f"{meta.name}: give a tensor, not {came!r}."
    where = f"On {at.grid}, {at}, {meta.name}:"
    if came.ndim != 2:
        return f"{where} {came.ndim} dimension, {came.numel()} entries. Newton–Schulz needs rows and columns."
    if came.shape != meta.shape:
        return f"{where} the shape is {tuple(came.shape)}; this rank's piece is {meta.shape}."
    if not torch.equal(came, on_ranks.unpack(flat, meta)):
        first = int(came.flatten()[0])
        return f"{where} its first entry is {first}; it must hold {meta.global_range} of the bucket in order."
    return None


_TWICE = "Use way_back twice: along entry.route for each matrix, then along bucket.compute for the buffer."
_NOT_WALKED = " A take, travel or way_back without `yield from` is only a generator: it has sent nothing."
_STEP_HINTS = {
    1: ("Phase 1 begins with job.gradients(bucket), and travels along bucket.gradient.",),
    2: ("First job.momentum(bucket, …) takes the sum. What it returns travels along bucket.compute.",),
    3: ("Each matrix: unpack(flat, meta), then travel along entry.route, with job.label(3, entry).",),
    4: ("job.newton_schulz(entry, whole) takes the matrix that the tp gather has made whole.",),
    5: (_TWICE,),
    6: (
        "Is phase 6 there: way_back of the flat buffer, along bucket.compute? Before it, in "
        "phase 5: does each update go back along entry.route, and is it written, flat, into zeros at "
        "meta.global_range?",
        _TWICE,
    ),
    7: (
        "job.apply(bucket, …) takes what phase 6 left. Its result travels along bucket.parameter, then goes "
        "to job.write.",
    ),
}


def step_exercise(dp: int, tp: int, seed: int) -> Exercise:
    """The exercise: the whole step, judged on several grids by the first difference in its messages."""

    def judge(step: StepOfBucket) -> Diagnosis:
        from .replay import draw_difference, draw_step  # here, because ranks need no pictures

        job = on_ranks.jobs_on(Grid.of(dp=dp, tp=tp), seed)[0]
        try:
            walk: Any = value_of(step, job, job.step.plan.buckets[0], job.step.at)
        except MistakeError as mistake:  # without any `yield from`, the call runs the whole step
            raise MistakeError(f"{mistake}{_NOT_WALKED if 'generator' in str(mistake) else ''}") from None
        if not inspect.isgenerator(walk):
            raise MistakeError("The step makes no request: a phase sends by `yield from travel(…)`.")
        walk.close()
        for grid in dict.fromkeys(((dp, tp), *STEP_GRIDS)):
            difference = first_difference(step, *grid, seed)
            mark = difference.first
            if mark is None and not difference.broke:
                continue
            stopped = f"{difference.stopped}." if difference.broke else ""
            stopped += _NOT_WALKED if "generator" in stopped else ""
            if mark is None:
                return Diagnosis(f"On {difference.grid}, all is right, and then:{stopped}", _STEP_HINTS[7])
            phase, what = mark.phase, mark.what
            if phase == 6 and mark.how == "missing" and PHASES[6] in stopped:
                phase, what = 7, "job.apply was not called on what phase 6 left."
            said = f"phase {phase} ({PHASES[phase - 1]}) is the first to differ: {what}{stopped}"
            return Diagnosis(f"On {difference.grid}, {said}", _STEP_HINTS[phase], draw_difference(difference))
        return Diagnosis("", picture=draw_step(on_ranks.stepped(step, dp, tp, seed)))

    same = "On every grid that was tried, your ranks make the package's requests, to the bit."
    praise = f"You have written a distributed Muon step! {same}"
    return Exercise(judge, (), praise, Par("lines", PAR_LINES, lambda step: 1 + lines_of(step)), ("my_step",))


def quiz(plan: Plan) -> Exercise:
    recording = record_here(plan.grid.size("dp"), plan.grid.size("tp"), 0)
    asked = "Phases 1, 2 and 7 ask once each, and phase 3 once for each matrix that is whole here."
    return numbers(
        ("requests", len(recording.diaries[0].sent), asked),
        ("whole", len(recording.workers("o")), "Set phase 4 and press o: how many ranks hold it whole?"),
    )


def all_exercises(plan: Plan, seed: int) -> tuple[Exercise, ...]:
    step = step_exercise(plan.grid.size("dp"), plan.grid.size("tp"), seed)
    return mirror_exercise(plan), unpack_exercise(), way_back_exercise(), step, quiz(plan)


def error_of(work: Callable[..., Any], *arguments: Any) -> str:
    """The error that a call raises, and the line in which it does."""
    try:
        work(*arguments)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[1]
        return f"{type(error).__name__}: {error}\n  in the line: {frame.line}"
    return "nothing was raised"
