"""The progress of a training run while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .records import StepRecord

PLAIN_LINES = 10

Show = Callable[[StepRecord], None]


@contextmanager
def showing_progress(console: Console, title: str, steps: int) -> Iterator[Show]:
    """Yield a function that shows one more step of ``steps``."""
    if not console.is_terminal:
        yield _plain(console, title, steps)
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


def _plain(console: Console, title: str, steps: int) -> Show:
    every = max(1, steps // PLAIN_LINES)

    def show(record: StepRecord) -> None:
        done = record.step + 1
        if done == 1 or done == steps or done % every == 0:
            line = f"{title}: step {done}/{steps}, loss {record.loss:.3f}, {record.seconds:.2f} s"
            console.print(line, highlight=False)

    return show
