"""Exercises of lesson 15: a prediction, six anonymous runs and a hard one, and the quiz.

A wrong answer is met by what the run's own evidence says against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import UsageError
from ..exercises.judge import Diagnosis, Exercise, numbers
from ..exercises.on_real_ranks import say_ranks
from .broken import ALL, HANGS, KINDS, PHASE_OF, Fault, guilty_lines
from .evidence import ROUNDING, FirstDifference, copies_agree, first_difference, first_missing_call, waits
from .on_ranks import LETTERS, TrainingRun, faults_of, hero_faults, run_with
from .training_rank import PHASES, RUNGS, check_grid

SPOILERS = {
    "rung": [r"\brung\W+\w*\W+share\b"],
    "agree": [r"copies agree to the last bit at the end\s+(yes|no)", r"\bagree\W+\w*\W+True\b"],
}
"""What would answer the two predictions, before the cells that are tagged answer."""

HANG_HINTS = (
    "A rank that waits has done its duty. Who should be there, and is not?",
    "Hold lesson.say_calls(run, step) against the order of the phases, rank by rank.",
    "lesson.first_missing_call(run) does that for you.",
)
LADDER_HINTS = (
    "Find the first red rung of lesson.draw_ladder(run). What comes after it has inherited its mistake.",
    "If the first rung differs on one rank, it is that rank. If on all, all run the same wrong line.",
    "lesson.first_difference(run) names the rung and the ranks.",
)
KIND_HINTS = (
    "lesson.say_numbers(run, step, rung): size 1 and cosine 1 is rounding; another size alone is a factor.",
    "For a run that hangs: what did the rank do in place of the missing call? Are its gradients None?",
)


@dataclass(slots=True)
class Clinic:
    """The anonymous runs of one grid: each runs on real ranks once, and is kept."""

    dp: int
    tp: int
    seed: int
    backend: str = "gloo"
    kept: dict[str, TrainingRun] = field(default_factory=dict)
    exercises: dict[str, Exercise] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_grid(self.dp, self.tp)

    def faults(self, letter: str) -> tuple[Fault, ...]:
        """What is wrong with a run.

        Raises:
            UsageError: there is no run of that letter.
        """
        if letter not in tuple(LETTERS):
            raise UsageError(f"there is no run {letter!r}. The runs are {', '.join(LETTERS)}.")
        return faults_of(letter, self.dp, self.tp, self.seed)

    def run(self, letter: str, repaired: Sequence[str] = ()) -> TrainingRun:
        """An anonymous run on real ranks; with ``repaired``, without mistakes of these kinds.

        Raises:
            UsageError: there is no run of that letter; or a kind in ``repaired`` is not in this run, so that
                nothing would be repaired.
        """
        faults = self.faults(letter)
        repaired = [repaired] if isinstance(repaired, str) else repaired
        for kind in repaired:
            if kind not in LETTERS[letter]:
                kinds = ", ".join(repr(each) for each in KINDS)
                raise UsageError(f"run {letter} has no {kind!r} to repair. The kinds are {kinds}.")
        left = [fault for fault in faults if fault.kind not in repaired]
        name = f"run {letter}"
        run = run_with(*left, dp=self.dp, tp=self.tp, seed=self.seed, backend=self.backend, name=name)
        if not repaired:
            self.kept[letter] = run
        return run

    def check(self, letter: str, answer: Any) -> Any:
        """Judge what was found of a run: (rank, phase, kind), a list of two for the hard one.

        Raises:
            UsageError: there is no run of that letter.
        """
        faults = self.faults(letter)
        if letter not in self.exercises:
            judge = self._judge_two if len(faults) > 1 else self._judge_one
            self.exercises[letter] = Exercise(lambda given: judge(letter, given))
        exercise = self.exercises[letter]
        verdict = exercise.check(answer)
        exercise.praise = ""
        return verdict if not verdict.passed else Solved(tuple(fault.kind for fault in faults))

    def _judge_one(self, letter: str, answer: Any) -> str | Diagnosis | None:
        run = self.kept.get(letter) or self.run(letter)
        return judge(run, self.faults(letter)[0], answer)

    def _judge_two(self, letter: str, answer: Any) -> str | Diagnosis | None:
        if not isinstance(answer, (list, tuple)) or len(answer) != 2 or not all(map(_is_triple, answer)):
            return "Give a list of two findings, each (rank, phase, kind)."
        for fault in self.faults(letter):
            found = [each for each in answer if each[2] == fault.kind]
            if not found:
                known = next((each[2] for each in answer if each[2] in LETTERS[letter]), None)
                if known is None:
                    run = self.kept.get(letter) or self.run(letter)
                    return judge(run, self.faults(letter)[0], answer[0])
                hint = f"clinic.run({letter!r}, repaired=[{known!r}]) shows what is left."
                return Diagnosis(f"{known!r} is there. The other is not {_others(answer, known)!r}.", (hint,))
            wrong = judge(self._alone(letter, fault), fault, found[0])
            if isinstance(wrong, Diagnosis):
                return replace(wrong, what=f"In a run with {fault.kind!r} alone: {wrong.what}")
            if wrong:
                return wrong
        return None

    def _alone(self, letter: str, fault: Fault) -> TrainingRun:
        """The run in which all other mistakes are repaired; run once, and kept."""
        name = f"{letter}, {fault.kind}"
        if name not in self.kept:
            self.kept[name] = self.run(letter, [kind for kind in LETTERS[letter] if kind != fault.kind])
        return self.kept[name]


def _others(answer: Sequence[Any], known: str) -> str:
    return next((each[2] for each in answer if each[2] != known), known)


@dataclass(frozen=True, slots=True)
class Solved:
    """A run that was found out: the lines in which the mistakes stand."""

    kinds: tuple[str, ...]

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Right. " + "\n\n".join(guilty_lines(kind) for kind in self.kinds)


def open_clinic(dp: int, tp: int, seed: int = 0, backend: str = "gloo") -> Clinic:
    """The anonymous runs A to G of a grid."""
    return Clinic(dp, tp, seed, backend)


def _is_triple(answer: Any) -> bool:
    return isinstance(answer, (list, tuple)) and len(answer) == 3


def judge(run: TrainingRun, fault: Fault, answer: Any) -> str | Diagnosis | None:
    """What a run's evidence says against an answer (rank or "all", phase, kind); None where it is right."""
    if not _is_triple(answer):
        return 'Give (rank, phase, kind), such as (1, "share", "another learning rate").'
    who, phase, kind = answer
    if who != "all" and who not in run.grid.ranks:
        return f'The rank is a number below {run.grid.world_size}, or "all"; {who!r} is neither.'
    if phase not in PHASES:
        return f"{phase!r} is no phase. They are {', '.join(PHASES)}."
    if kind not in tuple(KINDS):
        return f"{kind!r} is no kind. They are {', '.join(KINDS)}."
    said = _against_kind_of_end(run, kind)
    said = said or _against_who(run, fault, who)
    said = said or _against_phase(run, fault, phase)
    return said or _against_kind(run, fault, kind)


