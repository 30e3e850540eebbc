"""What notebook 04 imports: the first distributed Muon on real ranks, its exercises, and what it costs.

The early algorithm is told again in ``sharing`` and drawn in ``buffers``; bytes, time and the bits at the end
are those of the package's own ``Muon(strategy="round_robin")``. Work is counted in floating-point operations
of Newton–Schulz, on the matrices of a GPT of the size of GPT-2's smallest.
"""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, SupportsFloat, SupportsIndex

import torch
from matplotlib.axes import Axes

from ... import Grid, Ledger, LiveWorld, Matrix, Muon, Plan, build_mesh, owner, round_robin
from ...errors import MismatchError, RankFailedError
from ...evidence.formulas import ddp_adamw
from ...evidence.ledger import Row
from ...newton_schulz import DEFAULT_STEPS
from ...plan.assign import newton_schulz_cost
from ...plan.strategies import plan_imbalance
from ..checks.exercise import Exercise, MistakeError, OpenAnswerError, numbers
from ..inputs import measure
from ..lesson03 import fastest, say_failure
from ..pictures.picture import INK, QUIET, Picture, finish
from ..pictures.spectra import BLUE, card, style
from ..widgets.shell import Shell, choice, show, slider
from .buffers import MOMENTS, draw_moment, draw_run
from .misplaced import early_starts, early_wrong, explain, reaches_into
from .sharing import (
    LENGTH,
    PATIENCE,
    PLACES,
    SHAPES,
    Lacking,
    Run,
    Share,
    gpt_shapes,
    owner_lacks,
    parameters,
    place_of,
    run_cases,
    share,
)

__all__ = ["SHAPES", "draw_run", "parameters", "share"]

LACKING = "k1"
LARGE = gpt_shapes(12, 768)
TIMED = gpt_shapes(2, 384)
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 64, 128)
MOST = 16
WORST = 6
Way = Literal["by index", "longest first"]
WAYS: tuple[Way, Way] = ("by index", "longest first")
BACKS: tuple[Literal["all_reduce", "all_gather"], ...] = ("all_reduce", "all_gather")


def say_axes(dp: int, tp: int) -> str:
    """One line on what the lesson makes of its grid."""
    unused = "" if tp == 1 else f" tp = {tp} is not used here; it enters with lesson 06."
    return f"One axis, dp = {dp}: every rank has all matrices, and the same averaged gradients.{unused}"


def run_share(function: Share, ranks: int, backend: str = "gloo", seed: int = 0, *, lacking: str = "") -> Run:
    """Play ``function(parameters, rank, ranks)`` on real ranks; the reference, where it is a stub or fails.

    ``lacking`` names a matrix whose gradient is missing, on its owner. Says so if it takes the reference.
    """
    cases = [owner_lacks(lacking, ranks) if lacking else ()]
    try:
        [run] = run_cases(function, ranks, cases, backend=backend, seed=seed)
        trouble = "No answer yet" if run.is_open else ""
    except RankFailedError as error:
        trouble = f"{_say_trouble(error).rstrip('.')}. Your function left no buffers to show"
    if trouble:
        print(textwrap.fill(f"{trouble}: this is the reference.", 100))
        [run] = run_cases(share, ranks, cases, backend=backend, seed=seed)
    return run


def explore(run: Run, live: bool = True) -> Shell | Picture:
    """Buttons for the moment of the step and for the rank, over the flat buffers of a run."""
    ranks = {f"rank {rank}": rank for rank in range(run.ranks)}
    moment = choice("moment", MOMENTS)
    moment.style.button_width = "120px"
    return show(
        partial(draw_moment, run),
        draw_run(run, "lesson04-first"),
        live,
        moment=moment,
        rank=choice("rank", ranks),
    )


def say_outcome(run: Run) -> str:
    """What a test would see of a run, and what it would not."""
    rights = [place.name for place in PLACES if place.name not in run.wrong()]
    same = "yes" if run.agree() else "no"
    return (
        f"ranks that returned without an error   {run.ranks}\n"
        f"all of them ended with the same bits   {same}\n"
        f"answers as one process finds them      {len(rights)} of {len(PLACES)}"
    )


