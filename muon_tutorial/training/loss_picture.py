"""Draws the loss of a training run."""

from __future__ import annotations

from matplotlib.figure import Figure

from .job import OneProcessRun
from .records import RunResult, StepRecord

OURS, ONE_PROCESS = "#1f6f8b", "#e07a1f"


def loss_figure(result: RunResult, beside: OneProcessRun | None) -> Figure:
    """Plot the loss over steps; with ``beside``, both curves."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    s = result.settings
    if beside is not None:
        axes.plot(
            *_curve(beside.result.all_records), color=ONE_PROCESS, linewidth=4, alpha=0.5, label="one process"
        )
    axes.plot(
        *_curve(result.all_records), color=OURS, linewidth=1.5, label=f"{s.strategy}, dp={s.dp} × tp={s.tp}"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss of the global batch (nats per byte)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _curve(records: tuple[StepRecord, ...]) -> tuple[list[int], list[float]]:
    return [record.step + 1 for record in records], [record.loss for record in records]
