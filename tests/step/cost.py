"""What agreement and the drift guard cost of the training job's step: ``python -m tests.step.cost``.

Steps with and without take turns in one run, so that both meet the same machine. Prints medians in seconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Generator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from muon_tutorial import launch
from muon_tutorial.optimizer.compare_replicas import compare_replicas
from muon_tutorial.step import step as heart
from muon_tutorial.training.loop import build_trainer, train_step
from muon_tutorial.training.settings import TrainSettings

GRIDS = (("zero1", 2, 2), ("zero1", 4, 1), ("owner", 2, 2), ("replicated", 2, 2))
ROUNDS = 100
EVERY = 100  # steps between two comparisons, as is the default


def silent(gradients: list[Any], *_: object, **__: object) -> Generator[Any, Any, list[bool]]:
    """Which gradients there are, as every rank believes without asking."""
    return [True] * len(gradients)
    yield


def measure(
    rank: int, strategy: str, dp: int, tp: int, rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of steps that agree, of steps that do not, and of comparisons."""
    torch.set_num_threads(1)
    trainer = build_trainer(TrainSettings(dp=dp, tp=tp, strategy=strategy, steps=3 * rounds))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    compared = []
    for number in range(2 * rounds):
        agrees = number % 4 in (0, 3)  # a-b-b-a: neither comes always first
        dist.barrier()
        begun = time.perf_counter()
        if agrees:
            train_step(trainer, number, checked=False)
        else:
            with patch.object(heart, "agree_on_gradients", silent):
                train_step(trainer, number, checked=False)
        seconds[agrees].append(time.perf_counter() - begun)
        if number % 10 == 0:
            begun = time.perf_counter()
            compare_replicas(trainer.optimizer.muon._steps(), trainer.optimizer.muon.companions, number)
            compared.append(time.perf_counter() - begun)
    return seconds[True], seconds[False], compared


def main() -> None:
    """Print a line for each strategy and grid."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    for strategy, dp, tp in GRIDS:
        ranks = launch(measure, dp * tp, args=(strategy, dp, tp, rounds), timeout=600)
        agreed, without, compared = (
            [max(each) for each in zip(*(rank[part] for rank in ranks), strict=True)] for part in range(3)
        )
        step, bare = statistics.median(agreed), statistics.median(without)
        paired = statistics.median(a - b for a, b in zip(agreed, without, strict=True))
        guard = statistics.median(compared) / EVERY
        print(
            f"{strategy} dp={dp} tp={tp}: step {1e3 * step:.1f} ms, {1e3 * bare:.1f} without; agreement "
            f"{100 * (step - bare) / bare:+.2f} % (paired {100 * paired / bare:+.2f} %); comparing "
            f"{1e3 * guard * EVERY:.1f} ms every {EVERY} steps: {100 * guard / bare:.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