def guess(ranks: int) -> Exercise:
    """The prediction: with one more rank, who owns the last matrix, and what part of all buffers is zero?"""
    more = ranks + 1
    right = PLACES[-1].owner(more)

    def judge(owner_of_last: SupportsIndex, zeros: SupportsFloat) -> str | None:
        try:
            said, part = operator.index(owner_of_last), float(zeros)
        except (TypeError, ValueError):
            return "Give a rank, and a number between 0 and 1."
        if said != right:
            return f"owner_of_last: {_why_not_owner(said, ranks)}"
        if not abs(part - ranks / more) <= 0.005:
            return f"zeros: {_why_not_zeros(part, ranks)}"
        return None

    hints = (
        "The last matrix has number 11. Deal out 0, 1, 2 … in turn.",
        "Every place is filled on one rank, and zero on all others.",
    )
    return Exercise(judge, hints, "Each place is filled once. On all other ranks it is zero.")


def _why_not_owner(said: int, ranks: int) -> str:
    if not 0 <= said <= ranks:
        return f"there is no rank {said}; with one more, ranks go from 0 to {ranks}."
    if said == PLACES[-1].owner(ranks):
        return f"{said} owns it as long as nobody joins."
    if said == len(PLACES) % (ranks + 1):
        return f"numbers begin at 0, so the last of {len(PLACES)} matrices has number {len(PLACES) - 1}."
    return f"matrix i belongs to rank i modulo {ranks + 1}; {said} is not that of matrix {len(PLACES) - 1}."


def _why_not_zeros(said: float, ranks: int) -> str:
    if not 0 <= said <= 1:
        return f"{said:g} is no part of a whole: give a number between 0 and 1."
    if abs(said - 1 / (ranks + 1)) < 0.005:
        return f"{said:g} is the part that is filled."
    if abs(said - (ranks - 1) / ranks) < 0.005:
        return f"{said:g} it is as long as nobody joins."
    return f"{said:g} is not it. Look at one place: on how many ranks is it filled, and on how many zero?"


def predict(ranks: int) -> Exercise:
    """The prediction: which matrices come out wrong if a missing gradient does not move the offset?"""
    lacking = owner_lacks(LACKING, ranks)
    right = early_wrong(ranks, lacking)

    def judge(answer: object) -> str | None:
        said = _read_names(answer)
        if said is None:
            return 'Give a list of names, such as ["q1", "v2"].'
        if extra := [name for name in said if name not in right]:
            return f"{extra[0]} comes out as it should. {_why_right(extra[0])}"
        if missing := [name for name in right if name not in said]:
            return f"{missing[0]} comes out wrong, too. {_why_wrong(missing[0], ranks, lacking)}"
        return None

    hints = (
        "From k1 on, where does its owner believe to be in the buffer? Too early, by the numbers of k1.",
        "Two kinds are wrong: what its owner puts elsewhere, and what it is put upon.",
    )
    return Exercise(judge, hints, "What is put elsewhere is wrong, and so is what it is put upon.")


def _read_names(answer: object) -> list[str] | None:
    """Names of matrices as a list; None where it is something else."""
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        return None
    names = list(answer)
    return names if all(isinstance(name, str) and name in SHAPES for name in names) else None


def _why_right(name: str) -> str:
    if name == LACKING:
        return "Nobody has an answer for it, so its place stays zero, and nobody changes it."
    return "Its owner puts it in its place, and nobody else writes there."


def _why_wrong(name: str, ranks: int, lacking: Lacking) -> str:
    starts, place = early_starts(ranks, lacking), place_of(name)
    mine = starts.get((place.owner(ranks), name))
    if mine is not None and mine != place.start:
        return f"Rank {place.owner(ranks)} puts its answer at {mine:,}; its place begins at {place.start:,}."
    rank, other, start = next(
        (rank, other, start)
        for (rank, other), start in starts.items()
        if reaches_into(other, start, place) and other != name
    )
    return f"Rank {rank} puts its answer for {other} at {start:,}, and that reaches into it."


def check_share(ranks: int, backend: str = "gloo", seed: int = 0, timeout: float = PATIENCE) -> Exercise:
    """The exercise: every answer in its place, whatever gradient is missing wherever, on real ranks."""
    cases = [
        (),
        owner_lacks(LACKING, ranks),
        tuple((rank, "up1") for rank in range(ranks)),
        owner_lacks("q1", ranks) + owner_lacks("o2", ranks),
    ]

    def judge(function: Share) -> str | None:
        try:
            runs = run_cases(function, ranks, cases, backend=backend, seed=seed, timeout=timeout)
        except RankFailedError as error:
            raise MistakeError(_say_trouble(error)) from None
        if all(run.is_open for run in runs):
            raise OpenAnswerError
        return next(filter(None, map(explain, runs)), None)

    hints = (
        "The offset must say the same on all ranks. What may it depend on?",
        "`continue` skips the rest of the loop, and the last line of the loop moves the offset.",
        "Fill a place only if it is yours and there is a gradient. Move the offset in any case.",
    )
    return Exercise(judge, hints, "Whatever is missing, every other answer is in its place, on every rank.")


