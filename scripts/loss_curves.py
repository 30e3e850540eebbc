"""Trains the small GPT with torch's Newton–Schulz and with faster recipes, and compares their losses.

    python scripts/loss_curves.py

trains 300 steps on three seeds with each way, on one process of one thread, and writes loss_curves.md, .json
and .svg to results/. It takes some minutes. Other kinds of machines round differently, so losses differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.launching.launch import launch
from muon_tutorial.orthogonalizers.named import STOCK
from muon_tutorial.training.loop import build_trainer, held_out_loss, train_step
from muon_tutorial.training.settings import TrainSettings
from scripts import result_files as results
from scripts.files import made

STEM = "loss_curves"
SMOOTH = 10
"""Steps over which the picture's lines are averaged."""

OPENING = (
    "The main job's model and trainer, with torch's Newton–Schulz (`stock`) and with other ways of "
    "`Muon(orthogonalize=…)`; nothing else differs, and the learning rate was not tuned for any of them. The "
    "updates of `minimax` and `three_steps` are larger than stock's, whose singular values end mostly below "
    "1: by 1/0.87 for a Gaussian matrix. One series uses 0.87 times Muon's rate, which makes its updates as "
    "large as stock's; we added it after we had seen minimax's loss at the full rate.\n\n"
    "What this shows: whether a way's loss, on this small model and in these steps, differs from stock's "
    "by more than seeds differ among themselves. What it does not show: that the same holds for large "
    "models, for long runs or for another learning rate. Three differences of one sign come by chance one "
    "time in four."
)
LAST = 20
"""The final loss is a mean over this many steps, because a single batch's loss is noisy."""


@dataclass(frozen=True, slots=True)
class Way:
    """A name that ``Muon(orthogonalize=…)`` takes, and a factor for Muon's learning rate."""

    name: str
    lr_share: float = 1.0

    def __str__(self) -> str:
        return self.name if self.lr_share == 1 else f"{self.name}, {self.lr_share:g} of the rate"


WAYS = (Way(STOCK), Way("gram"), Way("minimax"), Way("three_steps"), Way("three_steps", 0.87))
"""Recipes that ``"auto"`` may choose if fp32 products are fast. Torch's five steps leave singular values
between 0.7 and 1.2, mostly below 1; ``minimax`` and ``three_steps`` leave them closer to 1. So their updates
are 1/0.87 times as large (Gaussian matrix). The last run lowers the learning rate by that factor."""


