"""Exercises of lesson 09: the mirror, the way back, two bugs of the blueprint, and the quiz."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import Coordinate, Grid, Hop, LocalWorld, Plan, Replicate, Route, Shard
from ...engine.collective import Label, Walk
from ...engine.travel import travel
from ...plan.bucket import DistMeta
from ..exercises.judge import Exercise, MistakeError, OpenAnswerError, numbers, value_of
from . import on_ranks
from .on_ranks import Unpack, UpdateLoop, plan_of, record_here
from .recording import PHASES, say_phase

GRIDS = ((2, 2), (3, 2), (1, 4), (4, 1), (2, 3))

BLUEPRINT_LOOP = """def update_loop(param_groups, update):
    for group in param_groups:
        for param in params:
            update(param, group)
"""


def mirror_exercise(plan: Plan) -> Exercise:
    """The prediction: which phase undoes which, and which phases send nothing."""

    def judge(undoes: Mapping[int, int], silent: Iterable[int]) -> str | None:
        if isinstance(silent, int):
            return "Give silent as a list of phases, such as [1, 2]."
        return _judge_mirror(undoes) or _judge_silent(plan, set(silent))

    hints = (
        "Fold the picture at its dashed line: which phases come to lie on each other?",
        "To cut a piece off what one holds needs nobody else.",
    )
    return Exercise(judge, hints, "Outward the ranks have to ask each other. On the way back they only cut.")


def _judge_mirror(undoes: Mapping[int, int]) -> str | None:
    if not isinstance(undoes, Mapping):
        return "Give undoes as a dictionary: {1: the phase that undoes 1, 2: …, 3: …}."
    for phase in (1, 2, 3):
        if phase not in undoes:
            return f"undoes says nothing of phase {phase}. Its keys are the phases of the way out: 1, 2, 3."
        if undoes[phase] != len(PHASES) + 1 - phase:
            return f"Phase {phase} ({PHASES[phase - 1]}) is not undone by phase {undoes[phase]}."
    return None


def _judge_silent(plan: Plan, silent: set[int]) -> str | None:
    recording = record_here(plan.grid.size("dp"), plan.grid.size("tp"), 0)
    loud = {sent.phase for diary in recording.diaries for sent in diary.sent}
    right = set(range(1, len(PHASES) + 1)) - loud
    if extra := sorted(silent - right):
        return f"Phase {extra[0]} does send: {say_phase(recording, extra[0])}."
    if missing := sorted(right - silent):
        return f"Phase {missing[0]} ({PHASES[missing[0] - 1]}) sends nothing either."
    return None


def way_back_exercise() -> Exercise:
    """The way back, from the way out: judged on several grids, on routes of one hop and of two."""

    def judge(way_back: Callable[..., Walk]) -> str | None:
        _refuse_blanks(way_back)
        return next(
            filter(None, (_judge_way_back(way_back, Grid.of(dp=dp, tp=tp)) for dp, tp in GRIDS)), None
        )

    hints = (
        "Two things turn around: the order of the hops, and each hop itself.",
        "reversed(route.hops) is the order; hop.inverse is the hop the other way.",
    )
    return Exercise(judge, hints, "The hop that came last goes back first, each the other way.")


def _refuse_blanks(function: Any) -> None:
    """Raise where a stub still has its ``...``, or is no function."""
    if not callable(function):
        raise MistakeError("Give a function.")
    if ... in getattr(getattr(function, "__code__", None), "co_consts", ()):
        raise OpenAnswerError


def _judge_way_back(way_back: Callable[..., Walk], grid: Grid) -> str | None:
    rows, columns = 2 * grid.size("dp"), 3 * grid.size("tp")
    hops = (
        Hop("dp", Shard(0), Replicate(), (rows, 3)),
        Hop("tp", Shard(1), Replicate(), (rows, columns)),
    )
    route, late = Route(hops, torch.float32), []

    def there_and_back(at: Coordinate) -> Walk:
        mine = torch.arange(6.0).view(2, 3) + 10 * at.rank
        whole = yield from travel(mine, route, at, Label("the way out"))
        back = value_of(way_back, whole, route, at, Label("the way back"))
        if not inspect.isgenerator(back):
            raise MistakeError("It asks nobody: each hop has to be taken with yield from take(…).")
        return mine, (yield from back)

    world, raised = LocalWorld(grid), ""
    world.observers.append(
        lambda request, at: late.append(request.kind) if request.label.phase == "the way back" else None
    )
    try:
        found = world.run([there_and_back(grid.at(rank)) for rank in grid.ranks])
    except MistakeError:
        raise
    except Exception as error:
        where, said = f"dp={grid.size('dp')}, tp={grid.size('tp')}", str(error).splitlines()[0]
        raised = f"On {where} it raised {type(error).__name__}: {said}"
    if late:
        return f"It asked for {late[0]}; each rank has all it needs already. Take the hop the other way."
    if raised:
        return raised
    return next(filter(None, (_judge_return(grid.at(rank), *pair) for rank, pair in enumerate(found))), None)


def _judge_return(at: Coordinate, mine: Tensor, came: Any) -> str | None:
    if not isinstance(came, Tensor):
        return f"{at} ended with {came!r}: return x at the end."
    if came.shape != mine.shape:
        return (
            f"On {at.grid}, {at} went out with {tuple(mine.shape)} and came back with {tuple(came.shape)}. "
            "Which hop has to go first?"
        )
    if not torch.equal(came, mine):
        owner = int(came.flatten()[0]) // 10
        return f"On {at.grid}, {at} came back with numbers that rank {owner} brought. Which hop goes first?"
    return None


def unpack_exercise() -> Exercise:
    """The blueprint's second bug: what lies flat in the bucket, as the matrix it is."""

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
        "meta.global_range says where it lies in flat, meta.shape which shape this rank's piece has.",
        "flat[start:stop].view(meta.shape)",
    )
    return Exercise(judge, hints, "Rows and columns are back.")


