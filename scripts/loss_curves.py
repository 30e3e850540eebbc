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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

from muon_tutorial.evidence.tables import Table  # noqa: E402
from muon_tutorial.orthogonalizers.named import STOCK  # noqa: E402
from muon_tutorial.training.settings import TrainSettings  # noqa: E402
from scripts.files import answered, made  # noqa: E402
from scripts.lab.benchmarks.loss_curves import (  # noqa: E402
    Way,
    WayCurve,
    curves_table,
    spread_table,
    train_curves,
)
from scripts.lab.benchmarks.step_benchmark import ways  # noqa: E402
from scripts.result_files import (  # noqa: E402
    check_counts,
    command_line,
    machine_facts,
    plotted,
    result_parser,
    write_results,
)

STEM = "loss_curves"
STEPS, SEEDS, BATCH = 300, 3, 8
WAYS = (Way(STOCK), Way("gram"), Way("minimax"), Way("three_steps"), Way("three_steps", 0.87))
"""The recipes among which ``"auto"`` chooses if fp32 products are fast. The last two leave singular values
closer to 1; torch's five steps leave them between 0.7 and 1.2, mostly below 1. So the last two have larger
updates, by 1/0.87 for a Gaussian matrix. One run therefore lowers the rate by that factor."""
SMOOTH = 10
"""Steps over which the picture's lines are averaged."""

OPENING = (
    f"Written by `scripts/{STEM}.py`; do not edit. The main job's model and trainer, with torch's "
    "Newton–Schulz (`stock`) and with other ways of `Muon(orthogonalize=…)`; nothing else differs, and "
    "the learning rate was not tuned for any of them. The updates of `minimax` and `three_steps` are "
    "larger than stock's, whose singular values end mostly below 1: by 1/0.87 for a Gaussian matrix. One "
    "series uses 0.87 times Muon's rate, which makes its updates as large as stock's; we added it after we "
    "had seen minimax's loss at the full rate.\n\n"
    "What this shows: whether a way's loss, on this small model and in these steps, differs from stock's "
    "by more than seeds differ among themselves. What it does not show: that the same holds for large "
    "models, for long runs or for another learning rate. Three differences of one sign come by chance one "
    "time in four."
)


def main(arguments: list[str] | None = None) -> int:
    """Train and write."""
    asked = parse(arguments)
    command = command_line(f"{STEM}.py", arguments)
    return answered(f"{STEM}.py", lambda: train_and_write(asked, command))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = result_parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds, counted from 0")
    parser.add_argument(
        "--way",
        action="append",
        choices=ways(),
        metavar="NAME",
        help="besides stock, only this one; may be repeated",
    )
    asked = parser.parse_args(arguments)
    check_counts(parser, asked, "steps", "seeds")
    given = tuple(map(Way, asked.way)) if asked.way else WAYS
    asked.ways = tuple(dict.fromkeys((Way(STOCK), *given)))
    return asked


def train_and_write(asked: argparse.Namespace, command: str) -> None:
    """Train all runs, and write both tables and the picture."""
    out = made(asked.out)
    settings = TrainSettings(dp=1, tp=1, strategy="replicated", steps=asked.steps, batch=BATCH, check=False)
    curves = train_curves(settings, asked.ways, range(asked.seeds))
    tables = [spread_table(curves, command), curves_table(curves, command)]
    write(out, tables, facts(settings, asked.seeds, command), curves)
    print("\n".join(table.markdown() for table in tables))


def facts(settings: TrainSettings, seeds: int, command: str) -> dict[str, Any]:
    """The training's settings, and the machine."""
    s = settings
    return {
        **machine_facts(command),
        "model": f"byte-level GPT, {s.layers} layers, width {s.width}, {s.heads} heads, context {s.context}",
        "text": "the Python standard library's sources",
        "training": f"{s.steps} steps of {s.batch} sequences, learning rate {s.lr:g} at its peak, "
        f"seeds 0 to {seeds - 1}; one process, one thread",
    }


def write(folder: Path, tables: list[Table], facts: dict[str, Any], curves: Sequence[WayCurve]) -> None:
    """Write Markdown for people, JSON with every step's loss for programs, and the curves."""
    picture, text, data = (f"{STEM}.{kind}" for kind in ("svg", "md", "json"))
    plot(folder / picture, curves)
    shown = {picture: "Loss curves: mean over seeds, and the band between the lowest and the highest"}
    runs = [asdict(curve) for curve in curves]
    write_results(folder, "Loss curves", OPENING, facts, tables, text, data, shown, runs=runs)


def plot(path: Path, curves: Sequence[WayCurve]) -> None:
    """Draw the curves above, and below them their differences from stock's with the same seed."""
    with plotted(path, 2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1)) as (above, below):
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
    """Draw the mean over seeds as a line, and lowest to highest as a band."""
    smoothed = [smooth(values) for values in by_seed]
    steps = range(min(SMOOTH, len(by_seed[0])), len(by_seed[0]) + 1)
    columns = list(zip(*smoothed, strict=True))
    axes.plot(steps, [statistics.fmean(column) for column in columns], color=colour, label=label, lw=1.2)
    axes.fill_between(
        steps,
        [min(column) for column in columns],
        [max(column) for column in columns],
        color=colour,
        alpha=0.15,
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Running means over ``SMOOTH`` steps.

    >>> smooth([1.0] * 10 + [2.0])
    [1.0, 1.1]
    """
    width = min(SMOOTH, len(values))
    return [statistics.fmean(values[end - width : end]) for end in range(width, len(values) + 1)]


if __name__ == "__main__":
    raise SystemExit(main())