@dataclass(frozen=True, slots=True)
class WayCurve:
    """One run: each step's batch loss before the step, and the held-out loss at the end, in nats per byte."""

    way: str
    seed: int
    losses: Sequence[float]
    held_out: float

    @property
    def last(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


def train_curves(settings: TrainSettings, ways: Sequence[Way], seeds: Sequence[int]) -> list[WayCurve]:
    """Train every way with every seed, on one real rank of one thread."""
    runs = [(replace(settings, seed=seed), way) for seed in seeds for way in ways]
    return launch(lambda rank: [train_curve(*run) for run in runs], 1)[0]


def train_curve(settings: TrainSettings, way: Way) -> WayCurve:
    """Train once with the trainer of the main job. All ranks of the settings' grid must call it."""
    torch.set_num_threads(1)
    trainer = build_trainer(settings)
    for index, group in enumerate(trainer.optimizer.param_groups):
        if "orthogonalize" in group:  # Muon's
            group["orthogonalize"] = way.name
            group["lr"] *= way.lr_share
            trainer.scheduler.base_lrs[index] *= way.lr_share
    losses = [train_step(trainer, step, checked=False)[0].loss for step in range(settings.steps)]
    curve = WayCurve(str(way), settings.seed, losses, held_out_loss(trainer))
    print(f"seed {curve.seed}, {way}: {curve.last:.4f} at the end, held out {curve.held_out:.4f}", flush=True)
    return curve


def curves_table(curves: Sequence[WayCurve], command: str) -> Table:
    stock = {curve.seed: curve for curve in curves if curve.way == STOCK}
    rows: tuple[TableRow, ...] = tuple(
        {
            "orthogonalize": curve.way,
            "seed": curve.seed,
            "last batch": round(curve.losses[-1], 4),
            f"mean of last {LAST}": round(curve.last, 4),
            "held out": round(curve.held_out, 4),
            f"mean of last {LAST}, minus stock's": round(curve.last - stock[curve.seed].last, 4),
            "held out, minus stock's": round(curve.held_out - stock[curve.seed].held_out, 4),
        }
        for curve in curves
    )
    return Table("Every run", rows, command, ("Nats per byte; above zero is worse than stock.",))


def spread_table(curves: Sequence[WayCurve], command: str) -> Table:
    by_way: dict[str, list[WayCurve]] = {}
    for curve in curves:
        by_way.setdefault(curve.way, []).append(curve)
    losses: dict[str, Callable[[WayCurve], float]] = {
        f"mean of last {LAST}": lambda curve: curve.last,
        "held out": lambda curve: curve.held_out,
    }
    rows = []
    for way, its in by_way.items():
        row: TableRow = {"orthogonalize": way}
        for name, loss in losses.items():
            other = {curve.seed: loss(curve) for curve in by_way[STOCK]}
            gaps = [loss(curve) - other[curve.seed] for curve in its]
            row |= {
                name: round(statistics.fmean(map(loss, its)), 4),
                f"{name}, minus stock's": round(statistics.fmean(gaps), 4),
                f"{name}, seed by seed": ", ".join(f"{gap:+.4f}" for gap in gaps),
                f"{name}, seeds lie apart": round(max(map(loss, its)) - min(map(loss, its)), 4),
            }
        rows.append(row)
    notes = (
        "Nats per byte; above zero is worse than stock. Differences are taken seed by seed, between runs "
        "that began with the same weights and saw the same batches, and then averaged. `Seeds lie apart` is "
        "the largest loss minus the smallest, over seeds.",
    )
    return Table("Over seeds", tuple(rows), command, notes)


def plot(path: Path, curves: Sequence[WayCurve]) -> None:
    """Draw the curves above, and below them their differences from stock's with the same seed."""
    with results.plotted(path, 2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1)) as (above, below):
        stock = {curve.seed: curve.losses for curve in curves if curve.way == STOCK}
        for number, way in enumerate(dict.fromkeys(curve.way for curve in curves)):
            its = [curve for curve in curves if curve.way == way]
            band(above, [curve.losses for curve in its], way, f"C{number}")
            gaps = [[a - b for a, b in zip(curve.losses, stock[curve.seed], strict=True)] for curve in its]
            band(below, gaps, way, f"C{number}")
        above.set_ylabel("loss of a step's batch, nats a byte")
        above.set_title(
            f"mean of {len(stock)} seeds, averaged over {SMOOTH} steps; bands: lowest to highest seed"
        )
        above.legend()
        below.set_ylabel("minus stock's, same seed")
        below.set_xlabel("step")


def band(axes: Any, by_seed: Sequence[Sequence[float]], label: str, colour: str) -> None:
    """Draw the mean over seeds as a line, and the range over seeds as a band."""
    smoothed = [smooth(values) for values in by_seed]
    steps = range(min(SMOOTH, len(by_seed[0])), len(by_seed[0]) + 1)
    columns = list(zip(*smoothed, strict=True))
    axes.plot(steps, [*map(statistics.fmean, columns)], color=colour, label=label, lw=1.2)
    axes.fill_between(steps, [*map(min, columns)], [*map(max, columns)], color=colour, alpha=0.15)


def smooth(values: Sequence[float]) -> list[float]:
    """Running means over ``SMOOTH`` steps.

    >>> smooth([1.0] * 10 + [2.0])
    [1.0, 1.1]
    """
    width = min(SMOOTH, len(values))
    return [statistics.fmean(values[end - width : end]) for end in range(width, len(values) + 1)]


def train_and_write(asked: argparse.Namespace, command: str) -> None:
    """Train all runs; write both tables, the picture, and every step's loss."""
    out = made(asked.out)
    settings = TrainSettings(dp=1, tp=1, strategy="replicated", steps=asked.steps, batch=8, check=False)
    curves = train_curves(settings, WAYS, range(asked.seeds))
    tables = [spread_table(curves, command), curves_table(curves, command)]
    plot(out / f"{STEM}.svg", curves)
    shown = {f"{STEM}.svg": "Loss curves: mean over seeds, and the band between the lowest and the highest"}
    s = settings
    facts = {
        **results.machine_facts(command),
        "model": f"byte-level GPT, {s.layers} layers, width {s.width}, {s.heads} heads, context {s.context}",
        "text": "the Python standard library's sources",
        "training": f"{s.steps} steps of {s.batch} sequences, learning rate {s.lr:g} at its peak, "
        f"seeds 0 to {asked.seeds - 1}; one process, one thread",
    }
    runs = [asdict(curve) for curve in curves]
    results.write_results(out, STEM, "Loss curves", OPENING, facts, tables, shown, runs=runs)
    print(results.markdown(tables))


if __name__ == "__main__":
    steps, seeds = (300, "steps of each run"), (3, "number of seeds, counted from 0")
    parser = results.result_parser(__doc__, steps=steps, seeds=seeds)
    raise SystemExit(results.answer(STEM, parser, train_and_write))