def _say_trouble(error: RankFailedError) -> str:
    """A run that did not end: what the ranks did differently, or the first failure."""
    if isinstance(error.original, MismatchError):
        said = str(error.original)
        return said[0].upper() + said[1:]
    lines = say_failure(error).partition("The other ranks:")[0].splitlines()
    return "A run failed: " + " ".join(line.strip() for line in lines[1:])


def named_parameters(seed: int, lacking: Sequence[str] = ()) -> list[tuple[str, torch.nn.Parameter]]:
    """The matrices with their names, as an optimizer takes them."""
    return list(zip(SHAPES, parameters(seed, lacking), strict=True))


def say_refusal(error: RankFailedError) -> str:
    """What the package said on every rank, in words."""
    return textwrap.fill(f"{type(error.original).__name__}: {error.original}", 100)


def costs_of(shapes: Iterable[tuple[int, int]]) -> list[int]:
    """Floating-point operations of Newton–Schulz, all its iterations, for each matrix."""
    return [DEFAULT_STEPS * newton_schulz_cost(shape) for shape in shapes]


def plan_of(ranks: int, way: Way) -> Plan:
    """The package's plan for the large model: round robin, or its owners chosen with the costliest first."""
    matrices = [Matrix(number, name, shape) for number, (name, shape) in enumerate(LARGE.items())]
    if way == "by index":
        return round_robin(matrices, Grid.of(dp=ranks))
    one_bucket = sum(matrix.numel for matrix in matrices) * matrices[0].grad_dtype.itemsize
    return owner(matrices, Grid.of(dp=ranks), bucket_bytes=one_bucket)


def fair_shares(ranks: int, way: Way = "by index") -> float:
    """The makespan for the large model, in fair shares: 1 is perfect."""
    return plan_imbalance(plan_of(ranks, way))


def say_makespans() -> str:
    """The makespan by number of ranks: dealt out in turn, and the costliest first."""
    fair = sum(costs_of(LARGE.values())) / 1e9
    lines = ["ranks   a fair share   by index           longest first"]
    for ranks in RANKS:
        shares = [fair_shares(ranks, way) for way in WAYS]
        said = "   ".join(f"{share * fair / ranks:6.0f} ({share:.2f})" for share in shares)
        lines.append(f"{ranks:5}   {fair / ranks:12.0f}   {said}")
    return "\n".join([*lines, "(GFLOP of the busiest rank; in brackets: over a fair share)"])


def draw_loads(ranks: int) -> Picture:
    """The work of each rank: matrices dealt out by index, and the costliest first."""
    costs = costs_of(LARGE.values())
    figure, said = card(900, 150 + 14 * ranks), []
    fair = sum(costs) / ranks / 1e9
    for number, way in enumerate(WAYS):
        plan = plan_of(ranks, way)
        owners = [plan.workers(index)[0] for index in range(len(costs))]
        loads = [load / 1e9 for load in _loads(costs, owners, ranks)]
        title = f"{way}: the busiest has {max(loads) / fair:.2f} fair shares"
        axes = style(figure.add_subplot(1, 2, number + 1), title, "GFLOP of Newton–Schulz", "rank")
        _stack(axes, costs, owners, ranks)
        axes.axvline(fair, color=INK, linewidth=1.4, linestyle="--")
        axes.set_xlim(0, fair_shares(ranks) * fair * 1.05)
        said.append(f"{title}; by rank {', '.join(f'{load:.0f}' for load in loads)} GFLOP.")
    figure.text(0.5, 0.02, "light: 768 × 768 · dark: 768 × 3072 · dashed: a fair share",
                size=8.5, ha="center", color=QUIET)  # fmt: skip
    figure.tight_layout(rect=(0, 24 / (150 + 14 * ranks), 1, 1))
    return finish(figure, f"lesson04-loads-{ranks}", f"{ranks} ranks. {' '.join(said)}")


