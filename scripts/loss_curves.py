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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

from muon_tutorial.orthogonalizers.named import STOCK
from muon_tutorial.training.settings import TrainSettings
from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks.loss_curves import Way, WayCurve, curves_table, spread_table, train_curves

STEM = "loss_curves"
STEPS, SEEDS, BATCH = 300, 3, 8
WAYS = (Way(STOCK), Way("gram"), Way("minimax"), Way("three_steps"), Way("three_steps", 0.87))
"""The recipes among which ``"auto"`` chooses if fp32 products are fast. The last two recipes leave singular
values closer to 1; torch's five steps leave them between 0.7 and 1.2, mostly below 1. So these two make
larger updates, by 1/0.87 for a Gaussian matrix, and one run lowers the rate by that factor."""
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


def main(arguments: list[str] | None = None) -> int:
    """Train and write; returns the exit code."""
    steps, seeds = (STEPS, "steps of each run"), (SEEDS, "number of seeds, counted from 0")
    parser = results.result_parser(__doc__, steps=steps, seeds=seeds)
    return results.answer(STEM, parser, train_and_write, arguments)


def train_and_write(asked: argparse.Namespace, command: str) -> None:
    """Train all runs; write both tables, the picture, and every step's loss."""
    out = made(asked.out)
    settings = TrainSettings(dp=1, tp=1, strategy="replicated", steps=asked.steps, batch=BATCH, check=False)
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


if __name__ == "__main__":
    raise SystemExit(main())
