"""Exercises of lesson 14: an unseen grid, owners by work, a 70B within limits, your own model, and a quiz."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ...errors import TutorialError
from ...timing.report import say_bytes, say_seconds
from ..exercises.judge import Diagnosis, Exercise, MistakeError, OpenAnswerError, Par, numbers, value_of
from . import pictures
from .balance import Assign, OwnedModel, assign, owned_models
from .own_model import (
    LEAST_ENTRIES,
    LEAST_RANKS,
    MOST_OVER,
    MOST_SHARES,
    MY_GRID,
    MY_MODEL,
    OwnModel,
    OwnPlan,
    plan_mine,
)
from .scaling import RANKS, UNSEEN, gradient_wire, on_grid, step_at, steps

SPOILERS = {
    "idle": [r"idle\s+–\s+288"],
    "shrinks": [r"shrinks\s+–\s+1(?!\d)"],
    "slower": [r"slower\s+–\s+True"],
    "sooner": [r"sooner\s+–\s+neither"],
}
"""What would answer each prediction of the notebook."""

ROOM, TIME, STAGES, MOST_GPUS = 20e9, 0.5, 8, 512
"""The limits of the plan for 70B: bytes a rank, seconds a step, pipeline stages, and GPUs."""
PAR_GRID = (9, 4, 8)
"""dp, tp and pp of the smallest grid within the limits."""


def unseen() -> dict[str, Any]:
    """What the planner says of the model that was not shown: the answers of the first prediction."""
    fewer, more, most = (step_at(UNSEEN, ranks) for ranks in (2048, 4096, RANKS[-1]))
    return {
        "idle": more.idle_owners,
        "shrinks": round(fewer.busiest / more.busiest, 2),
        "slower": most.seconds() > more.seconds(),
    }


def unseen_exercise() -> Exercise:
    """The prediction of a grid that no picture has shown."""
    right = unseen()
    why = {
        "idle": "A matrix has one owner. How many owners are there, and how many matrices?",
        "shrinks": "With an owner for each matrix, who is the busiest, and has it less to do than before?",
        "slower": "Newton–Schulz stays, and so do the bytes a rank sends. What grows with the ranks?",
    }

    def judge(*said: Any) -> str | None:
        wrong = [
            f"{name}: not {mine}. {why[name]}"
            for name, mine in zip(right, said, strict=True)
            if not _agrees(mine, right[name])
        ]
        return " ".join(wrong) or None

    return Exercise(judge, (), "From here on, each new owner stands idle.")


def _agrees(mine: Any, right: Any) -> bool:
    if isinstance(right, bool):
        return mine is right
    try:
        return math.isclose(mine, right, rel_tol=0.01)
    except TypeError:
        return False


def wires() -> str:
    """Which grid's gradients are reduced sooner: the answer of the second prediction."""
    alone, with_tp = (gradient_wire(UNSEEN, 64, tp)[2] for tp in (1, 8))
    if math.isclose(alone, with_tp, rel_tol=0.01):
        return "neither"
    return "tp=1" if alone < with_tp else "tp=8"


def wires_exercise() -> Exercise:
    """The prediction of what becomes of a ring that leaves its node."""

    def judge(sooner: str) -> str | None:
        if sooner not in ("tp=1", "tp=8", "neither"):
            return 'Say "tp=1", "tp=8" or "neither".'
        if sooner == wires():
            return None
        if sooner == "tp=8":
            return "An eighth of the bytes, yes. But how many network cards does each ring have now?"
        return "Eight cards for one ring, yes. But how many bytes does each rank send now?"

    return Exercise(judge, (), "Eight rings share the cards that one had, and the bytes, too.")


def balance_exercise() -> Exercise:
    """Owners by work, judged by the imbalance of plans that have them."""
    models = owned_models()

    def judge(answer: Assign) -> Diagnosis | None:
        return next((wrong for model in models if (wrong := _judge_owners(answer, model))), None)

    def count(answer: Assign) -> float:
        owners = [(model, list(answer(list(model.shapes), model.owners))) for model in models]
        return round(100 * sum(model.plan_work(chosen)[1] - 1 for model, chosen in owners))

    praise = "On all three models the busiest owner has little more than its share."
    return Exercise(judge, (), praise, Par("percent above fair shares", count(assign), count))


