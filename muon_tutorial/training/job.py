"""A whole training job as the launching process sees it: run folder, ranks, progress, result.

The ranks know no files. Rank 0 prints each step's record as one line of JSON; the launching process shows it
and writes it to the run folder. Under torchrun rank 0 does both itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..errors import UsageError
from ..launching.launch import launch
from ..plan.strategies import STRATEGIES
from .loop import train_rank
from .progress import showing_progress
from .records import RunResult, StepRecord
from .run_folder import RunFolder
from .settings import TrainSettings, check_strategy
from .text import load_text

RECORD = "@step "
SPARE_LINES = 200


@dataclass(frozen=True, slots=True)
class Beside:
    """The same job on one process, for comparison, and the largest distance between the two loss curves."""

    result: RunResult
    largest_gap: float


def check_inputs(settings: TrainSettings, processes_here: int) -> None:
    """Refuse what can be refused before any rank starts. ``processes_here`` is how many this machine runs.

    Raises:
        UsageError: the strategy is unknown, the text is no text, or the backend has no devices here.
    """
    check_strategy(settings.strategy, STRATEGIES)
    check_backend(settings.backend, processes_here)
    load_text(settings.text, settings.context)


def check_backend(backend: str, processes_here: int) -> None:
    """Refuse NCCL where there is not one GPU for each process.

    Raises:
        UsageError: says how many GPUs there are.
    """
    if backend != "nccl":
        return
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < processes_here:
        raise UsageError(
            f"--backend nccl needs one GPU for each process: {processes_here} wanted on this machine, "
            f"{there} found; use --backend gloo"
        )


def run_launched(
    settings: TrainSettings, folder: RunFolder, console: Console, name: str = "metrics.jsonl"
) -> RunResult:
    """Start the ranks on this machine, train, and return what rank 0 reports.

    Raises:
        LaunchError: a rank failed; the message names the first.
    """
    with showing_progress(console, _title(settings), settings.steps) as show:
        results = launch(
            train_rank,
            settings.world_size,
            args=(settings, print_record),
            backend=settings.backend,
            timeout=settings.timeout,
            output=_listener(folder, name, show, console),
            max_lines=settings.steps + SPARE_LINES,
        )
    return results[0]


def run_seated(rank: int, settings: TrainSettings, folder: RunFolder | None, console: Console) -> RunResult:
    """Train as one rank of a group that is already joined. Rank 0 has the folder."""
    if folder is None:
        return train_rank(rank, settings, lambda record: None)
    with showing_progress(console, _title(settings), settings.steps) as show:
        return train_rank(rank, settings, _keeper(folder, "metrics.jsonl", show))


def run_beside(result: RunResult, folder: RunFolder, console: Console) -> Beside:
    """Run the same job on one process, on the same global batches, and compare the loss curves."""
    alone = run_launched(replace(result.settings, dp=1, tp=1), folder, console, "metrics_one_process.jsonl")
    gaps = [abs(a.loss - b.loss) for a, b in zip(result.records, alone.records, strict=True)]
    return Beside(alone, max(gaps))


def describe_result(result: RunResult, beside: Beside | None) -> dict[str, Any]:
    """The result as plain data, for ``result.json`` and ``--json``. The steps are in ``metrics.jsonl``."""
    data = _plain(result)
    if beside is not None:
        data["beside_one_process"] = {**_plain(beside.result), "largest_gap": beside.largest_gap}
    return data


def print_record(record: StepRecord) -> None:
    """Hand a step's record from rank 0 to the launching process."""
    sys.stdout.write(RECORD + json.dumps(asdict(record)) + "\n")
    sys.stdout.flush()


def default_folder(settings: TrainSettings) -> Path:
    """A run folder named after the time and the settings."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{stamp}-{settings.strategy}-dp{settings.dp}-tp{settings.tp}"


def _listener(
    folder: RunFolder, name: str, show: Callable[[StepRecord], None], console: Console
) -> Callable[[int, str], None]:
    keep = _keeper(folder, name, show)

    def listen(rank: int, line: str) -> None:
        if line.startswith(RECORD):
            keep(StepRecord(**json.loads(line.removeprefix(RECORD))))
        else:
            console.print(f"[rank {rank}] {line}", markup=False, highlight=False)

    return listen


def _keeper(folder: RunFolder, name: str, show: Callable[[StepRecord], None]) -> Callable[[StepRecord], None]:
    def keep(record: StepRecord) -> None:
        folder.append(name, asdict(record))
        show(record)

    return keep


def _title(settings: TrainSettings) -> str:
    return f"training, dp={settings.dp} tp={settings.tp}"


def _plain(result: RunResult) -> dict[str, Any]:
    data = {**asdict(result), "step_seconds": result.step_seconds, "optimizer_share": result.optimizer_share}
    del data["records"]
    if result.check is not None:
        data["check"]["passed"] = result.check.passed
    return data
