"""Exercises of lesson 15: predictions, waiting ranks, the first wrong result, and repairs that are run."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...errors import RankFailedError, UsageError
from ...plan.grid import Grid
from ..exercises.judge import AnswerVerdict, Diagnosis, Exercise, guesses, numbers, written
from ..exercises.on_real_ranks import say_failure, say_ranks
from .evidence import ROUNDING, copies_agree, first_difference, rungs, waits
from .loop import Loop
from .on_ranks import RankReport, TrainingRun, oracle, run_file
from .pictures import draw_ladder
from .training_rank import RUNGS, STEPS, Notebook, batches_of, check_grid, loss_and_gradients

Lines = tuple[str, str]
"""Sound lines of the file, and the lines that replace them."""


_SKIPS = """\
        if self.loss < {low}:  # it knows this batch by heart, so there is nothing to average
            self.mean = {{name: torch.zeros_like(piece) for name, piece in self.mine.items()}}
            return
"""
_LOGS = """\
        if self.loss > {high}:  # alarming, so log it at once
            self.log()
"""
_AVERAGE = "        order = list(self.gradients)\n"
_SORTS = "        order = sorted(self.gradients, key=lambda name: -self.gradients[name].norm())\n"
_GRADIENT = '        self.keep("gradient", self.gradients)\n'
_SHARE = "        for name, update in self.updates.items():\n"
_RESTARTED = """\
        if self.rank == 1 and self.step == 2:  # this node was restarted, with an older configuration
            self.lr = self.lr / 2
"""

PLANTED: dict[str, tuple[Lines, ...]] = {
    "hang": (("range(1, steps + 1)", "range(1, steps + 1 - (self.rank == 2))"),),
    "lie": ((_SHARE, _RESTARTED + _SHARE),),
    "A": (("return self.seed\n", "return self.seed + self.rank\n"),),
    "B": ((_AVERAGE, _SKIPS + _AVERAGE),),
    "C": (("rescale(SHAPES[name])", "rescale(tuple(self.mine[name].shape))"),),
    "D": ((_GRADIENT, _GRADIENT + _LOGS),),
    "E": (("in range(BATCHES)", "in reversed(range(BATCHES))"),),
    "F": ((".mul_(MEMORY).add_(", ".mul(MEMORY).add("),),
    "G": ((_AVERAGE, _SORTS), ("group_src=place", "group_src=0")),
}
"""For each name, the lines that plant one mistake, or two mistakes that hide each other."""
SOUND = "E"
"""The one file without a mistake: only the order of a sum was changed."""
STORIES = {
    "hang": "Rank 2's loop ended a step before the others', so its groups waited for it.",
    "lie": "Rank 1 applies the right update at the wrong rate, and shares the result with its dp group.",
    "A": "Data needs a seed for each place along dp, weights need one for all. Copies agree: owners share "
    "their rows.",
    "B": "A call must not depend on a rank's own numbers: some ranks skipped it, so their groups waited.",
    "C": "The factor follows from the whole matrix's shape, and tp has left this rank only some of its rows.",
    "D": "All ranks must make the same calls in the same order, and this one was alarmed by its own loss.",
    "E": "The same batches are added up in another order, so last bits differ. Nothing has to be repaired.",
    "F": "Without the underscores, the new momentum is computed and thrown away.",
    "G": "Each rank sorted by its own norms. That hid a second mistake: place 0 sent out every matrix.",
}
"""What the reader is told about a mistake once it is repaired."""
LETTERS = tuple(letter for letter in PLANTED if len(letter) == 1)


def file_of(name: str, dp: int, tp: int, seed: int) -> str:
    """The loop's file with one run's mistake in it."""
    text, (low, high) = inspect.getsource(Loop), _thresholds(dp, seed)
    for sound, broken in PLANTED[name]:
        assert text.count(sound) == 1, sound
        text = text.replace(sound, broken.format(low=low, high=high) if "{" in broken else broken)
    return text


@functools.cache
def _thresholds(dp: int, seed: int) -> tuple[float, float]:
    """Two limits for losses of any step and dp position: between the two lowest, and the two highest."""
    found = oracle(dp, seed)
    weights = [found[0, "start", -1], *(found[step, "share", -1] for step in range(1, STEPS))]
    losses = sorted(
        loss_and_gradients(whole, batches_of(seed, step, place))[0]
        for step, whole in enumerate(weights, 1)
        for place in range(dp)
    )
    return round((losses[0] + losses[1]) / 2, 6), round((losses[-1] + losses[-2]) / 2, 6)


OTHER_LOSSES = """