def _against_kind_of_end(run: TrainingRun, kind: str) -> Diagnosis | None:
    if run.hangs and kind not in HANGS:
        return Diagnosis(
            f"{kind!r} changes numbers, and every call is still made. These ranks stand still.", HANG_HINTS
        )
    if not run.hangs and kind in HANGS:
        return Diagnosis(f"{kind!r} leaves somebody waiting. Here every rank made every call.", LADDER_HINTS)
    return None


def _against_who(run: TrainingRun, fault: Fault, who: Any) -> Diagnosis | None:
    right = "all" if fault.rank == ALL else fault.rank
    if who == right:
        return None
    if run.hangs and who == "all":
        return Diagnosis("Not all: only one rank left out a call that was due.", HANG_HINTS)
    if run.hangs:
        own = next((wait for wait in waits(run) if wait.waiter == who), None)
        waiting = (
            f"Rank {who} waits in {own.phase} of step {own.step}, for rank {own.awaited}" if own else "No"
        )
        return Diagnosis(f"{waiting}, and up to there it has made every call that was due.", HANG_HINTS)
    spot = first_difference(run)
    if not spot or who == "all":
        return Diagnosis(
            "Not all: at the first rung that differs, some have the oracle's bits.", LADDER_HINTS
        )
    if who in spot.ranks:
        hint = f"What did each of them pack? lesson.say_packed(run, {spot.step}, {spot.phase!r})"
        what = f"At the first rung that differs, rank {who} is wrong, but not alone."
        return Diagnosis(what, (hint,) if right != "all" else LADDER_HINTS[1:])
    return Diagnosis(f"At the first rung that differs, rank {who} has the oracle's bits.", LADDER_HINTS)


def _rung(spot: FirstDifference) -> str:
    return f"{spot.phase} of step {spot.step}"


