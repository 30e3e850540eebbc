"""On real processes, with real modules and backward passes, every entry of the helper table gives exactly the
single process's parameters, and runs Newton–Schulz exactly once per matrix in the whole world."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial import Muon, build_mesh, launch

from ..exhaustive import left_out
from .setups import HELPERS, MATRICES, SETUPS, Oracle, counted, error_of, hidden, mlp

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
Case = tuple[str, str]
Outcome = tuple[list[str], int]
"""One case on one rank: the differences, and the number of matrices it orthogonalized."""


def run_cases(rank: int, cases: list[Case]) -> list[Outcome]:
    """Three training steps of each case, compared with the oracle's."""
    return [run_case(*case) for case in cases]


def run_case(name: str, helper: str) -> Outcome:
    setup = SETUPS[name]
    mesh = build_mesh(setup.axes)
    rig = setup.build(mesh)
    oracle = Oracle(rig.params, rig.whole, **OPTIONS)
    muon = Muon(rig.params, **OPTIONS, distributed_config=HELPERS[helper](setup, rig.tp_dim, mesh))
    with counted() as counter:
        for step in range(STEPS):
            rig.backward(step)
            oracle.step()
            muon.step()
    return oracle.differences(), counter.call_count


# Plain parameters have no placements, so only two helpers can know how they are cut.
CASES = [
    (name, helper)
    for name, setup in SETUPS.items()
    for helper in HELPERS
    if setup.dtensors or helper in ("create_processgroup_config", "create_devicemesh_config")
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 3, 4, left_out(8)])  # the equality table has eight ranks
def test_every_helper_equals_the_single_process(world_size: int) -> None:
    cases = [case for case in CASES if SETUPS[case[0]].world_size == world_size]
    assert cases
    by_rank = launch(run_cases, world_size, args=(cases,), limit=500)
    for number, case in enumerate(cases):
        outcomes = [found[number] for found in by_rank]
        assert [differences for differences, _ in outcomes] == [[]] * world_size, case
        assert sum(orthogonalized for _, orthogonalized in outcomes) == STEPS * MATRICES, case


class NamedDDP(DistributedDataParallel):
    """A host's own subclass of DDP."""


def run_zero1(rank: int) -> list[tuple[str, str]]:
    """zero1's errors for parameters of a DDP module, of a class derived from DDP, and of no DDP module."""
    mesh = build_mesh(SETUPS["dp"].axes)
    rig, derived = SETUPS["dp"].build(mesh), NamedDDP(mlp())
    makers = [
        partial(Muon, params, **OPTIONS, strategy="zero1", mesh=mesh)
        for params in (rig.params, hidden(derived), hidden(mlp()))
    ]
    return [error_of(make) for make in makers]


def test_zero1_refuses_parameters_that_ddp_averages_already() -> None:
    for *refusals, other in launch(run_zero1, SETUPS["dp"].world_size):
        for kind, refusal in refusals:
            assert kind == "StrategyError"
            assert refusal.startswith("group 0, parameter 0 belongs to a DistributedDataParallel module")
        assert other == ("nothing", "")
