"""Data faults on real ranks: many cases in one launch, as long as they leave the ranks in step.

After each case the ranks exchange their observations over a separate group. If one of them met an error
that is not the package's, the remaining cases are left to another launch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muon_tutorial.errors import TutorialError
from muon_tutorial.plan.grid import Coordinate, Grid
from muon_tutorial.worlds.live import LiveWorld, build_mesh, gather_objects
from muon_tutorial.worlds.local import LocalWorld

from . import job
from .case import STRUCK, TIMEOUT, Case, RankRecord
from .data_faults import FAULTS, HUGE, NO_GRADIENT, OVERFLOW, DataFault, blueprint_for
from .job import Blueprint, Given, Rig

BEGUN = "begun"


def play_cases(rank: int, cases: Sequence[Case], folder: str) -> int:
    """Run cases of one grid, and write this rank's record of each; returns the number of cases run."""
    world = LiveWorld(build_mesh(Grid.of(dp=cases[0].dp, tp=cases[0].tp)))
    aside = dist.new_group(timeout=timedelta(seconds=10 * TIMEOUT))
    for done, case in enumerate(cases):
        note(folder, rank, case.number, BEGUN)
        record = play(case, world)
        note(folder, rank, case.number, asdict(record))
        if not all(gather_objects(record.named, aside)):
            return done + 1
    return len(cases)


def note(folder: str, rank: int, number: int, what: Any) -> None:
    """Add a line to this rank's file."""
    with open(Path(folder, f"rank{rank}.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps([number, time.monotonic(), what]) + "\n")


def read_notes(folder: str, ranks: int) -> dict[int, dict[int, Any]]:
    """Each rank's last note on each case: number → rank → record, or (BEGUN, when)."""
    found: dict[int, dict[int, Any]] = {}
    for rank in range(ranks):
        path = Path(folder, f"rank{rank}.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            number, when, what = json.loads(line)
            seen = (BEGUN, when) if what == BEGUN else RankRecord(**what)
            found.setdefault(number, {})[rank] = seen
    return found


def play(case: Case, world: LiveWorld) -> RankRecord:
    """Run one case on this rank: build, step, and record the result."""
    fault, begun = FAULTS[case.kind], time.monotonic()
    try:
        rig = job.build(faulty_blueprint(case, world.at), world)
    except Exception as error:
        return _refused(case, world.at, error, begun)
    before, step = "", 0
    try:
        for step in range(job.STEPS):
            rig.give(step)
            if step == job.FAULT_AT:
                begun = time.monotonic()
                disturb(case, fault, rig)
            before = rig.digest()
            rig.muon.step()
    except Exception as error:
        record = _refused(case, world.at, error, begun)
        if not fault.needs_guard:  # what needs the guard has changed data already
            record = replace(record, unchanged=rig.digest() == before)
        return _go_on(case, fault, rig, step, record)
    equal = equals_oracle(case, rig, _given(case, rig))
    return RankRecord(world.at.rank, equal=equal, seconds=time.monotonic() - begun)


def disturb(case: Case, fault: DataFault, rig: Rig) -> None:
    """Strike if this rank is the faulty one."""
    if fault.ready:
        rig.muon.ready_gradients()
    if fault.strike is not None and is_faulty(case, rig.at):
        fault.strike(rig, case.random)


def is_faulty(case: Case, at: Coordinate) -> bool:
    """Whether this rank is faulty."""
    return case.rank is None or case.rank == at.rank


def faulty_blueprint(case: Case, at: Coordinate) -> Blueprint:
    """The blueprint of this rank in a case."""
    plan, fault = blueprint_for(case.kind, case.strategy), FAULTS[case.kind]
    if fault.build is None or not is_faulty(case, at):
        return plan
    return fault.build(plan, case.random)


def equals_oracle(case: Case, rig: Rig, given: Given | None = None) -> bool:
    """Whether this rank ended with the same matrices as one process with the same gradients."""
    plan = rig.blueprint if case.rank is None else blueprint_for(case.kind, case.strategy)
    return rig.equals(job.oracle(plan, given))


def _given(case: Case, rig: Rig) -> Given | None:
    """How a fault that was not refused changes the mean gradients; None if it does not."""
    if case.kind == OVERFLOW:
        return lambda step, index, grad: torch.full_like(grad, HUGE)
    if case.kind not in NO_GRADIENT or not rig.blueprint.averages or case.rank is None:
        return None
    return job.without_share(rig, case.random.choice(list(rig.params)), rig.at.grid.at(case.rank))


def _refused(case: Case, at: Coordinate, error: Exception, begun: float) -> RankRecord:
    named, text = isinstance(error, TutorialError), str(error)
    seconds = time.monotonic() - begun
    return RankRecord(at.rank, text or repr(error), type(error).__name__, named, seconds=seconds)


def _go_on(case: Case, fault: DataFault, rig: Rig, step: int, record: RankRecord) -> RankRecord:
    """After a refusal: repair, and check whether training goes on to the oracle's bits."""
    if not (record.named and fault.repairable):
        return record
    try:
        if fault.repair is not None:
            fault.repair(rig)
        for later in range(step, job.STEPS):
            rig.muon.zero_grad()
            rig.give(later)
            rig.muon.step()
    except Exception as error:
        said = f"{record.error} [then, repaired: {type(error).__name__}: {error}]"
        return replace(record, error=said, named=isinstance(error, TutorialError))
    return replace(record, equal=equals_oracle(case, rig))


def play_locally(case: Case) -> list[RankRecord]:
    """Run a case with all ranks in this process."""
    fault, begun, grid = FAULTS[case.kind], time.monotonic(), Grid.of(dp=case.dp, tp=case.tp)
    world = LocalWorld(grid)
    rigs: list[Rig] = []
    before: list[str] = []
    try:
        rigs += [job.build(faulty_blueprint(case, grid.at(r)), world.mesh(r)) for r in grid.ranks]
        for step in range(job.STEPS):
            for rig in rigs:
                rig.muon.zero_grad()
                rig.give(step)
                if step == job.FAULT_AT and fault.strike is not None and is_faulty(case, rig.at):
                    fault.strike(rig, case.random)
            before = [rig.digest() for rig in rigs]
            world.run([rig.muon.program() for rig in rigs])
    except Exception as error:
        unchanged = [rig.digest() for rig in rigs] == before if before else None
        record = replace(_refused(case, grid.at(0), error, begun), unchanged=unchanged)
        return [replace(record, rank=rank) for rank in grid.ranks]
    return [RankRecord(rig.at.rank, equal=equals_oracle(case, rig, _given(case, rig))) for rig in rigs]


def play_alone(rank: int, case: Case, folder: str) -> RankRecord:
    """Run one case in a launch of its own, which reports the errors."""
    world = LiveWorld(build_mesh(Grid.of(dp=case.dp, tp=case.tp)))
    fault = FAULTS[case.kind]
    if is_faulty(case, world.at):
        Path(folder, STRUCK).write_text(str(time.monotonic()), encoding="utf-8")
    rig = job.build(faulty_blueprint(case, world.at), world)
    for step in range(job.STEPS):
        rig.muon.zero_grad()
        rig.give(step)
        if step == job.FAULT_AT:
            disturb(case, fault, rig)
        for _ in range(fault.turns if step == job.FAULT_AT and is_faulty(case, world.at) else 1):
            rig.muon.step()
    return RankRecord(rank, equal=equals_oracle(case, rig, _given(case, rig)))