def _judge_owners(answer: Assign, model: OwnedModel) -> Diagnosis | None:
    came = value_of(answer, list(model.shapes), model.owners)
    where = f"For {model.name} and {model.owners} owners"
    if isinstance(came, str) or not isinstance(came, Sequence) or len(came) != len(model.shapes):
        return Diagnosis(f"{where}: give a list of {len(model.shapes)} owners, one for each matrix.")
    if any(place is ... for place in came):
        raise OpenAnswerError
    strange = next((place for place in came if place not in range(model.owners)), None)
    if strange is not None:
        return Diagnosis(f"{where}: {strange!r} is not one of 0 to {model.owners - 1}.")
    mine, best = (model.plan_work(list(each))[1] for each in (came, assign(model.shapes, model.owners)))
    if mine <= 1.1 * best:
        return None
    return _unbalanced(model, list(came), f"{where}, the busiest has {mine:.2f} fair shares")


def _unbalanced(model: OwnedModel, came: list[int], said: str) -> Diagnosis:
    """Whoever balanced entries is told so; others, where to begin."""
    held = model.entries(came)
    drawn = pictures.draw_balance(model, came)
    if max(held) * model.owners <= 1.1 * sum(held):
        what = (
            f"{said}. Their entries are even: {max(held) * model.owners / sum(held):.2f}. Their work is not."
        )
        hints = (
            "What does Newton–Schulz cost? For s × l entries with s ≤ l, 4 s² l + 2 s³ an iteration.",
            "Keep your loop, and weigh each matrix by that in place of rows times columns.",
        )
        return Diagnosis(what, hints, drawn)
    hints = (
        "Lesson 04: the costliest first, each to whoever has least so far.",
        "The cost of s × l entries with s ≤ l is 4 s² l + 2 s³.",
    )
    return Diagnosis(f"{said}.", hints, drawn)


def limits_exercise() -> Exercise:
    """A grid for 70B within limits of memory, seconds and stages, judged by the GPUs that it takes."""

    def judge(grid: Mapping[str, Any]) -> Diagnosis | None:
        dp, tp, pp = _read_grid(grid)
        try:
            [one] = on_grid(dp, tp, pp).estimates
        except TutorialError as error:
            raise MistakeError(f"The planner says: {error}.") from None
        if pp > STAGES or tp > 8:
            return Diagnosis(f"At most {STAGES} stages, and at most tp=8: a node has eight GPUs.")
        if one.memory > ROOM:
            said = f"{say_bytes(one.memory)} a rank; {say_bytes(ROOM)} are allowed."
            return Diagnosis(said, _MEMORY_HINTS)
        if one.seconds > TIME:
            parts = f"computes {say_seconds(one.product + one.copy)}, waits {say_seconds(one.waiting)}"
            return Diagnosis(f"{say_seconds(one.seconds)} a step: it {parts}.", _TIME_HINTS)
        if (gpus := dp * tp * pp) > MOST_GPUS:
            return Diagnosis(f"All limits are kept, with {gpus:,} GPUs. Do it with {MOST_GPUS}.", _GPU_HINTS)
        return None

    def count(grid: Mapping[str, int]) -> float:
        return math.prod(_read_grid(grid))

    return Exercise(
        judge, (), "Memory, seconds and stages are kept.", Par("GPUs", math.prod(PAR_GRID), count)
    )


_MEMORY_HINTS = (
    "tp and pp cut weights and gradients. dp cuts momentum alone.",
    "tp × pp = 32 leaves each rank a thirty-second of the weights.",
)
_TIME_HINTS = (
    "If it computes longest, give it more owners: dp. If it waits longest, give it fewer bytes: tp × pp.",
    "All tp ranks of an owner repeat its Newton–Schulz. What pp cuts, nobody repeats.",
)
_GPU_HINTS = ("dp need not be a power of two. Lower it until a limit says no.",)


