"""Compares each phase's begin and end in real steps with the timed world's prediction, in one run.

python scripts/timelines.py                       # some minutes; prints a table
python scripts/timelines.py --write --side 768    # also results/timelines*, and the lessons' recording
python scripts/timelines.py --again               # results/timelines* once more, from that recording

Records steps of zero1 and owner with windows 1 and 3 on the loopback and, if the machine can limit it
(scripts/shaped.sh), on a bus of --rate. Compares each phase of each rank with the timed world's prediction
for the same plan. Calibrates this machine before and after the steps. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import pickle
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from muon_tutorial.errors import TutorialError
from muon_tutorial.evidence.svg import svg_document, svg_style
from muon_tutorial.evidence.traces.timeline_picture import FILLS, HATCHES
from muon_tutorial.learn.early_return.steps import predict_recorded, recorded
from muon_tutorial.timing.calibrate import average_machines, calibrate
from muon_tutorial.timing.machine import Machine, read_machine
from muon_tutorial.timing.timed_world import Doing
from muon_tutorial.timing.timeline import (
    RecordedStep,
    Recording,
    StepTimeline,
    compare_phases,
    middle,
    side_by_side,
)
from muon_tutorial.timing.timeline_cases import CASES, TimelineTask, bytes_of, predict_case, record_cases
from scripts.files import ROOT
from scripts.other_process import run_shaped
from scripts.result_files import RESULTS, command_line

LESSONS = ROOT / "muon_tutorial" / "learn" / "inputs" / "recorded" / "timelines.json"
LOOPBACK = "loopback"
BAR = 0.15
"""The largest allowed error of a phase's begin or end, as a fraction of the step."""
SPAN_FILLS: dict[Doing, str] = {
    "product": FILLS["compute"],
    "copy": "#9cc3e0",
    "wait": FILLS["waiting"],
    "transfer": FILLS["communication"],
}
WORDS: dict[Doing, str] = {
    "product": "products",
    "copy": "copies and all else",
    "wait": "waiting",
    "transfer": "transfers",
}
BAND = 26
THINNEST = 1500
"""Bars shorter than the step's duration divided by this are not drawn: they would be too thin to see."""


@dataclass(frozen=True, slots=True)
class TimelinePair:
    """The predicted and the recorded timeline of a step, under one name."""

    name: str
    predicted: StepTimeline
    recorded: StepTimeline

    @property
    def worst(self) -> float:
        """The largest error of a phase's begin or end, as a fraction of the recorded step."""
        return max(gap.worst for gap in compare_phases(self.predicted, self.recorded))

    def __str__(self) -> str:
        said, seen = (f"{1000 * one.seconds:.0f}" for one in (self.predicted, self.recorded))
        times = f"predicted {said} ms, recorded {seen}"
        return f"{self.name}: {times}; phases within {self.worst:.0%} of the step"


def draw_pairs(pairs: Sequence[TimelinePair], title: str = "") -> str:
    """Draw the pairs below each other, as an SVG document. The same timelines give the same bytes."""
    ranks = len(pairs[0].predicted.ranks)
    heights = [2 * BAND * ranks + 62 for _ in pairs]
    whole, top = sum(heights) + 60, 50
    with svg_style("timelines", **{"hatch.linewidth": 0.5}):
        figure = Figure(figsize=(9.6, whole / 96), dpi=96, facecolor="#ffffff")
        for pair, height in zip(pairs, heights, strict=True):
            low = 1 - (top + height - 32) / whole
            axes = figure.add_axes((0.13, low, 0.85, (height - 62) / whole))
            _draw_pair(axes, pair)
            top += height
        handles = [Patch(facecolor=fill, hatch=_hatch(doing), edgecolor="#8a8a8a", label=WORDS[doing])
                   for doing, fill in SPAN_FILLS.items()]  # fmt: skip
        figure.legend(handles=handles, loc="upper left", ncols=4, frameon=False, fontsize=8.5,
                      bbox_to_anchor=(0.12, 1 - 20 / whole))  # fmt: skip
        figure.text(0.012, 1 - 16 / whole, title, fontsize=10.5, weight="bold", va="center")
        return svg_document(figure)


