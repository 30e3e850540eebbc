"""For the same full gradients, every strategy except ``gram`` gives exactly the single process's parameters,
on every grid. ``step/test_gram.py`` checks the bound of ``gram``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from muon_tutorial import Grid, Matrix
from muon_tutorial.errors import StrategyError
from muon_tutorial.plan.layout import Shard
from muon_tutorial.plan.strategies import Builder, Plan, layerwise, owner

from .exhaustive import left_out
from .oracle import UNEVEN, Case, assert_own_parts, seated, single_process, whole_gradients
from .plan import variants

GRIDS = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (3, 2), (4, 2))
SMALL_BUCKETS = 400


def all_on_the_last_rank(matrices: Sequence[Matrix], grid: Grid, **options: Any) -> Plan:
    """A throwaway strategy: adding one takes only a builder and a row below."""
    return owner(matrices, grid, assign=[grid.world_size - 1] * len(matrices), **options)


VARIANTS: dict[str, Builder] = {
    **{name: variants.VARIANTS[name] for name in variants.BITWISE},
    "throwaway": all_on_the_last_rank,
}


CASES = [
    *((sizes, torch.float32) for sizes in GRIDS),
    *((sizes, torch.bfloat16) if sizes == (2, 2) else left_out(sizes, torch.bfloat16) for sizes in GRIDS),
]


@pytest.mark.parametrize(("sizes", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("strategy", VARIANTS)
def test_in_process_equals_single_process(strategy: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """``configs/test_table.py`` has real processes."""
    grid, case = Grid.of(dp=sizes[0], tp=sizes[1]), replace(UNEVEN, dtype=dtype)
    ranks = seated(grid, partial(VARIANTS[strategy], round_bytes=SMALL_BUCKETS), case)
    ranks.steps(whole_gradients(case))
    assert_own_parts(ranks.params, single_process(case), case, grid)


def joined(left_out: int, repeated: int, numbered: bool, matrices: Sequence[Matrix], grid: Grid) -> Plan:
    """A user's strategy that takes each matrix from one of two plans."""
    few, many = layerwise(matrices[left_out:2], grid), layerwise(matrices[2 - repeated :], grid)
    buckets = [*few.buckets, *many.buckets]
    return replace(
        few,
        strategy="joined",
        buckets=tuple(replace(it, index=i, round=i) for i, it in enumerate(buckets))
        if numbered
        else tuple(buckets),
    )


def test_a_strategy_of_ones_own_steps_each_matrix_once() -> None:
    grid = Grid.of(dp=2)
    ranks = seated(grid, partial(joined, 0, 0, True))
    ranks.steps(whole_gradients(UNEVEN))
    assert_own_parts(ranks.params, single_process(UNEVEN), UNEVEN, grid)
    for wrong, said in (((1, 0, True), "0 is in 0"), ((0, 1, True), "1 is in 2"), ((0, 0, False), "0, 1, …")):
        with pytest.raises(StrategyError, match=f"the plan of strategy 'joined' .*{said}"):
            seated(grid, partial(joined, *wrong))


@pytest.mark.parametrize("strategy", ["replicated", "zero1", "layerwise", "gram"])
def test_an_empty_matrix_may_be_cut_along_its_long_side(strategy: str) -> None:
    grid, case = Grid.of(tp=2), Case(shapes=((0, 6), (4, 6), (6, 4)), cuts=(Shard(1), Shard(1), Shard(0)))
    ranks = seated(grid, strategy, case)
    ranks.steps(whole_gradients(case))
    if strategy != "gram":
        assert_own_parts(ranks.params, single_process(case), case, grid)
