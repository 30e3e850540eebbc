"""The finale: the reader's completed optimizer trains a GPT on four ranks, as torch.optim.Muon does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ...errors import TutorialError
from ...launching.launch import launch
from ...launching.start_torchrun import start_torchrun, torchrun_words
from ..exercises.judge import Exercise, Par
from ..exercises.on_real_ranks import judge_on_ranks
from ..inputs import measure
from ..my_loop.lives import Attempt, RunJob, read
from ..my_loop.pictures import draw_life
from ..pictures.picture import Picture
from . import training
from .blocks import REFERENCE
from .keep import FILE, complete, first_line, read_mine, say_whose
from .on_ranks import PHASES, try_file
from .training import RunRecord

GRIDS = ((4, 1), (2, 2), (1, 4))
RANKS = 4
RUN = "my_muon_run"
"""The folder of the run under torchrun, inside the current one."""
_LIMIT = 280.0


@dataclass(frozen=True, slots=True)
class Finale:
    """The runs on all grids, rank 0's record of each, and AdamW's losses."""

    file: Path
    runs: tuple[RunRecord, ...]
    adamw: tuple[float, ...]


def try_it(folder: Path | None = None) -> str:
    """Complete the reader's file, try two steps of it on each grid of four ranks, and report the results."""
    mine, path = read_mine(folder), complete(folder)
    lines = [say_whose(mine, "10")]
    for dp, tp in GRIDS:
        try:
            found = launch(try_file, RANKS, args=(str(path), dp, tp), output="quiet", timeout=8.0)
            said = next((wrong for wrong in found if wrong), "the bits of torch.optim.Muon")
        except TutorialError as error:
            said = first_line(error)
        lines.append(f"dp={dp} × tp={tp}: {said}")
    return "\n".join(lines)


def train_it(steps: int, seed: int, folder: Path | None = None) -> Finale:
    """Complete the reader's file, print which functions are the reader's, and train on all three grids."""
    mine, path = read_mine(folder), complete(folder)
    print(say_whose(mine))

    def train(path: Path) -> tuple[RunRecord, ...]:
        asked = ((str(path), grid, steps, seed) for grid in GRIDS)
        return tuple(launch(training.train, RANKS, args=a, output="quiet", timeout=30.0)[0] for a in asked)

    try:
        runs = train(path)
    except TutorialError as error:
        print(f"{FILE} failed: {first_line(error)}\nFrom here on, only the reference is used.")
        runs = train(path := REFERENCE)
    with measure.one_thread():
        adamw = training.losses_of_adamw(steps, RANKS, seed)
    return Finale(path, runs, adamw)


def say_bits(finale: Finale) -> str:
    """Each grid compared with torch.optim.Muon, one line per grid."""
    lines = []
    for run in finale.runs:
        said = f"{run.different} weights differ" if run.different else "the bits of torch.optim.Muon"
        lines.append(f"dp={run.grid[0]} × tp={run.grid[1]}: {len(run.losses)} steps, {said}")
    return "\n".join(lines)


