"""The tiny flags exchanged in each step: missing and non-finite gradients end the same on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial import DistributedConfig, LocalWorld, Muon, MuonWithAdamW
from muon_tutorial.errors import GradientError, MismatchError
from muon_tutorial.launching.launch import launch
from muon_tutorial.plan.grid import Grid
from muon_tutorial.plan.strategies import STRATEGIES
from muon_tutorial.worlds.live import LiveWorld, build_mesh

from ..exhaustive import every_other
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


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, 3e4), (torch.bfloat16, 2e38), (torch.float32, 2e38)]
)
def test_gradients_that_would_overflow_in_the_sum_are_refused_and_change_nothing(
    dtype: torch.dtype, value: float, max_norm: float | None
) -> None:
    """They are finite on every rank, but zero1's sum would be infinite and leave NaN in the weights."""
    grid = Grid.of(dp=4)
    world = LocalWorld(grid)
    params = [torch.nn.Parameter(torch.eye(4, 6, dtype=dtype)) for _ in grid.ranks]
    muons = [Muon([("up", p)], strategy="zero1", mesh=world.mesh(r)) for r, p in enumerate(params)]
    for param in params:
        param.grad = torch.zeros_like(param)
        param.grad[1, 2] = value
    if max_norm is not None:
        norms = world.run([muon.ready_program(max_norm) for muon in muons])
        assert all(norm.isinf() for norm in norms)
    with pytest.raises(GradientError, match="gradient of up may overflow where the step sums it"):
        world.run([muon.program() for muon in muons])
    assert all(torch.equal(param, torch.eye(4, 6, dtype=dtype)) for param in params)
    assert not any(state["momentum_buffer"].any() for muon in muons for state in muon.state.values())
    for param in params:  # half of the largest is allowed
        assert param.grad is not None
        param.grad.mul_(torch.finfo(dtype).max / value / 8)
    world.run([muon.program() for muon in muons])
    assert all(param.isfinite().all() for param in params)


OTHERS = {
    "lr": 0.3,
    "weight_decay": 0.2,
    "momentum": 0.9,
    "nesterov": False,
    "ns_coefficients": (1.875, -1.25, 0.375),
    "eps": 1e-6,
    "ns_steps": 4,
    "adjust_lr_fn": "match_rms_adamw",
    "orthogonalize": "gram",
}


@pytest.mark.parametrize("strategy", every_other(sorted(STRATEGIES)))
@pytest.mark.parametrize("key", OTHERS)
def test_a_hyperparameter_that_one_rank_has_otherwise_is_named_and_nothing_changes(
    key: str, strategy: str
) -> None:
    ranks = seated(GRID, strategy)
    ranks.give(next(whole_gradients(UNEVEN)))
    ranks.muons[3].param_groups[0][key] = OTHERS[key]
    with pytest.raises(
        MismatchError, match=rf"ranks would step differently: {key} \(.*\) is not the same on all 4"
    ):
        ranks.step()
    assert_own_parts(ranks.params, whole_matrices(UNEVEN), UNEVEN, GRID)
    assert not any(state["momentum_buffer"].any() for muon in ranks.muons for state in muon.state.values())


def test_a_rank_that_loaded_by_itself_is_found_by_the_number_of_its_steps() -> None:
    ranks = seated(GRID, "owner")
    gradients = whole_gradients(UNEVEN)
    ranks.give(next(gradients))
    ranks.step()
    ranks.give(next(gradients))
    ranks.muons[2].load_state_dict(ranks.muons[2].state_dict())
    with pytest.raises(MismatchError, match="the number of steps since it was made or loaded"):
        ranks.step()


def step_with_own_learning_rate(rank: int, whose: str) -> str:
    """A real rank's error when rank 1 has another learning rate for one of the optimizers."""
    mesh = build_mesh({"dp": 2})
    model = torch.nn.Linear(4, 4)
    if whose == "config":
        muon = Muon([model.weight], distributed_config=throwaway_config())
    else:
        muon = Muon([model.weight], strategy="zero1", mesh=mesh)
    both = MuonWithAdamW(muon, torch.optim.AdamW([model.bias]))
    changed = both.adamw if whose == "adamw" else both.muon
    changed.param_groups[0]["lr"] += 0.1 * rank
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    try:
        both.step()
    except MismatchError as error:
        assert torch.equal(before, model.weight)
        return str(error)
    return "nothing"


def throwaway_config() -> DistributedConfig:
    """Rank 0 orthogonalizes everything, and broadcasts."""

    def gather(buffer: Tensor, rank: int, state: dict) -> Tensor | None:
        return buffer if dist.get_rank() == rank else None

    def redistribute(update: Tensor | None, rank: int, state: dict) -> Tensor:
        answer = (
            torch.empty(state["local_shape"], dtype=torch.bfloat16)
            if update is None
            else update.to(torch.bfloat16)
        )
        dist.broadcast(answer, rank)
        return answer

    return DistributedConfig(
        lambda params, state: dict.fromkeys(range(len(params)), 0), gather, redistribute, {}
    )


@pytest.mark.parametrize("whose", ["muon", "adamw", "config"])
def test_all_real_ranks_hear_of_another_learning_rate(whose: str) -> None:
    for heard in launch(step_with_own_learning_rate, 2, args=(whose,)):
        assert "ranks would step differently: lr (" in heard


def spoil_on_one_rank(rank: int) -> str:
    """This real rank's error when rank 1 has a NaN."""
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
