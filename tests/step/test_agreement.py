"""The tiny agreed flag of each step: missing and non-finite gradients end alike on every rank."""

from __future__ import annotations

import pytest

from muon_tutorial.errors import GradientError
from muon_tutorial.launching.launch import launch
from muon_tutorial.plan.grid import Grid
from muon_tutorial.plan.strategies import STRATEGIES
from muon_tutorial.worlds.live import LiveWorld, build_mesh

from ..oracle import (
    UNEVEN,
    assert_own_parts,
    give_gradients,
    one_rank,
    seated,
    whole_gradients,
    whole_matrices,
)

GRID = Grid.of(dp=2, tp=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_spoilt_gradient_is_named_and_changes_nothing(strategy: str, value: float) -> None:
    ranks = seated(GRID, strategy)
    ranks.give(next(whole_gradients(UNEVEN)))
    spoilt = ranks.params[3][4].grad
    assert spoilt is not None
    spoilt[-1, -1] = value
    with pytest.raises(GradientError, match=r"parameter 4 holds NaN or infinity on 1 of 4 ranks"):
        ranks.step()
    assert_own_parts(ranks.params, whole_matrices(UNEVEN), UNEVEN, GRID)
    assert not any(state["momentum_buffer"].any() for muon in ranks.muons for state in muon.state.values())


def spoil_on_one_rank(rank: int) -> str:
    """What this real rank hears when rank 1 has a NaN."""
    world = LiveWorld(build_mesh(GRID))
    params, muon = one_rank(UNEVEN, "zero1", world)
    give_gradients(params, next(whole_gradients(UNEVEN)), UNEVEN, world.at)
    if rank == 1:
        assert params[0].grad is not None
        params[0].grad[0, 0] = float("nan")
    try:
        muon.step()
    except GradientError as error:
        return str(error)
    return "nothing"


def test_all_real_ranks_hear_the_same() -> None:
    heard = launch(spoil_on_one_rank, 4)
    assert len(set(heard)) == 1
    assert "parameter 0 holds NaN" in heard[0]
