"""If one rank cannot step, or makes another call, all ranks stop and name it, and nothing changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from muon_tutorial import STRATEGIES, Grid, LocalWorld, Muon, MuonWithAdamW, Replicate, build_mesh, launch
from muon_tutorial.errors import GradientError, MismatchError

from ..configs.setups import error_of
from ..oracle import (
    UNEVEN,
    Case,
    assert_own_parts,
    give_gradients,
    options,
    perceptron,
    seated,
    whole_gradients,
    whole_matrices,
)

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


def do(what: str, both: MuonWithAdamW, model: nn.Sequential) -> None:
    """The odd rank's action, before or after gradients are readied on all ranks."""
    weight = next(model.parameters())
    match what:
        case "drops its gradients" | "skips a step":
            both.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
        case "drops all but AdamW's":
            both.muon.zero_grad(set_to_none=False)
        case "clips":
            torch.nn.utils.clip_grad_norm_([p for g in both.adamw.param_groups for p in g["params"]], 1e-3)
        case "sets lr to NaN":
            both.param_groups[0]["lr"] = math.nan
        case "sets AdamW's decay below zero":
            both.param_groups[-1]["weight_decay"] = -0.1
        case "has a larger gradient" | "has a smaller gradient":
            weight.grad = torch.zeros_like(weight)
            weight.grad.data = torch.zeros(16 if "larger" in what else 4, 6)
        case "has a sparse gradient":
            weight.grad = torch.zeros_like(weight).to_sparse()
        case "steps twice":
            both.muon.guard.steps_done += 1
        case "loads its state":
            both.load_state_dict(both.state_dict())
        case "casts its model":
            model[2].bias.data = model[2].bias.data.double()
            model[2].bias.grad = None
        case _:
            raise AssertionError(what)


AFTER = ("drops its gradients", "drops all but AdamW's", "clips", "sets lr to NaN")
BEFORE = (
    *("sets lr to NaN", "sets AdamW's decay below zero", "casts its model", "loads its state"),
    *("has a larger gradient", "has a smaller gradient", "has a sparse gradient"),
    *("skips a step", "steps twice"),
)


def odd_rank(rank: int, strategy: str, whats: tuple[str, ...], readied: bool) -> list[tuple[str, str]]:
    """This rank's error for each of rank 2's actions."""
    mesh = build_mesh({"dp": 3})
    return [heard_of(rank, mesh, strategy, what, readied) for what in whats]


def heard_of(rank: int, mesh: DeviceMesh, strategy: str, what: str, readied: bool) -> tuple[str, str]:
    """This rank's error in the second step, in which only rank 2 does ``what``."""
    model = perceptron()
    both = MuonWithAdamW.from_model(model, lr=0.1, strategy=strategy, mesh=mesh, betas=(0.9, 0.9))
    for step in range(2):
        both.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        if readied:
            both.ready_gradients()
        if step == 1 and rank == 2:
            do(what, both, model)
        before = [param.detach().clone() for param in model.parameters()]
        kind, said = error_of(both.step)
        if kind != "nothing":
            assert all(map(torch.equal, before, model.parameters()))
            return kind, said
    return "nothing", ""


@pytest.mark.parametrize(
    ("strategy", "whats", "readied"),
    [
        ("zero1", AFTER, True),
        ("zero1", BEFORE, False),
        ("owner", ("drops its gradients",), True),
        ("owner", BEFORE, False),
    ],
)
def test_the_odd_rank_is_named_on_all(strategy: str, whats: tuple[str, ...], readied: bool) -> None:
    ranks = launch(odd_rank, 3, args=(strategy, whats, readied), timeout=20)
    for what, *others, odd in zip(whats, *ranks, strict=True):
        for name, heard in others:
            assert name == "MismatchError", what
            assert "rank 2 cannot take this step" in heard or "rank 2 differs from the others" in heard, what
        assert odd[0] in ("MismatchError", "GradientError", "UsageError"), what


def alike_again(rank: int, strategy: str) -> list[str]:
    """A rank's errors in four steps. Only in the third step, rank 1's learning rate is NaN."""
    model = perceptron()
    both = MuonWithAdamW.from_model(model, lr=0.1, strategy=strategy, mesh=build_mesh({"dp": 2}))
    heard = []
    for lr in (0.1, 0.1, math.nan, 0.1):
        both.zero_grad()
        if rank == 1:
            both.param_groups[0]["lr"] = lr
        model(torch.ones(2, 6)).sum().backward()
        heard.append(error_of(both.step)[0])
    return heard


@pytest.mark.parametrize("strategy", ["zero1", "owner"])
def test_ranks_go_on_after_a_refusal(strategy: str) -> None:
    one, odd = launch(alike_again, 2, args=(strategy,), timeout=20)
    assert one == ["nothing", "nothing", "MismatchError", "nothing"]
    assert odd == ["nothing", "nothing", "UsageError", "nothing"]


SQUARE = Case(((4, 4),), (Replicate(),))


def test_ranks_of_one_process_with_other_first_values_are_refused() -> None:
    ranks = seated(Grid.of(dp=2), "owner", SQUARE)
    ranks.params[1][0].data.mul_(2)
    ranks.give([torch.eye(4)])
    with pytest.raises(MismatchError, match=r"is not the same on all ranks .*: ranks 0 and 1 differ"):
        ranks.step()


def test_a_rank_that_readies_alone_is_found_before_anything_moves() -> None:
    ranks = seated(Grid.of(dp=2), "zero1", SQUARE)
    ranks.give([torch.eye(4)])
    first, second = ranks.muons
    with pytest.raises(MismatchError, match=r"the call \(here ready_gradients\(max_norm=None\)\)"):
        ranks.world.run([first.ready_program(), second.program()])
    assert_own_parts(ranks.params, whole_matrices(SQUARE), SQUARE, ranks.world.grid)


@pytest.mark.parametrize("strategy", ["replicated", "round_robin", "zero1", "owner"])
@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0, 0)])
def test_a_matrix_without_elements_is_stepped_over(strategy: str, shape: tuple[int, int]) -> None:
    case = Case((shape, (4, 4), (4, 4)), (Replicate(),) * 3, steps=2)
    ranks = seated(Grid.of(dp=2), strategy, case)
    ranks.steps(whole_gradients(case))
    alone = [nn.Parameter(whole) for whole in whole_matrices(case)]
    muon = Muon(alone, **options(case))  # torch's Muon divides by the number of rows
    for grads in whole_gradients(case):
        give_gradients(alone, grads, case, Grid.of().at(0))
        muon.step()
    assert_own_parts(ranks.params, alone, case, ranks.world.grid)
