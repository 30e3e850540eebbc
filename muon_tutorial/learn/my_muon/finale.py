"""The finale: the reader's completed optimizer trains a GPT on four ranks, as torch.optim.Muon does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from ...errors import TutorialError
from ...launching.launch import launch
from ...launching.start_torchrun import start_torchrun, torchrun_words
from ..inputs import measure
from . import training
from .blocks import REFERENCE, completed, reference
from .keep import FILE, complete, first_line, lines_of, read_mine, say_whose
from .on_ranks import PHASES, try_file
from .training import RunRecord

GRIDS = ((4, 1), (2, 2), (1, 4))
RANKS = 4
RUN = "my_muon_run"
"""The folder of the run under torchrun, inside the current one."""
_LIMIT = 280.0


@dataclass(frozen=True, slots=True)
class GridRun:
    """A run on one grid: rank 0's record, and how many weight entries differ from a single process's."""

    grid: tuple[int, int]
    record: RunRecord
    different: int


@dataclass(frozen=True, slots=True)
class Finale:
    """The runs on all grids and AdamW's losses; ``trouble`` is the error of the reader's file, if any."""

    file: Path
    runs: tuple[GridRun, ...]
    adamw: tuple[float, ...]
    trouble: str = ""


def run_on(path: Path, grid: tuple[int, int], steps: int, seed: int) -> GridRun:
    """Train with the optimizer in a file on a grid of four ranks, then compare with torch.optim.Muon."""
    arguments = (str(path), grid, steps, seed)
    record = launch(training.train, RANKS, args=arguments, output="quiet", timeout=30.0)[0]
    with measure.one_thread():
        alone = training.steps_alone(record, seed)
    pairs = zip(record.weights, alone, strict=True)
    return GridRun(grid, record, sum(int((a != b).sum()) for a, b in pairs))


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
    trouble = ""
    try:
        runs = [run_on(path, grid, steps, seed) for grid in GRIDS]
    except TutorialError as error:
        trouble = first_line(error)
        print(f"{FILE} failed: {trouble}\nFrom here on, only the reference is used.")
        path = REFERENCE
        runs = [run_on(path, grid, steps, seed) for grid in GRIDS]
    with measure.one_thread():
        adamw = training.losses_of_adamw(steps, RANKS, seed)
    return Finale(path, tuple(runs), adamw, trouble)


def say_bits(finale: Finale) -> str:
    """Each grid compared with one process, one line per grid."""
    lines = []
    for run in finale.runs:
        said = f"{run.different} weights differ" if run.different else "the bits of torch.optim.Muon"
        lines.append(f"dp={run.grid[0]} × tp={run.grid[1]}: {len(run.record.losses)} steps, {said}")
    return "\n".join(lines)


def scorecard(finale: Finale) -> str:
    """Bytes, seconds and memory of one rank per step on each grid, and the losses compared with AdamW's."""
    records = [run.record for run in finale.runs]
    rows: list[Sequence[object]] = [["", *(f"{dp} × {tp}" for dp, tp in (run.grid for run in finale.runs))]]
    for phase, name in PHASES.items():
        rows.append([f"bytes sent, {name}", *(f"{record.sent.get(phase, 0):,}" for record in records)])
    rows.append(["bytes sent, together", *(f"{sum(record.sent.values()):,}" for record in records)])
    rows.append(["your bill said", *(f"{sum(record.expected.values()):,}" for record in records)])
    rows.append(["bytes of momentum kept", *(f"{record.state:,}" for record in records)])
    rows.append(["matrices orthogonalized", *(record.worked for record in records)])
    rows.append(["seconds a step", *(f"{median(record.seconds):.3f}" for record in records)])
    rows.append(["loss at the beginning", *(f"{record.losses[0]:.3f}" for record in records)])
    rows.append(["loss at the end", *(f"{record.losses[-1]:.3f}" for record in records)])
    rows.append(["AdamW's, on the text of 4 × 1", f"{finale.adamw[-1]:.3f}"])
    return "\n".join(f"{row[0]:<38}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows)


def best_grids(finale: Finale) -> dict[str, tuple[int, int]]:
    """The grids on which a rank sends least in a step, and on which it orthogonalizes most matrices."""
    least = min(finale.runs, key=lambda run: sum(run.record.sent.values()))
    most_work = max(finale.runs, key=lambda run: run.record.worked)
    return {"least": least.grid, "most_work": most_work.grid}


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


def run_torchrun(finale: Finale, steps: int, seed: int) -> str:
    """Run the training under torchrun with a kill; say where it resumed, and whether final bits changed."""
    undisturbed = next(run.record for run in finale.runs if run.grid == (2, 2))
    with TemporaryDirectory() as name:
        try:
            start_torchrun(command(steps, seed, str(finale.file)), Path(name), _LIMIT)
        except TutorialError as error:
            return f"The run did not come to its end: {first_line(error)}"
        end = torch.load(Path(name) / RUN / "end.result", weights_only=True)
    same = all(map(torch.equal, end["weights"], undisturbed.weights))
    killed = f"rank {RANKS - 1} was killed after {training.KILLED_AFTER} steps"
    return (
        f"{killed}; torchrun started all {RANKS} again\n"
        f"they went on from the checkpoint of step {end['begin']}, to step {steps}\n"
        f"the same bits as undisturbed: {same}"
    )


def say_yours(folder: Path | None = None) -> str:
    """How many lines of the completed file the reader wrote, in words."""
    mine = read_mine(folder).blocks
    lines, whole = lines_of(*(block.source for block in mine.values())), lines_of(completed(mine))
    return f"Of its {whole} lines {lines} are yours, in {len(mine)} of {len(reference()[1])} functions."
