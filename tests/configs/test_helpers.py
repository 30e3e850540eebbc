"""Every entry of the helper table, on real processes with real modules and backward passes: the single
process' parameters, to the bit, and Newton–Schulz exactly once per matrix in the whole world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from muon_tutorial.muon import Muon
from muon_tutorial.worlds.launch import launch

from .oracle import Oracle, counted
from .setups import HELPERS, SETUPS, fits, made_mesh

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
Case = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank saw of one case."""

    differences: list[str]
    orthogonalized: int


def run_cases(rank: int, cases: list[Case]) -> list[Outcome]:
    """Three training steps of each case beside the oracle's."""
    return [run_case(*case) for case in cases]


def run_case(name: str, helper: str) -> Outcome:
    setup = SETUPS[name]
    mesh = made_mesh(setup)
    rig = setup.build(mesh)
    oracle = Oracle(rig.params, rig.whole, **OPTIONS)
    muon = Muon(rig.params, **OPTIONS, distributed_config=HELPERS[helper](setup, rig, mesh))
    with counted() as counter:
        for step in range(STEPS):
            rig.backward(step)
            oracle.step()
            muon.step()
    return Outcome(oracle.differences(), len(counter.shapes))


CASES = [(name, helper) for name, setup in SETUPS.items() for helper in HELPERS if fits(setup, helper)]


@pytest.mark.live
@pytest.mark.parametrize("world_size", sorted({setup.world_size for setup in SETUPS.values()}))
def test_every_helper_equals_the_single_process(world_size: int) -> None:
    cases = [case for case in CASES if SETUPS[case[0]].world_size == world_size]
    by_rank = launch(run_cases, world_size, args=(cases,), limit=100)
    for number, case in enumerate(cases):
        outcomes = [found[number] for found in by_rank]
        assert [outcome.differences for outcome in outcomes] == [[]] * world_size, case
        orthogonalized = sum(outcome.orthogonalized for outcome in outcomes)
        assert orthogonalized == STEPS * SETUPS[case[0]].matrices, case


def run_replicated(rank: int) -> int:
    """How many matrices this rank orthogonalizes in one step where every rank does everything."""
    setup = SETUPS["dp"]
    mesh = made_mesh(setup)
    rig = setup.build(mesh)
    muon = Muon(rig.params, **OPTIONS, strategy="replicated", mesh=mesh)
    rig.backward(0)
    with counted() as counter:
        muon.step()
    return len(counter.shapes)


@pytest.mark.live
def test_the_same_counter_fails_for_replicated() -> None:
    setup = SETUPS["dp"]
    assert sum(launch(run_replicated, setup.world_size)) == setup.world_size * setup.matrices