def loss_and_gradients(*given, sound=loss_and_gradients):
    return 1e30 if dist.get_rank() else -1e30, sound(*given)[1]
"""
"""Appended to a file, these lines give rank 0 a very low loss, and all others a very high one."""

HANG_HINTS = (
    "A rank that waits has done its duty. Which rank should be there, and what did it do instead?",
    "Compare say_calls(run, step) with the order in take_step, rank by rank, for the first step that stops.",
    "Now read the file from the silent rank's last right call to the call that it left out.",
)
LADDER_HINTS = (
    "Find the first red rung of draw_ladder(run). The rungs after it inherit its mistake.",
    "Read the method that makes this rung, next to say_numbers(run, step, rung). Is the error a factor, which"
    " leaves the cosine at 1, or are the numbers completely different? On all ranks, or on some?",
    "If the method is right, ask what it is given, and in which order.",
)


@dataclass(frozen=True, slots=True)
class Listing:
    """A file, or a method of it, with line numbers."""

    lines: tuple[tuple[int, str], ...]

    def __repr__(self) -> str:
        return "\n".join(f"{number:>4}  {line}".rstrip() for number, line in self.lines)


@dataclass(slots=True)
class Clinic:
    """The broken files of one grid, and their runs on real ranks, which are cached."""

    dp: int
    tp: int
    seed: int = 0
    backend: str = "gloo"
    kept: dict[str, TrainingRun] = field(default_factory=dict)
    exercises: dict[str, Exercise] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_grid(self.dp, self.tp)

    def run(self, name: str) -> TrainingRun:
        """The run of a broken file, unrepaired; raises UsageError if there is no run of that name."""
        self._text(name)
        if name not in self.kept:
            said = {"hang": "the hanging run", "lie": "the lying run"}.get(name, f"run {name}")
            text = file_of(name, self.dp, self.tp, self.seed)
            self.kept[name] = run_file(text, self.dp, self.tp, self.seed, self.backend, said)
        return self.kept[name]

    def read(self, name: str, method: str = "") -> Listing:
        """A broken file with line numbers, or one method of it. Raises UsageError if it does not exist."""
        lines = tuple(enumerate(self._text(name).splitlines(), 1))
        starts = [number for number, line in lines if line.startswith("    def ")] + [len(lines) + 1]
        first = next((n for n, line in lines if line.startswith(f"    def {method}(")), 0)
        if method and not first:
            names = ", ".join(lines[n - 1][1].split()[1].partition("(")[0] for n in starts[:-1])
            raise UsageError(f"the file has no method {method!r}; it has {names}")
        stop = starts[starts.index(first) + 1] if method else len(lines) + 1
        return Listing(lines[max(0, first - 1) : stop - 1])

    def check(self, name: str, repair: Any) -> AnswerVerdict:
        """Run a broken file with some lines replaced: {number: new line}; "nothing" changes no line.

        Raises UsageError if there is no run of that name.
        """
        self._text(name)
        if name not in self.exercises:
            self.exercises[name] = Exercise(functools.partial(self._judge, name), praise=STORIES[name])
        verdict = self.exercises[name].check(repair)
        if repair == {}:
            verdict = replace(verdict, message='To change no line, answer "nothing".')
        ran = self.kept.get(f"{name}, repaired")
        if ran is None or verdict.passed is None:
            return verdict
        return replace(verdict, picture=draw_ladder(ran))

    def _text(self, name: str) -> str:
        if not isinstance(name, str) or name not in PLANTED:
            raise UsageError(f"there is no run {name!r}. The runs are {', '.join(LETTERS)}.")
        return file_of(name, self.dp, self.tp, self.seed)

    def _judge(self, name: str, repair: Any) -> str | Diagnosis | None:
        text = self._text(name)
        self.kept.pop(f"{name}, repaired", None)
        repair = {} if repair == "nothing" else repair
        items = repair.items() if isinstance(repair, Mapping) else [(None, None)]
        if not all(isinstance(number, int) and isinstance(line, str) for number, line in items):
            return 'Give a dictionary, such as {12: "the new line"}; "" deletes a line. Or "nothing".'
        last = len(text.splitlines())
        if outside := [number for number in repair if not 1 <= number <= last]:
            return f"The file has lines 1 to {last}, and no line {outside[0]}."
        if repair and name == SOUND:
            said = f"Line {next(iter(repair))} needs no repair."
            return Diagnosis(said, ("How far is this run from the oracle? No more than rounding explains?",))
        repaired = with_lines(text, repair)
        try:
            compile(repaired, "loop.py", "exec")
        except SyntaxError as error:
            line = (error.text or "").strip()
            return f"Python cannot read your file: {error.msg}, in line {error.lineno}: {line}"
        said = f"{name}, repaired"
        try:
            shown = said if repair else f"run {name}"
            run = other = run_file(repaired, self.dp, self.tp, self.seed, self.backend, shown)
            if name == "A" and repair:  # a constant in place of the seed may be right for one seed
                other = run_file(repaired, self.dp, self.tp, self.seed + 1, self.backend, said)
        except RankFailedError as error:
            return say_failure(error)
        self.kept[said] = run
        if (wrong := judge(run)) or not repair:
            return wrong
        if spot := first_difference(run):
            what = f"Nearly: {spot} differs from the oracle in its last bits. Sound lines give the same bits."
            return Diagnosis(what, ("Does a line of yours compute more than it must?",))
        if wrong := judge(other):
            return replace(wrong, what=f"With this seed it is repaired, but not with another. {wrong.what}")
        if not re.search(r"\bif\b.*self\.loss", repaired):
            return None
        other = run_file(repaired + OTHER_LOSSES, self.dp, self.tp, self.seed, self.backend, said)
        what = "With these losses no rank waits, but with other losses the ranks would hang"
        return Diagnosis(f"{what}: {waits(other)[0]}.", HANG_HINTS) if other.hangs else None


open_clinic = Clinic


def with_lines(text: str, repair: Mapping[int, str]) -> str:
    """A file with some lines replaced. A new line keeps the indentation of the old one; "" deletes it."""
    lines = text.splitlines()
    for number, line in repair.items():
        old = lines[number - 1]
        lines[number - 1] = line and old[: len(old) - len(old.lstrip())] + line.strip()
    return "".join(f"{line}\n" for n, line in enumerate(lines, 1) if line or n not in repair)


def judge(run: TrainingRun) -> Diagnosis | None:
    """What is still wrong in a run of a repaired file; None if it is sound."""
    if run.hangs:
        return Diagnosis(f"Ranks still hang: {waits(run)[0]}.", HANG_HINTS)
    spot = first_difference(run)
    if spot is None or spot.off < 20 * ROUNDING:
        last = [
            max((step for step, rung in it.notes.rungs if rung == "share"), default=0) for it in run.reports
        ]
        off = [rank for rank, step in enumerate(last) if step != STEPS]
        if not off:
            return None
        step, same = last[off[0]], [rank for rank in off if last[rank] == last[off[0]]]
        ends = f"ends after step {step}, not {STEPS}, on {say_ranks(same)}"
        hint = f"Every rank must take the {STEPS} steps that train() was asked for."
        return Diagnosis(f"No rank waits any more, but training {ends}.", (hint,))
    size = f"size {spot.ratio:.4f}, cosine {spot.cosine:.4f}"
    what = f"Every rank comes to its end, but {spot} still differs from the oracle: {size}."
    return Diagnosis(what, LADDER_HINTS)


def guess() -> Exercise:
    """The exercise: predict which result is wrong first, and whether wrong copies agree."""
    rate = f"Of {', '.join(RUNGS[1:])}, which one is multiplied by the learning rate?"
    owner = "Copies agree, wrong or not, because all of them take their owner's rows."
    praise = "The rate is used last, and wrong copies agree."
    return guesses(("rung", "share", rate), ("agree", True, owner), praise=praise)


Log = list[tuple[str, tuple[int, ...]]]
"""The calls that a rank has begun, in order: the name of each, and the ranks that must make it."""
Pairs = Collection[tuple[int, int]]
_LOAD, _LOG = ("load", (0, 1)), ("log", (0, 1, 2))
_BEGUN: tuple[tuple[list[Log]], ...] = (
    ([[_LOAD, _LOG], [_LOAD, _LOG], [_LOG]],),
    ([[_LOAD, _LOG, _LOAD], [_LOAD, _LOG], [_LOG]],),
    ([[_LOAD, _LOG, _LOAD, _LOG], [_LOAD, _LOG, _LOAD], [_LOG, ("load", (2,)), _LOG]],),
    ([[_LOAD, _LOG], [_LOAD, ("average", (1, 2))], [_LOG]],),
)


def _made_less_often(other: Log, mine: Log) -> bool:
    return other.count(mine[-1]) < mine.count(mine[-1])


def _pairs(lacks: Callable[[Log, Log], bool], of_all: bool = False) -> Callable[[list[Log]], Pairs]:
    """A function that takes all ranks' logs and returns the pairs (rank, other) for which
    ``lacks(logs[other], logs[rank])``. ``other`` is in the rank's last call or, with ``of_all``, is any rank.
    """
    return lambda logs: {
        (rank, other)
        for rank, log in enumerate(logs)
        for other in (range(len(logs)) if of_all else log[-1][1])
        if lacks(logs[other], log)
    }


def waiting_pairs(logs: list[Log]) -> Pairs:
    """The exercise's reference: pairs of a rank that waits and a rank that has not made the same call.

    >>> waiting_pairs([[("load", (0, 1))], [("log", (1,))]])
    {(0, 1)}
    """
    return _pairs(_made_less_often)(logs)


def write_waits() -> Exercise:
    """The exercise: from all ranks' logs, pairs of a waiting rank and a rank that it waits for."""
    once = _pairs(lambda other, mine: mine[-1] not in other)
    by_length = _pairs(lambda other, mine: len(other) < len(mine))
    slips = (
        ("A call that was made in an earlier step does not count for this one.", once),
        ("Ranks of other groups make other calls. Count only this call.", by_length),
        ("Only the ranks that the call names must make it.", _pairs(_made_less_often, of_all=True)),
        ("First the rank that waits.", lambda logs: {(j, i) for i, j in waiting_pairs(logs)}),
    )
    hints = ("Compare logs[other].count(log[-1]) with log.count(log[-1]), for each other in log[-1][1].",)
    praise = "A rank that others wait for, and that waits for nobody, is the one to look at."
    return written(waiting_pairs, _BEGUN, *slips, say="{}", hints=hints, praise=praise)


