"""Runs cases of data faults on the ranks of one launch, or with all ranks in this process."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from muon_tutorial import Coordinate, Grid, LiveWorld, LocalWorld, TutorialError, build_mesh

from . import job
from .case import STRUCK, Case, RankRecord
from .data_faults import FAULTS, HUGE, NO_GRADIENT, OVERFLOW, DataFault, blueprint_for
from .job import Blueprint, Given, Rig


def play(rank: int, case: Case, folder: str) -> RankRecord:
    """Run one case on this rank: build, step, and record the result. All ranks must call it.

    If ranks may make different calls (``out_of_step``), errors are raised, so that the launch reports them.
    """
    world = LiveWorld(build_mesh(Grid.of(dp=case.dp, tp=case.tp)))
    fault, begun, mine = FAULTS[case.kind], time.monotonic(), is_faulty(case, world.at)
    if mine:
        Path(folder, STRUCK).write_text(str(begun), encoding="utf-8")
    rig, before, step = None, "", 0
    try:
        rig = job.build(faulty_blueprint(case, world.at), world)
        for step in range(job.STEPS):
            rig.muon.zero_grad()
            rig.give(step)
            if step == job.FAULT_AT:
                begun = time.monotonic()
                if fault.ready:
                    rig.muon.ready_gradients()
                if fault.strike is not None and mine:
                    fault.strike(rig, case.random)
            before = rig.digest()
            for _ in range(fault.turns if step == job.FAULT_AT and mine else 1):
                rig.muon.step()
    except Exception as error:
        if fault.out_of_step:
            raise
        record = _refused(case, world.at, error, begun)
        if rig is None:
            return record
        if not fault.needs_guard:  # if ``needs_guard``, the fault itself has changed data
            record = replace(record, unchanged=rig.digest() == before)
        return _go_on(case, fault, rig, step, record)
    equal = equals_oracle(case, rig, _given(case, rig))
    return RankRecord(rank, equal=equal, seconds=time.monotonic() - begun)


def is_faulty(case: Case, at: Coordinate) -> bool:
    return case.rank is None or case.rank == at.rank


def faulty_blueprint(case: Case, at: Coordinate) -> Blueprint:
    plan, fault = blueprint_for(case.kind, case.strategy), FAULTS[case.kind]
    if fault.build is None or not is_faulty(case, at):
        return plan
    return fault.build(plan, case.random)


def equals_oracle(case: Case, rig: Rig, given: Given | None = None) -> bool:
    """Whether this rank ended with the same matrices as one process with the same gradients."""
    plan = rig.blueprint if case.rank is None else blueprint_for(case.kind, case.strategy)
    return rig.equals(job.oracle(plan, given))


def _given(case: Case, rig: Rig) -> Given | None:
    """How a fault that was not refused changes the mean gradients; None if they stay the same."""
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
    """After a refusal, repair the fault, and check whether training then ends with the oracle's bits."""
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
