"""Timelines of real steps beside the timed world's: when each phase begins and ends, in one run.

python scripts/timelines.py                       # three minutes; prints a table
python scripts/timelines.py --write               # also results/timelines*, and the lessons' recording

Calibrates this machine, records steps of zero1 and owner with windows 1 and 3 on the loopback and, where the
machine can limit it (scripts/shaped.sh), on a bus of --rate, and compares each phase of each rank with what
the timed world says for the same plan. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import pickle
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from muon_tutorial.errors import TutorialError, UsageError
from muon_tutorial.evidence.predict import step_over_ones
from muon_tutorial.launching.launch import launch
from muon_tutorial.plan.grid import Grid
from muon_tutorial.plan.layout import Shard
from muon_tutorial.plan.matrix import Matrix
from muon_tutorial.plan.strategies import Plan, owner, zero1
from muon_tutorial.timing.calibrate import calibrate
from muon_tutorial.timing.machine import Link, Machine, read_machine
from muon_tutorial.timing.step_recorder import RankNotes, StepRecorder, record_walk, recorded_timeline
from muon_tutorial.timing.timed_world import TimedWorld
from muon_tutorial.timing.timeline import (
    RecordedStep,
    Recording,
    StepTimeline,
    compare_phases,
    middle,
    predicted_timeline,
)
from muon_tutorial.timing.timeline_picture import TimelinePair, draw_pairs
from muon_tutorial.worlds.live import LiveWorld, build_mesh

LESSONS = ROOT / "muon_tutorial" / "learn" / "inputs" / "recorded" / "timelines.json"
LOOPBACK = "loopback"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
IMPOSSIBLE = 77
WARMUP = 2


@dataclass(frozen=True, slots=True)
class Task:
    """What is run: a grid of ``dp``, and ``count`` matrices of ``side`` × ``side``."""

    dp: int
    count: int
    side: int
    steps: int

    def plan(self, strategy: str) -> Plan:
        """The plan of a strategy. ``owner`` expects each matrix cut over dp, as FSDP2 has it."""
        cuts = (("dp", Shard(0)),) if strategy == "owner" else ()
        matrices = [Matrix(i, f"m{i}", (self.side, self.side), cuts) for i in range(self.count)]
        build = {"zero1": zero1, "owner": owner}[strategy]
        return build(matrices, Grid.of(dp=self.dp), bucket_bytes=self.bucket_bytes(strategy))

    def bucket_bytes(self, strategy: str) -> int:
        """Two matrices a bucket; for ``owner`` a matrix for each rank, so that all have one to work on."""
        return 4 * self.side**2 * (2 if strategy == "zero1" else self.dp)


CASES = [(strategy, window) for strategy in ("zero1", "owner") for window in (1, 3)]


def record_ranks(rank: int, task: Task) -> list[list[RankNotes]]:
    """All cases on this rank, some steps each. Must be called by all ranks."""
    torch.set_num_threads(1)
    world = LiveWorld(build_mesh({"dp": task.dp}))
    found = []
    for strategy, window in CASES:
        step = step_over_ones(task.plan(strategy), world.at, torch.device("cpu"), window)
        recorder = StepRecorder(rank)
        notes = [record_walk(world, step.step(), recorder) for _ in range(WARMUP + task.steps)]
        found.append(notes[WARMUP:])
    return found


def record_cases(task: Task) -> list[StepTimeline]:
    """The median step of each case, recorded."""
    by_rank = launch(record_ranks, task.dp, args=(task,), timeout=120.0, output="quiet")
    steps = [zip(*(notes[case] for notes in by_rank), strict=True) for case in range(len(CASES))]
    return [middle([recorded_timeline(notes) for notes in case]) for case in steps]


def record_shaped(task: Task, rate: str) -> list[StepTimeline] | None:
    """The same behind a limited loopback; None where this machine cannot limit it."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found"
        inside = [sys.executable, __file__, "--inside", str(found), *_as_options(task)]
        ended = subprocess.run(["bash", str(ROOT / "scripts" / "shaped.sh"), rate, *inside], check=False)
        if ended.returncode == IMPOSSIBLE:
            return None
        ended.check_returncode()
        return pickle.loads(found.read_bytes())


def _as_options(task: Task) -> list[str]:
    return [word for name, value in asdict(task).items() for word in (f"--{name}", str(value))]


def predict_cases(task: Task, machine: Machine) -> list[StepTimeline]:
    """What the timed world says of each case."""
    found, meta = [], torch.device("meta")
    for strategy, window in CASES:
        plan = task.plan(strategy)
        steps = [step_over_ones(plan, plan.grid.at(rank), meta, window) for rank in plan.grid.ranks]
        found.append(predicted_timeline(TimedWorld(plan.grid, machine).run([one.step() for one in steps])))
    return found


