"""Each step's flags: missing and non-finite gradients lead to the same error on every rank."""

from __future__ import annotations

import math

import pytest
import torch

from muon_tutorial import STRATEGIES, Grid, LocalWorld, Muon
from muon_tutorial.errors import GradientError, MismatchError

from ..oracle import UNEVEN, assert_own_parts, seated, whole_gradients, whole_matrices

GRID = Grid.of(dp=2, tp=2)


@pytest.mark.parametrize(
    ("strategy", "value"),
    [*((name, math.nan) for name in sorted(STRATEGIES)), ("zero1", math.inf), ("zero1", -math.inf)],
)
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


@pytest.mark.parametrize("index", [0, 4])
@pytest.mark.parametrize("strategy", ["gram", "layerwise", "zero1"])
def test_a_tp_group_lacks_a_gradient_as_a_whole_or_is_refused(strategy: str, index: int) -> None:
    ranks = seated(GRID, strategy)
    ranks.give(next(whole_gradients(UNEVEN)))
    ranks.params[3][index].grad = None
    said = f"parameter {index} is missing on rank 3, but not on rank 2 of the same tp group"
    with pytest.raises(GradientError, match=said):
        ranks.step()
    assert_own_parts(ranks.params, whole_matrices(UNEVEN), UNEVEN, GRID)
    ranks.params[2][index].grad = None
    phases: set[str] = set()
    ranks.world.observers.append(lambda request, at: phases.add(request.label.phase))
    ranks.step()
    assert "which rank" not in phases  # this gather would grow with the number of ranks


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_overflow_in_the_sum_is_refused(dtype: torch.dtype, max_norm: float | None) -> None:
    """Each rank's gradients are finite, but zero1's sum would be infinite, and leave NaN in the weights."""
    grid, value = Grid.of(dp=4), 3e4 if dtype == torch.float16 else 2e38
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
    for param in params:  # half of the largest number is allowed
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


@pytest.mark.parametrize(
    ("key", "strategy"),
    [*((key, "zero1") for key in OTHERS), *(("lr", name) for name in sorted(set(STRATEGIES) - {"zero1"}))],
)
def test_another_hyperparameter_on_one_rank_is_named_and_nothing_changes(key: str, strategy: str) -> None:
    ranks = seated(GRID, strategy)
    ranks.give(next(whole_gradients(UNEVEN)))
    ranks.muons[3].param_groups[0][key] = OTHERS[key]
    said = rf"ranks would step differently: {key} \(.*\) is not the same on all 4"
    with pytest.raises(MismatchError, match=said):
        ranks.step()
    assert_own_parts(ranks.params, whole_matrices(UNEVEN), UNEVEN, GRID)
    assert not any(state["momentum_buffer"].any() for muon in ranks.muons for state in muon.state.values())