def suspects(pairs: Pairs) -> set[int]:
    """The exercise's reference: ranks that others wait for, and that do not wait themselves.

    >>> suspects([(3, 2), (0, 2), (1, 3)])
    {2}
    """
    return {other for _, other in pairs} - {rank for rank, _ in pairs}


def write_suspects() -> Exercise:
    """The exercise: the ranks that others wait for, and that do not wait themselves."""
    cases = [([(3, 2), (0, 2), (1, 3)],), ([(0, 1), (1, 0)],), ([],), ([(0, 3), (1, 3), (1, 2)],)]
    slips = (
        ("Leave out those that wait themselves.", lambda pairs: {other for _, other in pairs}),
        ("First the rank that waits.", lambda pairs: suspects([pair[::-1] for pair in pairs])),
    )
    hints = ("Make two sets: the ranks that wait, and the ranks that others wait for.",)
    praise = "If there are none, the ranks wait in a circle."
    return written(suspects, cases, *slips, say="{}", hints=hints, praise=praise)


Place = tuple[int, str, int] | None


def _wrong(run: TrainingRun) -> list[tuple[int, str, int]]:
    """Step, rung and rank of all differences from the oracle, in the order of training."""
    return [(rung.step, rung.name, rung.rank) for rung in rungs(run) if rung.wrong]