def _against_phase(run: TrainingRun, fault: Fault, phase: str) -> Diagnosis | None:
    if phase in PHASE_OF[fault.kind]:
        return None
    if run.hangs:
        what = f"It is rank {fault.rank}. But {phase} is not the first call that it has left out of its turn."
        return Diagnosis(what, HANG_HINTS[1:])
    spot = first_difference(run)
    assert spot
    if PHASES.index(phase) > PHASES.index(spot.phase):
        return Diagnosis(f"Before {phase}, the numbers are wrong already.", LADDER_HINTS)
    return Diagnosis(f"After {phase}, all is as the oracle has it.", LADDER_HINTS)


def _against_kind(run: TrainingRun, fault: Fault, kind: str) -> Diagnosis | None:
    if kind == fault.kind:
        return None
    if run.hangs:
        return Diagnosis(_not_this_hang(run, fault, kind), KIND_HINTS[1:])
    spot = first_difference(run)
    assert spot
    return Diagnosis(_excluded(spot, kind), KIND_HINTS[:1])


def _not_this_hang(run: TrainingRun, fault: Fault, kind: str) -> str:
    call = first_missing_call(run)
    instead = call.instead if call else "nothing"
    if kind == "leaves early":
        return f"A rank that leaves early has returned. Rank {fault.rank} went on, to {instead}."
    if kind == "skipped call":
        return f"A rank that skips a call goes on to the next of the program. This one went to {instead}."
    return f"A rank with another order jumps ahead. This one went to {instead}, which simply comes next."


_EXCLUDED = {
    "another seed": "Another seed shows before step 1, in start. Here start is the oracle's; {rung} is not.",
    "not averaged": "Without averaging, average differs on all ranks. Here the first is {rung}, on {who}.",
    "stale momentum": "Stale momentum leaves the rungs before momentum alone. Here {rung} differs first.",
    "order of parameters": "Another order shows where gradients are packed: average. Here {rung} is first.",
    "shard's shape": "A factor changes the size of update, with cosine 1. Here {rung} has {ratio}, {cosine}.",
    "another learning rate": "Another rate shows in share, after a right update. Here {rung} differs first.",
    "no bug": "Rounding leaves differences near {rounding}. Here it is {off} of the largest number.",
}
"""What is said against a kind of lie, filled with what the run shows."""


def _excluded(spot: FirstDifference, kind: str) -> str:
    who = "all ranks" if spot.who == "all" else say_ranks(spot.ranks)
    numbers = {
        "ratio": f"size {spot.ratio:.4f}",
        "cosine": f"cosine {spot.cosine:.4f}",
        "off": f"{spot.off:.0e}",
    }
    return _EXCLUDED[kind].format(rung=_rung(spot), who=who, rounding=f"{ROUNDING:.0e}", **numbers)


def guess() -> Exercise:
    """The two predictions: which result is wrong first, and whether wrong copies agree."""

    def judge_guess(rung: object, agree: object) -> str | None:
        if rung not in RUNGS[1:]:
            return f"rung: give one of {', '.join(RUNGS[1:])}."
        if rung != "share":
            return f"rung: {rung} does not use the learning rate. Which phase multiplies with it?"
        if agree is not True:
            return (
                "agree: each matrix has one owner, and all copies take its rows. So they agree, wrong or not."
            )
        return None

    return Exercise(judge_guess, praise="The rate is used last, and wrong copies agree.")


def worked_hang(dp: int, tp: int, seed: int = 0, backend: str = "gloo") -> TrainingRun:
    """The run of the first picture, on your machine."""
    return run_with(*hero_faults(), dp=dp, tp=tp, seed=seed, backend=backend, name="the hanging run")


def worked_lie(dp: int, tp: int, seed: int = 0, backend: str = "gloo") -> TrainingRun:
    """A run with another learning rate on rank 1, from step 2 on."""
    fault = Fault("another learning rate", 1, 2)
    return run_with(fault, dp=dp, tp=tp, seed=seed, backend=backend, name="the lying run")


def quiz(hang: TrainingRun, lie: TrainingRun) -> Exercise:
    """Three numbers that the notebook has measured."""
    spot = first_difference(lie)
    assert spot
    return numbers(
        (
            "waiting",
            len({wait.waiter for wait in waits(hang)}),
            "Count who waits: len({wait.waiter for wait in lesson.waits(hang)}).",
        ),
        (
            "agree",
            int(copies_agree(lie)),
            "1 if the copies of the lying run agree: lesson.copies_agree(lie).",
        ),
        ("step", spot.step, "Ask lesson.first_difference(lie).step."),
    )
