"""A whole training job as the launching process sees it: run folder, ranks, progress, result.

The ranks write no records to files. Rank 0 prints each step's record as one line of JSON; the launching
process shows it and writes it to the run folder. Under torchrun, rank 0 does both itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import UsageError
from ..launching.launch import launch
from ..plan.strategies import find_builder
from .checkpoints import Saving, StoppedRun
from .loop import train_rank
from .records import RunResult, StepRecord
from .run_folder import METRICS, RunFolder
from .settings import TrainSettings
from .stopping import passing_signals_on
from .text import load_text

RECORD = "@step "
SPARE_LINES = 200
PLAIN_LINES = 10
FIELDS = {field.name for field in fields(StepRecord)}


@dataclass(frozen=True, slots=True)
class OneProcessRun:
    """The same job on one process, for comparison, and the largest gap between the two runs' losses."""

    result: RunResult
    largest_gap: float


def check_inputs(settings: TrainSettings) -> None:
    """Check strategy, text and GPUs: before this machine's ranks start, or in each of torchrun's ranks."""
    find_builder(settings.strategy)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Ranks that have joined a group got their GPUs when they joined, perhaps on several machines.
    if settings.backend == "nccl" and there < settings.world_size and not dist.is_initialized():
        raise UsageError(
            f"--backend nccl needs one GPU for each process: {settings.world_size} needed on this machine, "
            f"{there} found; use --backend gloo"
        )
    load_text(settings.text, settings.context)


def run_launched(
    settings: TrainSettings,
    folder: RunFolder,
    console: Console,
    saving: Saving | None = None,
    name: str = METRICS,
) -> RunResult | StoppedRun:
    """Start the ranks on this machine, train, and return what rank 0 reports."""
    earlier = _earlier_records(folder, saving, name, console)
    with _recording(settings, folder, console, name) as record:

        def listen(rank: int, line: str) -> None:
            if line.startswith(RECORD):
                record(StepRecord(**json.loads(line.removeprefix(RECORD))))
            else:
                console.print(f"[rank {rank}] {line}", markup=False, highlight=False)

        results = launch(
            _train_launched,
            settings.world_size,
            args=(settings, saving),
            backend=settings.backend,
            timeout=settings.timeout,
            output=listen,
            max_lines=settings.steps + SPARE_LINES,
        )
    return _with_earlier(results[0], earlier)


def _train_launched(rank: int, settings: TrainSettings, saving: Saving | None) -> RunResult | StoppedRun:
    def tell(record: StepRecord) -> None:
        sys.stdout.write(RECORD + json.dumps(asdict(record)) + "\n")
        sys.stdout.flush()

    with passing_signals_on(saving) if saving is not None else nullcontext():
        return train_rank(rank, settings, tell, saving)


def run_joined(
    rank: int, settings: TrainSettings, folder: RunFolder | None, saving: Saving, console: Console
) -> RunResult | StoppedRun:
    """Train as one rank of a group that this process has joined. Only rank 0 gets the folder."""
    if folder is None:
        return train_rank(rank, settings, lambda record: None, saving)
    earlier = _earlier_records(folder, saving, METRICS, console)
    with _recording(settings, folder, console, METRICS) as record:
        say = partial(console.print, markup=False, highlight=False)
        return _with_earlier(train_rank(rank, settings, record, saving, say), earlier)


def _earlier_records(
    folder: RunFolder, saving: Saving | None, name: str, console: Console
) -> list[StepRecord]:
    """The records of the steps before ``saving.begin``. Later records are removed from the file.

    After a crash of the machine, some records may be missing; then a line is printed, and the run continues.
    """
    begin = 0 if saving is None else saving.begin or 0
    found = folder.records(name)
    by_step = {step: record for record in found if isinstance(step := record.get("step"), int)}
    kept = [StepRecord(**by_step[step]) for step in range(begin) if set(by_step.get(step, ())) == FIELDS]
    if found:
        folder.write(name, "".join(json.dumps(asdict(record)) + "\n" for record in kept))
    if len(kept) < begin:
        console.print(
            f"{name} has the records of only {len(kept)} of the {begin} steps before the checkpoint; "
            "the others are lost, so the picture lacks them",
            highlight=False,
        )
    return kept


def _with_earlier(result: RunResult | StoppedRun, earlier: list[StepRecord]) -> RunResult | StoppedRun:
    return replace(result, earlier=tuple(earlier)) if isinstance(result, RunResult) else result


def run_beside(result: RunResult, folder: RunFolder, console: Console) -> OneProcessRun:
    """Run the same job on one process, on the same global batches, and compare the loss curves."""
    settings = replace(result.settings, dp=1, tp=1)
    alone = run_launched(settings, folder, console, name="metrics_one_process.jsonl")
    assert isinstance(alone, RunResult)
    losses = {record.step: record.loss for record in alone.records}
    return OneProcessRun(alone, max(abs(record.loss - losses[record.step]) for record in result.all_records))


def describe_result(result: RunResult, beside: OneProcessRun | None) -> dict[str, Any]:
    """The result as plain data, for ``result.json`` and ``--json``; the steps are in ``metrics.jsonl``."""
    data = _plain(result)
    if beside is not None:
        data["beside_one_process"] = {**_plain(beside.result), "largest_gap": beside.largest_gap}
    return data


@contextmanager
def _recording(
    settings: TrainSettings, folder: RunFolder, console: Console, name: str
) -> Iterator[Callable[[StepRecord], None]]:
    """Yield a function that shows one more step and writes it to the run folder's file ``name``."""
    title = f"training, dp={settings.dp} tp={settings.tp}"
    with showing_progress(console, title, settings.steps) as show:

        def record(step: StepRecord) -> None:
            folder.append(name, asdict(step))
            show(step)

        yield record


@contextmanager
def showing_progress(console: Console, title: str, steps: int) -> Iterator[Callable[[StepRecord], None]]:
    """Yield a function that shows one more step of ``steps``: as a bar on a terminal, else as plain lines."""
    if not console.is_terminal:
        yield _plain_lines(console, title, steps)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, loss="  –  ")
        yield lambda record: progress.update(task, completed=record.step + 1, loss=f"{record.loss:.3f}")


def _plain_lines(console: Console, title: str, steps: int) -> Callable[[StepRecord], None]:
    every = max(1, steps // PLAIN_LINES)

    def show(record: StepRecord) -> None:
        done = record.step + 1
        if done == 1 or done == steps or done % every == 0:
            line = f"{title}: step {done}/{steps}, loss {record.loss:.3f}, {record.seconds:.2f} s"
            console.print(line, highlight=False)

    return show


def _plain(result: RunResult) -> dict[str, Any]:
    data = {**asdict(result), "step_seconds": result.step_seconds, "optimizer_share": result.optimizer_share}
    del data["records"], data["earlier"]
    if result.check is not None:
        data["check"]["passed"] = result.check.passed
    return data