def _judge_unpacked(came: Any, flat: Tensor, meta: DistMeta, at: Coordinate) -> str | None:
    if not isinstance(came, Tensor):
        return f"{meta.name}: give a tensor, not {came!r}."
    where = f"On {at.grid}, {at}, {meta.name}:"
    if came.ndim != 2:
        return f"{where} {came.ndim} dimension, {came.numel()} numbers. Newton–Schulz needs rows and columns."
    if came.shape != meta.shape:
        return f"{where} the shape is {tuple(came.shape)}; this rank's piece is {meta.shape}."
    if not torch.equal(came, on_ranks.unpack(flat, meta)):
        first = int(came.flatten()[0])
        return f"{where} it begins with number {first} of the bucket, not as {meta.global_range} lie there."
    return None


def loop_exercise() -> Exercise:
    """The blueprint's first bug: every parameter once, with its own group."""

    def judge(update_loop: UpdateLoop) -> str | None:
        _refuse_blanks(update_loop)
        groups: list[dict] = [{"params": ["up", "o"], "lr": 0.1}, {"params": [], "lr": 0.2}]
        groups.append({"params": ["down"], "lr": 0.3})
        due, done = [("up", 0.1), ("o", 0.1), ("down", 0.3)], list[tuple[Any, float]]()
        value_of(update_loop, groups, lambda param, group: done.append((param, group["lr"])))
        return None if done == due else _say_updates(due, done)

    hints = ('A group is a dictionary; its parameters are group["params"].', "Set it inside the loop.")
    return Exercise(judge, hints, "Every parameter is updated once, with its own group's learning rate.")


def _say_updates(due: list[tuple[str, float]], done: list[tuple[Any, float]]) -> str:
    told = "Groups (up, o: lr 0.1), (none: lr 0.2), (down: lr 0.3):"
    updated = [param for param, _ in done]
    if missing := [param for param, _ in due if param not in updated]:
        return f"{told} {missing[0]} was never updated."
    if wrong := [pair for pair in done if pair not in due]:
        return f"{told} {wrong[0][0]} was updated with lr {wrong[0][1]}, another group's."
    return f"{told} updated were {', '.join(map(str, updated))}."


def quiz(plan: Plan) -> Exercise:
    """Numbers that the notebook has measured."""
    recording = record_here(plan.grid.size("dp"), plan.grid.size("tp"), 0)
    expected = {
        "requests": len(recording.diaries[0].sent),
        "whole": len(recording.workers("o")),
        "different": 0,
    }
    why = {
        "requests": "Ask len(reports[0].diary.sent).",
        "whole": "Put the slider on phase 4 and press the button of o: on how many ranks is it whole?",
        "different": "Look at the line that begins with: numbers that differ.",
    }
    return numbers(expected, why)


def all_exercises(plan: Plan) -> tuple[Exercise, Exercise, Exercise, Exercise, Exercise]:
    """The notebook's exercises in order: mirror, way back, shape, loop, quiz."""
    return mirror_exercise(plan), way_back_exercise(), unpack_exercise(), loop_exercise(), quiz(plan)


def error_of(work: Callable[..., Any], *arguments: Any) -> str:
    """What a call raises, and in which line of it."""
    try:
        work(*arguments)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[1]
        return f"{type(error).__name__}: {error}\n  in the line: {frame.line}"
    return "nothing was raised"


def blueprint_error() -> str:
    """What the blueprint's loop raises."""
    linecache.cache["blueprint"] = len(BLUEPRINT_LOOP), None, BLUEPRINT_LOOP.splitlines(True), "blueprint"
    names: dict[str, Any] = {}
    exec(compile(BLUEPRINT_LOOP, "blueprint", "exec"), names)
    return error_of(names["update_loop"], [{"params": []}], print)