def _read_grid(grid: Any) -> tuple[int, int, int]:
    if not isinstance(grid, Mapping) or set(grid) != {"dp", "tp", "pp"}:
        raise MistakeError('Give a dictionary with "dp", "tp" and "pp".')
    sizes = tuple(grid[axis] for axis in ("dp", "tp", "pp"))
    if any(size is ... for size in sizes):
        raise MistakeError("One of the sizes is still open.")
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise MistakeError(f"Sizes are whole numbers, at least 1; got {sizes}.")
    return sizes


def own_model_exercise() -> Exercise:
    """The reader's own model and grid, judged by the owners' balance and by the step beside AdamW's."""

    def judge(model: OwnModel, grid: str) -> Diagnosis | None:
        found = _planned(model, grid)
        shape = found.plan.shape
        if shape.hidden < LEAST_ENTRIES:
            return Diagnosis(f"{shape.hidden:,} entries in matrices; {LEAST_ENTRIES:,} are asked for.")
        if found.plan.ranks < LEAST_RANKS:
            return Diagnosis(f"{found.plan.ranks:,} ranks; {LEAST_RANKS:,} are asked for.")
        if found.shares > MOST_SHARES:
            said = f"The busiest owner has {found.shares:.2f} fair shares; {MOST_SHARES} are allowed."
            return Diagnosis(said, _OWNER_HINTS)
        if found.over_adamw > MOST_OVER:
            said = f"A step takes {found.over_adamw:.2f} times AdamW's; {MOST_OVER:g} are allowed."
            return Diagnosis(said, _SMALL_HINTS)
        return None

    def count(model: OwnModel, grid: str) -> float:
        return round(100 * plan_mine(model, grid).over_adamw)

    praise = "All owners have something to do, and all links, too."
    return Exercise(judge, (), praise, Par("percent of AdamW's step", _own_par(), count))


_OWNER_HINTS = (
    "Each place along dp wants a matrix. How many has your model, and how many places has your grid?",
    "Depth makes more matrices of the same size. Width makes the largest one larger.",
)
_SMALL_HINTS = (
    "Small matrices are many messages and many launches, and little work in each.",
    "Make it wider, and keep the layers: owners stay busy, and bytes outweigh latency.",
)


@cache
def _own_par() -> float:
    return round(100 * plan_mine(MY_MODEL, MY_GRID).over_adamw)


def _planned(model: OwnModel, grid: str) -> OwnPlan:
    if isinstance(model, Mapping) and ... in model.values():
        raise OpenAnswerError
    if not isinstance(grid, str):
        raise MistakeError('Give the grid as a text, such as "dp=128,tp=8".')
    try:
        return plan_mine(model, grid)
    except TutorialError as error:
        raise MistakeError(f"The planner says: {error}.") from None
    except Exception as error:
        raise MistakeError(f"Your function raised {type(error).__name__}: {error}.") from None


def quiz() -> Exercise:
    """Numbers that the notebook has predicted."""
    found = steps()
    expected = {
        "idle": found[-1].idle_owners,
        "floor": 1000 * found[-1].floor,
        "latency": found[-1].latency / found[0].latency,
    }
    why = {
        "idle": "Ask lesson.steps()[-1].idle_owners.",
        "floor": "In milliseconds: 1000 * lesson.steps()[-1].floor.",
        "latency": "Divide the last step's latency by the first one's.",
    }
    return numbers(expected, why, within=0.02)


def all_exercises() -> tuple[Exercise, ...]:
    """The notebook's exercises in order: unseen, balance, wires, limits, own model, quiz."""
    return (
        unseen_exercise(),
        balance_exercise(),
        wires_exercise(),
        limits_exercise(),
        own_model_exercise(),
        quiz(),
    )


__all__ = [
    "SPOILERS",
    "all_exercises",
    "balance_exercise",
    "limits_exercise",
    "own_model_exercise",
    "quiz",
    "unseen",
    "unseen_exercise",
    "wires",
    "wires_exercise",
]
