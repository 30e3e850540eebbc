"""Properties that every plan of every strategy has."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_tutorial import Grid, Matrix, Shard, owner, round_robin, zero1
from muon_tutorial.errors import StrategyError
from muon_tutorial.evidence.predict import predict
from muon_tutorial.plan.assign import gram_cost, longest_first, newton_schulz_cost
from muon_tutorial.plan.strategies import find_builder, plan_imbalance, work_by_position

from .cases import Case, cases
from .variants import VARIANTS

every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
@given(case=cases())
@settings(deadline=None, max_examples=20)
def test_every_matrix_is_in_one_bucket_of_its_kind_and_is_its_workers_work(variant: str, case: Case) -> None:
    """A matrix's workers are one owner, or whole tensor-parallel groups."""
    plan, tp = case.plan(VARIANTS[variant]), case.grid.size("tp")
    found = Counter(entry.matrix for bucket in plan.buckets for entry in bucket.entries)
    assert found == Counter(case.matrices)
    due = [0] * case.grid.at(0).size(*plan.buckets[0].axes)
    once = 0
    for number, bucket in enumerate(plan.buckets):
        positions = case.grid.at(0).size(*bucket.axes)
        kinds = {(e.matrix.group, e.matrix.dtype, e.matrix.grad_dtype) for e in bucket.entries}
        assert bucket.index == number
        assert len(kinds) == 1
        for entry in bucket.entries:
            workers = plan.workers(entry.matrix.index)
            assert workers
            assert all(0 <= position < positions for position in entry.workers)
            if variant.startswith(("owner", "layerwise")):
                assert len(workers) == case.grid.world_size // positions
            else:
                assert {case.grid.at(rank)["tp"] for rank in workers} == set(range(tp))
                assert len(workers) == len(entry.workers) * tp
            cost = newton_schulz_cost(entry.matrix.sides)
            once += cost
            if entry.gram is not None:
                assert variant == "gram"
                cost = gram_cost(entry.gram.side, entry.size)
            for position in entry.workers:
                due[position] += cost
    assert work_by_position(plan) == due
    assert plan_imbalance(plan) == max(due) * case.grid.world_size / once


@every_variant
@given(case=cases(), data=st.data())
@settings(deadline=None, max_examples=10)
def test_the_order_of_the_list_does_not_matter(variant: str, case: Case, data: st.DataObject) -> None:
    shuffled = Case(tuple(data.draw(st.permutations(case.matrices))), case.grid, case.round_bytes)
    assert shuffled.plan(VARIANTS[variant]) == case.plan(VARIANTS[variant])


@given(cases())
@settings(deadline=None, max_examples=20)
def test_turns_go_by_index(case: Case) -> None:
    robin, owned = case.plan(partial(round_robin, order="index")), case.plan(VARIANTS["owner, in turn"])
    for matrix in case.matrices:
        position = matrix.index % case.grid.size("dp")
        assert {case.grid.at(rank)["dp"] for rank in robin.workers(matrix.index)} == {position}
        assert owned.workers(matrix.index) == (matrix.index % case.grid.world_size,)


def test_owners_can_be_named() -> None:
    three = [Matrix(index, f"m{index}", (4, 4)) for index in range(3)]
    plan = owner(three, Grid.of(dp=2, tp=2), assign=[3, 0, 3])
    assert [plan.workers(index) for index in range(3)] == [(3,), (0,), (3,)]
    with pytest.raises(StrategyError, match="m1 is assigned to 4, which is not one of 4 ranks"):
        owner(three, Grid.of(dp=2, tp=2), assign=[0, 4, 0])


@pytest.mark.parametrize("round_bytes", [1, 10_000])
def test_owner_asks_for_two_exchanges_a_bucket_and_one_of_flags_an_axis(round_bytes: int) -> None:
    cuts = (("tp", Shard(1)), ("fsdp", Shard(0)))
    plan = owner(
        [Matrix(index, f"m{index}", (12, 20), cuts) for index in range(12)],
        Grid.of(fsdp=2, tp=2),
        round_bytes=round_bytes,
    )
    assert (len(plan.buckets) > 1) == (round_bytes == 1)
    for rank in plan.grid.ranks:
        entries = predict(plan, plan.grid.at(rank)).entries
        assert sum(entry.phase == "gradient flags" for entry in entries) == 2
        kinds = Counter(entry.kind for entry in entries if entry.phase != "gradient flags")
        assert kinds.keys() == {"all_to_all"}
        assert kinds["all_to_all"] <= 2 * len(plan.buckets)


def test_unknown_strategies_and_options_are_named() -> None:
    one, grid = [Matrix(0, "m", (4, 4))], Grid.of(dp=2)
    with pytest.raises(
        StrategyError,
        match="unknown strategy 'zero2'; known: gram, layerwise, owner, owner_per_replica, r",
    ):
        find_builder("zero2")
    with pytest.raises(StrategyError, match='gather="all" and gather="boundary"; got \'most\''):
        zero1(one, grid, gather="most")  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="got 'alphabet'"):
        round_robin(one, grid, order="alphabet")  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="got 'scatter'"):
        round_robin(one, grid, back="scatter")  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="got 'lottery'"):
        owner(one, grid, assign="lottery")  # type: ignore[arg-type]


def test_zero1_refuses_axes_over_which_nobody_would_average() -> None:
    one = [Matrix(0, "m", (4, 4))]
    with pytest.raises(StrategyError, match="would not average over 'data' of the grid data=2"):
        zero1(one, Grid.of(data=2))
    assert zero1(one, Grid.of(data=1, dp=2)).buckets


@pytest.mark.parametrize("builder", [zero1, VARIANTS["replicated"], round_robin, VARIANTS["gram"]])
def test_a_parameter_cut_along_dp_is_refused_by_name_where_it_has_to_be_whole(builder: object) -> None:
    cut = Matrix(0, "blocks.0.up", (4, 4), (("dp", Shard(0)),))
    with pytest.raises(StrategyError, match=r"blocks\.0\.up is sharded along 'dp'"):
        find_builder(builder)([cut], Grid.of(dp=2))  # type: ignore[arg-type]
    assert owner([cut], Grid.of(dp=2)).workers(0) == (0,)


@given(
    costs=st.lists(st.integers(0, 6), max_size=9),
    loads=st.lists(st.integers(0, 6), min_size=1, max_size=12),
)
def test_the_least_busy_position_gets_the_costliest_job_left(costs: list[int], loads: list[int]) -> None:
    """Jobs are shared as in this simple loop: the costliest job left goes to the least busy position."""
    owners, work = [0] * len(costs), [0] * len(loads)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        owners[job] = min(range(len(loads)), key=lambda at: (work[at], loads[at], at))
        work[owners[job]] += costs[job]
    reached = sorted(range(len(loads)), key=lambda at: loads[at])[: len(costs)]
    dealt = longest_first(costs, loads)
    shares = [
        sum(c for c, owner in zip(costs, dealt, strict=True) if owner == at) for at in range(len(loads))
    ]
    assert len(set(zip(dealt, owners, strict=True))) == len(set(dealt))  # the same sets of jobs
    assert len(set(dealt)) == len(set(owners))
    if len({loads[at] for at in reached}) <= 1:
        assert dealt == owners
    for one, other in itertools.combinations(reached, 2):
        assert loads[one] == loads[other] or shares[one] >= shares[other]
