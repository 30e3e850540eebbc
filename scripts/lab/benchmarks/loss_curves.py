"""Loss curves of the small GPT under several ways of orthogonalizing, over several seeds.

For each seed, all ways begin with the same weights and see the same batches, so a difference in loss comes
from the way or from chance. The spread over seeds of one way shows how large chance is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.launching.launch import launch
from muon_tutorial.orthogonalizers.named import STOCK
from muon_tutorial.training.loop import build_trainer, held_out_loss, train_step
from muon_tutorial.training.settings import TrainSettings

LAST = 20
"""The number of last steps over which the mean loss is taken: a single batch's loss is noisy."""


@dataclass(frozen=True, slots=True)
class Way:
    """A name that ``Muon(orthogonalize=…)`` takes, and a factor for Muon's learning rate."""

    name: str
    lr_share: float = 1.0

    def __str__(self) -> str:
        return self.name if self.lr_share == 1 else f"{self.name}, {self.lr_share:g} of the rate"


@dataclass(frozen=True, slots=True)
class WayCurve:
    """One run: each step's batch loss before the step, and the held-out loss at the end, in nats per byte."""

    way: str
    seed: int
    losses: Sequence[float]
    held_out: float

    @property
    def last(self) -> float:
        """The mean loss of the last steps."""
        return statistics.fmean(self.losses[-LAST:])


def train_curves(settings: TrainSettings, ways: Sequence[Way], seeds: Sequence[int]) -> list[WayCurve]:
    """Train every way with every seed, on one real rank of one thread."""
    runs = [(replace(settings, seed=seed), way) for seed in seeds for way in ways]
    return launch(lambda rank: [train_curve(*run) for run in runs], 1)[0]


def train_curve(settings: TrainSettings, way: Way) -> WayCurve:
    """One run of the main job's own trainer. All ranks of the settings' grid must call."""
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
    """A row per run: its final losses, and their differences from stock's with the same seed."""
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
    """A row per way: the mean over seeds, the difference from stock, and the spread over seeds."""
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
        "the largest minus the smallest over seeds.",
    )
    return Table("Over seeds", tuple(rows), command, notes)