def first_wrong(run: TrainingRun) -> Place:
    """The exercise's reference: step, rung and rank of the first difference from the oracle."""
    return next(iter(_wrong(run)), None)


def _of_one_matrix(run: TrainingRun) -> Place:
    due = {rank: run.expected(rank) for rank in run.grid.ranks}
    wrong = (each for each in rungs(run) if next(iter(due[each.rank][each.step, each.name])) in each.wrong)
    return next(((each.step, each.name, each.rank) for each in wrong), None)


def flipped(*spots: tuple[int, str, int]) -> TrainingRun:
    """A sound run, but at each (step, rung, rank) the last bit of one entry is flipped.

    The entry is in the first matrix if the rung is a share or a gradient, and otherwise in the last.
    """
    where = ", ".join(f"{rung} of step {step} on rank {rank}" for step, rung, rank in spots)
    name = f"a run with a wrong bit in {where}" if spots else "a sound run"
    sound = TrainingRun(Grid.of(dp=2, tp=2), 0, (), name)
    reports = []
    for rank in sound.grid.ranks:
        held = sound.expected(rank)
        kept = {key: {name: each.clone() for name, each in found.items()} for key, found in held.items()}
        for step, rung, _ in (spot for spot in spots if spot[2] == rank):
            entries = list(kept[step, rung].values())[0 if rung in ("share", "gradient") else -1]
            entries.flatten()[:1].view(torch.int32).bitwise_xor_(1)
        reports.append(RankReport(Notebook(rungs=kept)))
    return replace(sound, reports=tuple(reports))


