"""The order rule: in any window and interleaving, all ranks of a group make their requests in one order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_tutorial import Grid, LocalWorld, Matrix, Shard
from muon_tutorial.engine.collective import Walk
from muon_tutorial.errors import RequestError
from muon_tutorial.evidence.predict import step_over_ones
from muon_tutorial.plan.strategies import Plan, zero1
from muon_tutorial.step import orthogonalize
from muon_tutorial.step.step import PlanStep
from muon_tutorial.worlds.compare_plans import describe_plan
from muon_tutorial.worlds.shadow import requests_of

from ..plan.cases import Case, cases
from ..plan.variants import VARIANTS

plans = st.builds(lambda case, builder: case.plan(builder), cases(), st.sampled_from(list(VARIANTS.values())))


def steps(plan: Plan, window: int) -> list[PlanStep]:
    return [step_over_ones(plan, plan.grid.at(rank), torch.device("cpu"), window) for rank in plan.grid.ranks]


def sequences(plan: Plan, window: int) -> dict[tuple[int, ...], list[list[str]]]:
    """For each group, the sequence of requests that each of its members issues."""
    issued = {step.at.rank: requests_of(step.walk()) for step in steps(plan, window)}
    groups = {plan.grid.at(rank).group(axis): axis for rank in plan.grid.ranks for axis in plan.grid.axes}
    return {
        group: [[f"{it.kind} {it.label}" for it in issued[rank] if axis in it.axes] for rank in group]
        for group, axis in groups.items()
    }


@given(plans, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_members_of_a_group_issue_the_same_sequence_under_every_window(plan: Plan, window: int) -> None:
    for group, members in sequences(plan, window).items():
        assert all(member == members[0] for member in members), group


@pytest.fixture
def torn_plan() -> Plan:
    """Two rounds on a 2×2 grid; in the first, one dp position works on one matrix, and the other on four."""
    rows = (16, 2, 2, 2, 16)
    matrices = [Matrix(index, f"m{index}", (rows[index], 4), (("tp", Shard(0)),)) for index in range(5)]
    return zero1(matrices, Grid.of(dp=2, tp=2), cut="bucket", round_bytes=176)


def test_ranks_that_leave_out_empty_turns_are_seen(torn_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_out(route: object) -> Walk:
        return
        yield

    assert all(member == members[0] for members in sequences(torn_plan, 2).values() for member in members)
    monkeypatch.setattr(orthogonalize, "stand_by", leave_out)
    assert any(member != members[0] for members in sequences(torn_plan, 2).values() for member in members)
    with pytest.raises(RequestError, match="rank"):
        LocalWorld(torn_plan.grid).run([step.walk() for step in steps(torn_plan, 2)])


@given(cases())
@settings(max_examples=5, deadline=None)  # each example runs all strategies
def test_ranks_whose_plans_travel_otherwise_are_described_otherwise(case: Case) -> None:
    """If two plans have equal descriptions, their requests are equal; some plans differ only in options."""
    told: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for name, builder in VARIANTS.items():
        plan = case.plan(builder)
        step = step_over_ones(plan, plan.grid.at(0), torch.device("meta"))
        asks = [f"{request}" for request in requests_of(step.walk())]
        other, known = told.setdefault(tuple(describe_plan(plan)), (name, asks))
        assert asks == known, (name, other)
