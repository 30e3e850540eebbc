"""For the same full gradients, every strategy except ``gram`` gives exactly the single process's parameters,
on every grid. ``step/test_gram.py`` checks the bound of ``gram``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from muon_tutorial import Grid, LiveWorld, Matrix, build_mesh, launch
from muon_tutorial.plan.strategies import Builder, Plan, owner

from .exhaustive import left_out
from .oracle import (
    UNEVEN,
    Case,
    assert_own_parts,
    give_gradients,
    one_rank,
    seated,
    single_process,
    whole_gradients,
)
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


def on_a_process(rank: int, jobs: list[tuple[Case, str, Grid]]) -> list[list[Tensor]]:
    """The parameters of this real rank after each job's steps. All grids use the same processes."""
    found = []
    for case, strategy, grid in jobs:
        world = LiveWorld(build_mesh(grid))
        params, muon = one_rank(case, partial(VARIANTS[strategy], round_bytes=SMALL_BUCKETS), world)
        for grads in whole_gradients(case):
            give_gradients(params, grads, case, world.at)
            muon.step()
        found.append([param.detach() for param in params])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, left_out(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("sizes", [left_out(it) if it in ((1, 1), (2, 2)) else it for it in GRIDS], ids=str)
@pytest.mark.parametrize("strategy", VARIANTS)
def test_in_process_equals_single_process(strategy: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Real processes do the same on 1 × 1 and 2 × 2."""
    grid, case = Grid.of(dp=sizes[0], tp=sizes[1]), replace(UNEVEN, dtype=dtype)
    ranks = seated(grid, partial(VARIANTS[strategy], round_bytes=SMALL_BUCKETS), case)
    ranks.steps(whole_gradients(case))
    assert_own_parts(ranks.params, single_process(case), case, grid)


@pytest.mark.parametrize("world_size", [1, 2, left_out(3), 4, left_out(6), 8])
def test_real_processes_equal_single_process(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")  # torch's checks would take most of the time
    grids = [Grid.of(dp=dp, tp=tp) for dp, tp in GRIDS if dp * tp == world_size]
    jobs = [
        (replace(UNEVEN, dtype=dtype), strategy, grid)
        for grid in grids
        for dtype in (torch.float32, torch.bfloat16)
        for strategy in VARIANTS
    ]
    by_rank = launch(on_a_process, world_size, args=(jobs,))
    for (case, _, grid), live in zip(jobs, zip(*by_rank, strict=True), strict=True):
        assert_own_parts(live, single_process(case), case, grid)
