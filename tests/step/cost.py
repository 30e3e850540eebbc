"""What agreement and the drift guard cost of the training job's step: ``python -m tests.step.cost``.

Steps with and without take turns in one run, so that both meet the same machine. Prints medians: seconds of
the slowest rank, and processor seconds of all ranks together, which waiting does not count in.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from muon_tutorial import launch
from muon_tutorial.guard.compare_replicas import compare_replicas
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


@dataclass
class Costs:
    """What one rank measured: of steps that agree, of steps that do not, and of comparisons."""

    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    busy: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    compared: list[float] = field(default_factory=list)


def measure(rank: int, strategy: str, dp: int, tp: int, rounds: int) -> Costs:
    """One rank's costs of so many steps of each kind. All ranks must call."""
    torch.set_num_threads(1)
    trainer = build_trainer(TrainSettings(dp=dp, tp=tp, strategy=strategy, steps=3 * rounds))
    costs = Costs()
    for number in range(2 * rounds):
        agrees = number % 4 in (0, 3)  # a-b-b-a: neither comes always first
        dist.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        if agrees:
            train_step(trainer, number, checked=False)
        else:
            with patch.object(heart, "agree_on_gradients", silent):
                train_step(trainer, number, checked=False)
        costs.seconds[agrees].append(time.perf_counter() - begun)
        costs.busy[agrees].append(time.process_time() - worked)
        if number % 10 == 0:
            begun = time.perf_counter()
            compare_replicas(trainer.optimizer.muon.steps, trainer.optimizer.muon.guard.companions, number)
            costs.compared.append(time.perf_counter() - begun)
    return costs


def main() -> None:
    """Print a line for each strategy and grid."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    for strategy, dp, tp in GRIDS:
        ranks = launch(measure, dp * tp, args=(strategy, dp, tp, rounds), timeout=600)
        slowest = {agrees: together(max, [its.seconds[agrees] for its in ranks]) for agrees in (True, False)}
        busy = {agrees: together(sum, [its.busy[agrees] for its in ranks]) for agrees in (True, False)}
        bare = statistics.median(slowest[False])
        guard = statistics.median(together(max, [its.compared for its in ranks]))
        print(
            f"{strategy} dp={dp} tp={tp}: step {1e3 * bare:.1f} ms without agreement, {more(slowest)} with; "
            f"processor time {more(busy)}; comparing {1e3 * guard:.1f} ms every {EVERY} steps: "
            f"{100 * guard / EVERY / bare:.2f} %",
            flush=True,
        )


def together(join: Callable[[Iterable[float]], float], ranks: Sequence[Sequence[float]]) -> list[float]:
    """One number a step from those of all ranks."""
    return [join(each) for each in zip(*ranks, strict=True)]


def more(measured: dict[bool, list[float]]) -> str:
    """How much more steps that agree take than the steps beside them, and that median's standard error."""
    base = statistics.median(measured[False])
    low, middle, high = statistics.quantiles(
        [100 * (a - b) / base for a, b in zip(measured[True], measured[False], strict=True)], n=4
    )
    error = 1.25 * (high - low) / 1.35 / len(measured[True]) ** 0.5
    return f"{middle:+.2f} ± {error:.2f} %"


if __name__ == "__main__":
    main()