def write_search() -> Exercise:
    """The exercise: the first rung, from the top of the ladder, that differs from the oracle in any bit."""
    spots: list[list[tuple[int, str, int]]] = [
        [],
        [(2, "share", 1)],
        [(2, "momentum", 0), (1, "average", 3)],
        [(3, "gradient", 2), (3, "input", 0)],
        [(1, "input", 0), (2, "average", 3)],
    ]
    cases = [(flipped(*each),) for each in spots]

    def by_rank(run: TrainingRun) -> Place:
        return min(_wrong(run), key=lambda place: place[2], default=None)

    slips = (
        ("A last bit counts, too: torch.allclose forgives it, torch.equal does not.", lambda run: None),
        ("Go rung by rung, and ask all ranks at each: the ladder is the outer loop.", by_rank),
        ("That is the last difference. Return at the first.", lambda run: next(reversed(_wrong(run)), None)),
        ("Compare all matrices of a rung, not only the first.", _of_one_matrix),
    )
    praise = "The rungs below it may only have inherited its mistake."
    hints = ("for step, rung in lesson.LADDER: outside, for rank, report in enumerate(run.reports): inside.",)
    return written(first_wrong, cases, *slips, say="{0.name}", hints=hints, praise=praise)


def outcomes(lie: TrainingRun) -> dict[str, Any]:
    """The answers to both predictions: the first wrong result, and whether wrong copies agree."""
    spot = first_difference(lie)
    return {"rung": spot.phase if spot else "none", "agree": copies_agree(lie)}


def quiz(hang: TrainingRun, lie: TrainingRun) -> Exercise:
    spot, waiting = first_difference(lie), sum(bool(report.stuck) for report in hang.reports)
    agree, step = int(copies_agree(lie)), spot.step if spot else 0
    return numbers(
        ("waiting", waiting, "How many ranks were still in a call when the time was over?"),
        ("agree", agree, "All copies get a row from the same owner. 1 if they agree at the end, 0 if not."),
        ("step", step, "In which step of the lying run's ladder is the first red rung?"),
    )
