"""Holdings: ranks' boxes partition or copy a matrix, and layers show which."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_tutorial import Grid, Matrix, Plan, Shard, replicated, zero1
from muon_tutorial.learn.pictures.holdings import (
    compute_holdings,
    holders_of,
    momentum_holdings,
    name_contents,
    weight_holdings,
)

SIZES = st.integers(1, 12)
RANKS = st.integers(1, 4)


def plan_of(builder: object, shape: tuple[int, int], dp: int, tp: int, dim: int = 1) -> Plan:
    first, second = ("tp", Shard(0)), ("tp", Shard(dim))
    matrices = [Matrix(0, "first", (5, 7), (first,)), Matrix(1, "second", shape, (second,))]
    return builder(matrices, Grid.of(dp=dp, tp=tp))  # type: ignore[operator]


@given(rows=SIZES, columns=SIZES, dp=RANKS, tp=RANKS, dim=st.sampled_from((0, 1)))
def test_zero1_momentum_has_one_holder_for_each_element(
    rows: int, columns: int, dp: int, tp: int, dim: int
) -> None:
    held = momentum_holdings(plan_of(zero1, (rows, columns), dp, tp, dim), 1)
    count = torch.zeros(rows, columns, dtype=torch.int64)
    for item in held:
        for box in item.boxes:
            count[box.slices] += 1
    assert (count == 1).all()


@given(rows=SIZES, columns=SIZES, dp=RANKS, tp=RANKS)
def test_dp_reads_as_copies_and_tp_as_cuts(rows: int, columns: int, dp: int, tp: int) -> None:
    plan = plan_of(zero1, (rows, columns), dp, tp)
    held = weight_holdings(plan, 1)
    for column in range(columns):
        holders = holders_of(held, 0, column)
        assert len(holders) == dp
        assert len({plan.grid.at(rank)["tp"] for rank in holders}) == 1


def test_replicated_momentum_is_copied_as_the_weight_is_and_newton_schulz_sees_all_where_it_works() -> None:
    plan = plan_of(replicated, (6, 8), 2, 2)
    assert momentum_holdings(plan, 1) == weight_holdings(plan, 1)
    held = compute_holdings(plan_of(zero1, (6, 8), 2, 2), 1)
    assert {box.shape for item in held for box in item.boxes} == {(6, 8)}


def test_contents_are_named_by_their_bytes_and_letters_do_not_run_out() -> None:
    one, other = torch.zeros(4), torch.tensor([0.0, -0.0, 0.0, 0.0])
    assert name_contents([one, other, one.clone()]) == ["A", "B", "A"]
    assert name_contents([one.view(2, 2), one]) == ["A", "B"]
    names = name_contents([torch.tensor(number) for number in range(60)])
    assert len(set(names)) == 60
    assert names[26] == "A2"
