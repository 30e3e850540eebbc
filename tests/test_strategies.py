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
from muon_tutorial.plan.strategies import Builder, Plan, owner

from .exhaustive import left_out
from .oracle import UNEVEN, assert_own_parts, seated, single_process, whole_gradients
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