def scorecard(finale: Finale) -> str:
    """Bytes, seconds and memory of one rank per step on each grid, and the losses compared with AdamW's."""
    records = finale.runs
    rows: list[Sequence[object]] = [["", *("{} × {}".format(*record.grid) for record in records)]]
    for phase, name in PHASES.items():
        rows.append([f"bytes sent, {name}", *(f"{record.sent.get(phase, 0):,}" for record in records)])
    rows.append(["bytes sent, together", *(f"{sum(record.sent.values()):,}" for record in records)])
    rows.append(["your bill said", *(f"{sum(record.expected.values()):,}" for record in records)])
    rows.append(["bytes of momentum kept", *(f"{record.state:,}" for record in records)])
    rows.append(["matrices orthogonalized", *(record.worked for record in records)])
    rows.append(["seconds a step", *(f"{median(record.seconds):.3f}" for record in records)])
    rows.append(["loss at the beginning", *(f"{record.losses[0]:.3f}" for record in records)])
    rows.append(["loss at the end", *(f"{record.losses[-1]:.3f}" for record in records)])
    rows.append(["AdamW's loss at the end, text of 4 × 1", f"{finale.adamw[-1]:.3f}"])
    return "\n".join(f"{row[0]:<38}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows)


def best_grids(finale: Finale) -> dict[str, tuple[int, int]]:
    """The grids on which a rank sends least in a step, and on which it orthogonalizes most matrices."""
    least = min(finale.runs, key=lambda run: sum(run.sent.values()))
    most_work = max(finale.runs, key=lambda run: run.worked)
    return {"least": least.grid, "most_work": most_work.grid}


def check_fewer(finale: Finale, steps: int, seed: int) -> Exercise:
    """The exercise with a score: the same bits on 2 × 2, and fewer bytes from the rank that sends most."""
    before = next(run.sent for run in finale.runs if run.grid == (2, 2))
    most = [due := sum(before.values())]

    def play(change: Any) -> list[Any]:
        arguments = (str(finale.file), change, steps, seed)
        return launch(training.count_bytes, RANKS, args=arguments, max_lines=40, timeout=30.0)

    def judge(found: list[Any]) -> str | None:
        if wrong := next((said for said in found if isinstance(said, str)), None):
            return f"{wrong[0].upper()}{wrong[1:]}."
        now = max(found, key=lambda sent: sum(sent.values()))
        most[0], phases = sum(now.values()), _say_phases(before, now)
        exercise.praise = f"The bits are right. {phases}"
        said = f"The bits are right, but a rank sends {most[0]:,} bytes, and it was {due:,} before. {phases}"
        return said if most[0] >= due else None

    exercise = Exercise(judge_on_ranks(play, judge), par=Par("bytes", 196_608, lambda _: most[0]))
    return exercise


def _say_phases(before: Mapping[int, int], now: Mapping[int, int]) -> str:
    """What a rank sends in each phase, before and now."""
    phases = ((PHASES.get(n, f"phase {n}"), before.get(n, 0), now.get(n, 0)) for n in sorted({*before, *now}))
    return f"Bytes, before → now: {'; '.join(f'{name} {old:,} → {new:,}' for name, old, new in phases)}."


def command(steps: int, seed: int, file: str = "my_muon_complete.py") -> list[str]:
    """The command line that trains on 2 × 2 ranks, and kills the last of them."""
    numbers = {"dp": 2, "tp": 2, "steps": steps, "seed": seed, "victim": RANKS - 1}
    words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    arguments = [training.__name__, *words, "--file", file, "--folder", RUN]
    return torchrun_words("-m", RANKS, restarts=1, arguments=arguments)


def show_command(steps: int, seed: int) -> None:
    words = command(steps, seed)
    cut = words.index("-m")
    print(" ".join(words[:cut]), "\\\n   ", " ".join(words[cut:]))


def run_torchrun(finale: Finale, steps: int, seed: int) -> Picture | None:
    """Train under torchrun with a kill, say where it resumed and whether final bits changed, and draw it."""
    undisturbed = next(run for run in finale.runs if run.grid == (2, 2))
    with TemporaryDirectory() as name:
        try:
            start_torchrun(command(steps, seed, str(finale.file)), Path(name), _LIMIT)
        except TutorialError as error:
            print(f"The run did not come to its end: {first_line(error)}")
            return None
        end = torch.load(Path(name) / RUN / "end.result", weights_only=True)
        life = read(Path(name) / RUN, RunJob(steps, seed))
    same = all(map(torch.equal, end["weights"], undisturbed.weights))
    killed = f"rank {RANKS - 1} was killed after {training.KILLED_AFTER} steps"
    print(
        f"{killed}; torchrun started all {RANKS} again\n"
        f"they went on from the checkpoint of step {end['begin']}, to step {steps}\n"
        f"the same bits as in the run without a kill: {same}"
    )
    alone = Attempt(undisturbed.grid, 0, dict(enumerate(undisturbed.losses)), {})
    return draw_life(life, replace(life, attempts=(alone,)))