def _draw_pair(axes: Axes, pair: TimelinePair) -> None:
    last = 1000 * max(pair.predicted.seconds, pair.recorded.seconds)
    bands = [
        (f"rank {rank} {timeline.source}", rank, timeline)
        for rank in pair.predicted.ranks
        for timeline in (pair.predicted, pair.recorded)
    ]
    edge: dict[str, Any] = {"edgecolor": "#8a8a8a", "linewidth": 0.2}
    for (row, (_, rank, timeline)), (doing, fill) in product(enumerate(bands), SPAN_FILLS.items()):
        least = timeline.seconds / THINNEST
        shown = [span for span in timeline.of(rank, doing) if span.end - span.begin > least]
        bars = [(1000 * span.begin, 1000 * (span.end - span.begin)) for span in shown]
        where = (row + 0.62, 0.26) if doing == "transfer" else (row + 0.06, 0.54)
        axes.broken_barh(bars, where, facecolor=fill, hatch=_hatch(doing), **edge)
    axes.set_yticks([row + 0.45 for row in range(len(bands))])
    axes.set_yticklabels([name for name, _, _ in bands], fontsize=8)
    axes.set(xlim=(0, last), ylim=(len(bands), 0))
    axes.tick_params(labelsize=8)
    axes.set_title(f"{pair}; milliseconds", fontsize=8.5, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _hatch(doing: Doing) -> str | None:
    return HATCHES["waiting"] if doing == "wait" else None


def run(
    task: TimelineTask, rate: str, given: Machine | None
) -> tuple[Machine, list[tuple[RecordedStep, StepTimeline]]]:
    """The median step of each case on both links, as recorded and as predicted.

    Predictions use the ``given`` machine, or else the mean of calibrations before and after the runs.
    """
    before = given or calibrate()
    links: list[tuple[str, float | None, list[list[StepTimeline]]]] = [(LOOPBACK, None, record_cases(task))]
    options = [word for name, value in asdict(task).items() for word in (f"--{name}", str(value))]
    shaped = run_shaped(rate, __file__, [*options, "--inside"])
    if shaped is None:
        print(
            "This machine cannot limit its loopback, so only the unlimited one is measured.", file=sys.stderr
        )
    else:
        links.append((rate, bytes_of(rate), pickle.loads(shaped)))
    machine = given or average_machines(before, calibrate())
    machines = {None: machine, bytes_of(rate): machine.on_bus(bytes_of(rate))}
    found = []
    for link, limit, of_cases in links:
        for (strategy, window), steps in zip(CASES, of_cases, strict=True):
            seconds = tuple(round(step.seconds, 5) for step in steps)
            recorded_step = RecordedStep(strategy, window, link, limit, seconds, middle(steps))
            found.append((recorded_step, predict_case(task, machines[limit], strategy, window)))
    return machine, found


def pair_of(step: RecordedStep, predicted: StepTimeline) -> TimelinePair:
    return TimelinePair(f"{step.strategy}, window {step.window}", predicted, step.timeline)


def table(found: Sequence[tuple[RecordedStep, StepTimeline]]) -> str:
    """For each case: seconds predicted and recorded, and the phases' errors."""
    head = f"| link | step | predicted, ms | recorded, ms | phases | worst begin or end | within {BAR:.0%} |"
    lines = [head, "|" + "---|" * 7]
    for step, predicted in found:
        pair, gaps = pair_of(step, predicted), compare_phases(predicted, step.timeline)
        within = sum(gap.worst <= BAR for gap in gaps) / len(gaps)
        times = f"{1000 * predicted.seconds:.1f} | {1000 * step.timeline.seconds:.1f}"
        off = f"{pair.worst:.1%} | {within:.0%}"
        lines.append(f"| {step.link} | {pair.name} | {times} | {len(gaps)} | {off} |")
    return "\n".join(lines)


def about(task: TimelineTask, machine: Machine, rate: str, command: str) -> dict[str, str]:
    return {
        "machine": f"{platform.machine()}, {machine.cores} cores, {task.dp} ranks, one thread each",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "load": f"{os.getloadavg()[0]:.1f} processes on average while it ran",
        "torch": torch.__version__,
        "link": f"Gloo over the loopback: as it is, and as a bus of {rate} that all ranks share",
        "step": f"{task.count} matrices of {task.side} × {task.side}, the median of {task.steps} steps",
        "command": command,
    }


def write(folder: Path, recording: Recording, found: Sequence[tuple[RecordedStep, StepTimeline]]) -> None:
    """Write the table, and a picture for each link, into a folder."""
    said = "\n".join(f"- {name}: {value}" for name, value in recording.about.items())
    folder.mkdir(parents=True, exist_ok=True)
    text = f"# Timelines, predicted and recorded\n\n{said}\n\n{table(found)}\n"
    (folder / "timelines.md").write_text(text, encoding="utf-8")
    for link in dict.fromkeys(step.link for step, _ in found):
        svg = draw_pairs(
            [pair_of(*each) for each in found if each[0].link == link],
            f"A step on {link}, predicted above recorded",
        )
        (folder / f"timelines-{link}.svg").write_text(svg, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in asdict(TimelineTask()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", default="200mbit", help="rate of the limited loopback, in tc's notation")
    parser.add_argument("--machine", type=Path, help="a file from calibrate (default: measure now)")
    parser.add_argument("--folder", type=Path, help="write table, pictures and traces here")
    parser.add_argument("--write", action="store_true", help="into results/, with the lessons' recording")
    parser.add_argument(
        "--again", action="store_true", help="predict the lessons' recording again, without running anything"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    task = TimelineTask(chosen.dp, chosen.count, chosen.side, chosen.steps)
    try:
        if chosen.inside:
            chosen.inside.write_bytes(pickle.dumps(record_cases(task)))
            return 0
        if chosen.again:
            recording = recorded()
            again = predict_recorded(recording)
            found = [(step, again[step.strategy, step.window, step.link]) for step in recording.steps]
            print(table(found))
            write(RESULTS, recording, found)
            return 0
        bytes_of(chosen.rate)
        machine, found = run(task, chosen.rate, read_machine(chosen.machine) if chosen.machine else None)
    except TutorialError as error:
        print(error, file=sys.stderr)
        return 2
    said = about(task, machine, chosen.rate, command_line("timelines", arguments))
    recording = Recording(said, asdict(task), asdict(machine), tuple(step for step, _ in found))
    print(table(found))
    if chosen.folder:
        write(chosen.folder, recording, found)
        for step, predicted in found:  # for Perfetto, the recorded and the predicted step
            path = chosen.folder / f"{step.strategy}-window{step.window}-{step.link}.json"
            path.write_text(json.dumps(side_by_side(predicted, step.timeline)), encoding="utf-8")
    if chosen.write:
        write(RESULTS, recording, found)
        recording.write(LESSONS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