def bytes_of(rate: str) -> float:
    """Bytes a second of a rate as tc writes it.

    >>> bytes_of("200mbit")
    25000000.0
    """
    for unit, bits in UNITS.items():
        if rate.endswith(unit) and rate.removesuffix(unit).replace(".", "", 1).isdigit():
            return float(rate.removesuffix(unit)) * bits / 8
    raise UsageError(f"a rate is a number and a unit, such as 200mbit or 1gbit; got {rate!r}")


def on_bus(machine: Machine, rate: str) -> Machine:
    """The machine, whose ranks share a loopback of so many bytes a second."""
    return replace(machine, inside=Link(bytes_of(rate), machine.inside.latency, shared=True))


def table(pairs: Sequence[tuple[str, TimelinePair]]) -> str:
    """For each case: seconds predicted and recorded, and how far phases are off."""
    head = "| link | step | predicted, ms | recorded, ms | phases | worst begin or end | within 15 % |"
    lines = [head, "|" + "---|" * 7]
    for link, pair in pairs:
        gaps = compare_phases(pair.predicted, pair.recorded)
        within = sum(gap.worst <= 0.15 for gap in gaps) / len(gaps)
        times = f"{1000 * pair.predicted.seconds:.1f} | {1000 * pair.recorded.seconds:.1f}"
        lines.append(f"| {link} | {pair.name} | {times} | {len(gaps)} | {pair.worst:.1%} | {within:.0%} |")
    return "\n".join(lines)


def about(task: Task, machine: Machine, rate: str) -> dict[str, str]:
    """What a recording is of."""
    cores = f"{machine.cores} cores" if machine.cores else "GPUs"
    return {
        "machine": f"{platform.machine()}, {cores}, {task.dp} ranks, one thread each",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "link": f"Gloo over the loopback; shaped: a bus of {rate} for all ranks (scripts/shaped.sh)",
        "step": f"{task.count} matrices of {task.side} × {task.side}, the median of {task.steps} steps",
        "command": "python scripts/timelines.py --write",
    }


def run(task: Task, rate: str, machine: Machine) -> list[tuple[str, RecordedStep, StepTimeline]]:
    """All cases on both links: what was recorded, and what was predicted."""
    bytes_of(rate)
    links = {LOOPBACK: (machine, record_cases(task), None)}
    shaped = record_shaped(task, rate)
    if shaped is None:
        print("This machine cannot limit its loopback: only that is measured.", file=sys.stderr)
    else:
        links[rate] = on_bus(machine, rate), shaped, bytes_of(rate)
    return [
        (link, RecordedStep(strategy, window, link, per_second, recorded), predicted)
        for link, (such, found, per_second) in links.items()
        for (strategy, window), recorded, predicted in zip(
            CASES, found, predict_cases(task, such), strict=True
        )
    ]


def named_pairs(found: Sequence[tuple[str, RecordedStep, StepTimeline]]) -> list[tuple[str, TimelinePair]]:
    """Each case by its link, with a name."""
    return [
        (link, TimelinePair(f"{step.strategy}, window {step.window}", predicted, step.timeline))
        for link, step, predicted in found
    ]


def write(folder: Path, recording: Recording, pairs: Sequence[tuple[str, TimelinePair]]) -> None:
    """The table and a picture for each link into a folder."""
    said = "\n".join(f"- {name}: {value}" for name, value in recording.about.items())
    folder.mkdir(parents=True, exist_ok=True)
    text = f"# Timelines, predicted and recorded\n\n{said}\n\n{table(pairs)}\n"
    (folder / "timelines.md").write_text(text, encoding="utf-8")
    for link in dict.fromkeys(link for link, _ in pairs):
        mine = [pair for one, pair in pairs if one == link]
        svg = draw_pairs(mine, f"A step on {link}, predicted above recorded")
        (folder / f"timelines-{link}.svg").write_text(svg, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Measure, compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in asdict(Task(4, 12, 384, 5)).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", default="200mbit", help="of the limited loopback, as tc writes it")
    parser.add_argument("--machine", type=Path, help="a file that calibrate wrote (else it is measured now)")
    parser.add_argument("--folder", type=Path, help="write table and pictures here")
    parser.add_argument("--write", action="store_true", help="into results/, with the lessons' recording")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    task = Task(chosen.dp, chosen.count, chosen.side, chosen.steps)
    try:
        if chosen.inside:
            chosen.inside.write_bytes(pickle.dumps(record_cases(task)))
            return 0
        machine = read_machine(chosen.machine) if chosen.machine else calibrate()
        found = run(task, chosen.rate, machine)
    except TutorialError as error:
        print(error, file=sys.stderr)
        return 2
    pairs = named_pairs(found)
    recording = Recording(
        about(task, machine, chosen.rate), asdict(machine), tuple(step for _, step, _ in found)
    )
    print(table(pairs))
    for folder in [ROOT / "results"] * chosen.write + [chosen.folder] * bool(chosen.folder):
        write(folder, recording, pairs)
    if chosen.write:
        recording.write(LESSONS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
