"""Compares predicted seconds of a step with measured ones, over an unlimited and a limited loopback.

    python scripts/step_times.py

measures more than sixty configurations and predicts them from a machine that is calibrated before and after
each link's runs. It also times gradients that are sent during and after backward, and writes
results/step_times.md, step_times.json and step_times.svg. It takes ten minutes, and nothing else should run.
With --again it runs nothing, and only predicts the stored measurements again. A limited loopback needs Linux,
network namespaces and tc (scripts/shaped.sh); without them those rows are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # its checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"

from muon_tutorial.evidence.tables import Table
from muon_tutorial.timing.calibrate import average_machines, calibrate
from muon_tutorial.timing.machine import Machine, machine_from, read_machine
from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks import overlap, step_times
from scripts.lab.benchmarks.overlap import OverlapCase, OverlapSeconds
from scripts.lab.benchmarks.step_times import Measured
from scripts.shaped import run_shaped

ROUNDS = {None: 7, 1000: 5, 200: 3, 50: 3}
"""Timed steps on each link; fewer on slow links, which take longer and vary less."""
OVERLAP_LINKS, OVERLAP_ROUNDS = (None, 200), 7


def main(arguments: list[str] | None = None) -> int:
    """Measure, predict, compare, write."""
    parser = results.result_parser(__doc__)
    parser.add_argument("--machine", type=Path, help="a calibrated machine's file; default: calibrate now")
    parser.add_argument(
        "--again", action="store_true", help="predict the stored measurements again, without running anything"
    )
    parser.add_argument("--measure", nargs=2, metavar=("MBIT", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.measure:
        mbit, file = asked.measure
        Path(file).write_text(json.dumps(measure(int(mbit))))
        return 0
    out = made(asked.out)
    if asked.again:
        predict_again(results.RESULTS / "step_times.json", out)
        return 0
    command = results.command_line("step_times", arguments)
    rounds = ", ".join(f"{count} on {step_times.link_text(mbit)}" for mbit, count in ROUNDS.items())
    facts = results.machine_facts(command)
    about = {**facts, "ranks": "2, 4 or 8, one thread each, Gloo", "rounds": rounds}
    machines: dict[str, Machine] = {}
    steps: list[Measured] = []
    overlaps: list[tuple[OverlapCase, OverlapSeconds]] = []
    for mbit in ROUNDS:
        link = step_times.link_text(mbit)
        results.say(f"{link}: calibrating")  # before and after, since a shared machine's speed changes
        before = read_machine(asked.machine) if asked.machine else calibrate()
        results.say(f"{link}: measuring")
        if mbit is None:
            found = measure(mbit)
        elif text := run_shaped(f"{mbit}mbit", __file__, ["--measure", str(mbit)]):
            found = json.loads(text)
        else:  # this machine cannot limit its loopback
            continue
        machines[link] = before if asked.machine else average_machines(before, calibrate())
        steps += zip(step_times.cases(mbit), found["steps"], strict=True)
        its = (OverlapSeconds(**one) for one in found["overlaps"])
        overlaps += zip(overlap_cases(mbit), its, strict=True)
    write_all(out, about, machines, steps, overlap.overlap_table(overlaps, command))
    return 0


def predict_again(kept: Path, out: Path) -> None:
    """Write everything again from stored measurements and calibrations."""
    held, tables = json.loads(kept.read_text(encoding="utf-8")), results.read_tables(kept)
    measured: Sequence[dict[str, Any]] = tables[step_times.TITLE].rows
    cases = {step_times.named(case): case for mbit in ROUNDS for case in step_times.cases(mbit)}
    steps = [
        (cases[tuple(row[name] for name in step_times.NAMES)], row["measured ms"] / 1000) for row in measured
    ]
    machines = {link: machine_from(machine) for link, machine in held["machines"].items()}
    write_all(out, held["facts"], machines, steps, tables[overlap.TITLE])


def write_all(
    out: Path,
    about: dict[str, Any],
    machines: Mapping[str, Machine],
    steps: list[Measured],
    reductions: Table,
) -> None:
    """Predict all steps; write the tables, the plot, and each link's calibrated machine."""
    said = [step_times.predict_step(case, machines[case.link]).seconds for case, _ in steps]
    command = about["command"]
    tables = [
        step_times.accuracy_table(steps, said, command),
        reductions,
        step_times.windows_table(steps, said, command),
        step_times.steps_table(steps, said, command),
    ]
    scatter(out / "step_times.svg", steps, said)
    shown = {"step_times.svg": "Predicted over measured milliseconds of a step, a point a configuration"}
    held = {link: json.loads(machine.text()) for link, machine in machines.items()}
    results.write_results(out, "step_times", "Seconds of a step", "", about, tables, shown, machines=held)
    print(results.markdown(tables[:2]))


def overlap_cases(mbit: int | None) -> list[OverlapCase]:
    """The cases of reduction during backward on a link: as many ranks as cores, and twice as many."""
    link = step_times.link_text(mbit)
    ranks = (2, 4) if mbit is None else (2,)
    return [
        OverlapCase(strategy, count, overlap.TOKENS, link)
        for strategy in overlap.BUILDERS
        for count in ranks
        if mbit in OVERLAP_LINKS
    ]


def measure(mbit: int | None) -> dict[str, Any]:
    """Seconds of a link's cases, over the loopback that this process has."""
    overlaps = overlap.measure_overlap(overlap_cases(mbit), OVERLAP_ROUNDS)
    return {
        "steps": step_times.measure_steps(step_times.cases(mbit), ROUNDS[mbit]),
        "overlaps": [asdict(one) for one in overlaps],
    }


def scatter(path: Path, steps: list[Measured], said: list[float]) -> None:
    """Draw predicted over measured, both axes logarithmic, one colour per link; dotted lines are 20 % off."""
    with results.plotted(path, figsize=(7, 6)) as axes:
        for link in dict.fromkeys(case.link for case, _ in steps):
            points = [
                (1e3 * seen, 1e3 * its)
                for (case, seen), its in zip(steps, said, strict=True)
                if case.link == link
            ]
            axes.loglog(*zip(*points, strict=True), "o", ms=5, alpha=0.7, label=link)
        seconds = [seen for _, seen in steps]
        ends = [0.8e3 * min(seconds), 1.25e3 * max(seconds)]
        for factor, style in ((1.0, "-"), (0.8, ":"), (1.2, ":")):
            axes.plot(ends, [factor * end for end in ends], style, color="0.4", lw=1)
        axes.set_xlabel("measured ms of a step")
        axes.set_ylabel("predicted ms of a step")
        axes.legend(title="the line is exact; dotted, 20 % off")


if __name__ == "__main__":
    raise SystemExit(main())