def _loads(costs: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    pairs = list(zip(costs, owners, strict=True))
    return [sum(cost for cost, place in pairs if place == rank) for rank in range(ranks)]


def _stack(axes: Axes, costs: Sequence[int], owners: Sequence[int], ranks: int) -> None:
    """One bar a rank, one piece a matrix, the costliest to the left."""
    cheap = min(costs)
    for rank in range(ranks):
        mine = sorted((cost for cost, at in zip(costs, owners, strict=True) if at == rank), reverse=True)
        spans = [(sum(mine[:number]) / 1e9, cost / 1e9) for number, cost in enumerate(mine)]
        colours = ["#a8cdea" if cost == cheap else BLUE for cost in mine]
        axes.broken_barh(spans, (rank - 0.4, 0.8), facecolors=colours, edgecolors="#ffffff", linewidth=0.5)
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_yticks(range(ranks))


def explore_loads(live: bool = True) -> Shell | Picture:
    """A slider over the number of ranks, over the work of each."""
    ranks = slider("ranks", first=1, last=MOST, start=WORST)
    return show(draw_loads, draw_loads(WORST), live, ranks=ranks)


def count_bytes(rank: int, ranks: int, seed: int) -> list[Row]:
    """What one step's answers cost a rank, for either way of sharing them. Must be called by all ranks."""
    world = LiveWorld(build_mesh({"dp": ranks}))
    return [_count_bytes(world, back, seed) for back in BACKS]


def _count_bytes(world: LiveWorld, back: Literal["all_reduce", "all_gather"], seed: int) -> Row:
    ledger = Ledger()
    muon = Muon(named_parameters(seed), strategy=partial(round_robin, back=back), mesh=world)
    world.observers.append(ledger)
    muon.step()
    world.observers.remove(ledger)
    rows = {row.phase: row for row in ledger.rows(world.at.rank)}
    return rows.get(f"updates {back}", Row(f"updates {back}", 0, 0, 0))


def say_bytes(rows: Sequence[Row], ranks: int) -> str:
    """Bytes of one rank: the gradients' average that comes before, and either way of sharing answers."""
    gradients = int(ddp_adamw(ranks, LENGTH, g=4))
    lines = [
        f"{'':<44}{'sends, bytes':>14}",
        f"{'gradients, all_reduce (float32, formula)':<44}{gradients:>14,}",
    ]
    for row in rows:
        name = f"answers, {row.phase.removeprefix('updates ')} (bfloat16, counted)"
        lines.append(f"{name:<44}{row.ring:>14,}")
    if rows[0].ring:
        lines.append(f"{'all_gather over all_reduce':<44}{rows[1].ring / rows[0].ring:>14.2f}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of the fastest step where every rank does all the work, and where it is dealt out."""

    replicated: float
    round_robin: float


def time_steps(rank: int, ranks: int, seed: int, steps: int) -> StepSeconds:
    """Time a step either way. Must be called by all ranks."""
    world = LiveWorld(build_mesh({"dp": ranks}))
    seconds = []
    for strategy in ("replicated", "round_robin"):
        muon = Muon(parameters(seed, shapes=TIMED), strategy=strategy, mesh=world)
        seconds.append(fastest(steps, muon.step))
    return StepSeconds(*seconds)


def say_clock(alone: Sequence[StepSeconds], pair: Sequence[StepSeconds]) -> str:
    """Times of the slowest rank, in words."""
    both = max(report.replicated for report in pair)
    dealt = max(report.round_robin for report in pair)
    return (
        f"cores this notebook may use             {measure.cores()}\n"
        f"one process alone                       {alone[0].replicated * 1e3:.0f} ms\n"
        f"a pair of ranks, both do everything     {both * 1e3:.0f} ms\n"
        f"a pair of ranks, round robin            {dealt * 1e3:.0f} ms"
    )


def quiz(ranks: int) -> Exercise:
    """Three numbers that the notebook has measured."""
    own = sum(place.size for place in PLACES if place.owner(ranks) == 0)
    sent = predict_ring(ranks)
    expected = {"zeros": LENGTH - own, "busiest": fair_shares(WORST), "bytes": sent}
    why = {
        "zeros": "Press rank 0 and 'own answers' in the first picture, or ask first.zeros(0).",
        "busiest": f"Look at the row for {WORST} in the table, or ask lesson.fair_shares({WORST}).",
        "bytes": "Look for all_gather in the table of bytes, or ask counted[0][1].ring.",
    }
    return numbers(expected, why, within=1e-6)


def predict_ring(ranks: int) -> int:
    """Bytes a rank sends to all_gather the answers: every segment but one, each as long as the longest."""
    own = [sum(place.size for place in PLACES if place.owner(ranks) == rank) for rank in range(ranks)]
    return (ranks - 1) * max(own) * 2


def exercises(dp: int, backend: str, seed: int) -> tuple[Exercise, Exercise, Exercise, Exercise]:
    """The notebook's exercises in order: guess, prediction, mend, quiz."""
    return guess(dp), predict(dp), check_share(dp, backend, seed), quiz(dp)
