"""If one rank cannot step, or makes another call, all ranks stop and name it, and nothing changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from muon_tutorial import LocalWorld, Muon, MuonWithAdamW, build_mesh, launch
from muon_tutorial.errors import GradientError, MismatchError, TutorialError, UsageError
from muon_tutorial.plan.grid import Grid


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def do(what: str, both: MuonWithAdamW, model: nn.Sequential) -> None:
    """The odd rank's action, before or after gradients are readied on all ranks."""
    weight = next(model.parameters())
    match what:
        case "drops its gradients":
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
        case "has a larger gradient":
            weight.grad = torch.zeros_like(weight)
            weight.grad.data = torch.zeros(16, 6)
        case "has a smaller gradient":
            weight.grad = torch.zeros_like(weight)
            weight.grad.data = torch.zeros(4, 6)
        case "has a sparse gradient":
            weight.grad = torch.zeros_like(weight).to_sparse()
        case "skips a step":
            both.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
        case "steps twice":
            both.muon.guard.steps_done += 1
        case "loads its state":
            both.load_state_dict(both.state_dict())
        case "adds a group":
            both.muon.add_param_group({"params": [nn.Parameter(torch.eye(3))]})
        case "adds a group to AdamW's":
            both.adamw.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
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
    return [heard_of(rank, strategy, what, readied) for what in whats]


def heard_of(rank: int, strategy: str, what: str, readied: bool) -> tuple[str, str]:
    """This rank's error in the second step, in which only rank 2 does ``what``."""
    model = network()
    mesh = build_mesh({"dp": 3})
    both = MuonWithAdamW.from_model(model, lr=0.1, strategy=strategy, mesh=mesh, betas=(0.9, 0.9))
    for step in range(2):
        both.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        if readied:
            both.ready_gradients()
        if step == 1 and rank == 2:
            do(what, both, model)
        before = [param.detach().clone() for param in model.parameters()]
        try:
            both.step()
        except TutorialError as error:
            assert all(map(torch.equal, before, model.parameters()))
            return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.live
@pytest.mark.parametrize(
    ("strategy", "whats", "readied"),
    [
        ("zero1", AFTER, True),
        ("zero1", BEFORE, False),
        ("owner", ("drops its gradients",), True),
        ("owner", BEFORE, False),
    ],
)
def test_the_odd_rank_is_named_on_all_and_nothing_changes(
    strategy: str, whats: tuple[str, ...], readied: bool
) -> None:
    ranks = launch(odd_rank, 3, args=(strategy, whats, readied), timeout=20)
    for what, *others, odd in zip(whats, *ranks, strict=True):
        for name, heard in others:
            assert name == "MismatchError", what
            assert "rank 2 cannot take this step" in heard or "rank 2 differs from the others" in heard, what
        assert odd[0] in ("MismatchError", "GradientError", "UsageError"), what


def alike_again(rank: int, strategy: str) -> list[str]:
    """A rank's errors in steps before which rank 1's lr is changed, or set right again."""
    model = network()
    both = MuonWithAdamW.from_model(model, lr=0.1, strategy=strategy, mesh=build_mesh({"dp": 2}))
    heard = []
    for lr in (0.1, 0.1, math.nan, 0.1):
        both.zero_grad()
        if rank == 1:
            both.param_groups[0]["lr"] = lr
        model(torch.ones(2, 6)).sum().backward()
        try:
            both.step()
        except TutorialError as error:
            heard.append(type(error).__name__)
        else:
            heard.append("nothing")
    return heard


@pytest.mark.live
@pytest.mark.parametrize("strategy", ["zero1", "owner"])
def test_ranks_go_on_after_a_refusal(strategy: str) -> None:
    one, odd = launch(alike_again, 2, args=(strategy,), timeout=20)
    assert one == ["nothing", "nothing", "MismatchError", "nothing"]
    assert odd == ["nothing", "nothing", "UsageError", "nothing"]


@pytest.mark.parametrize(("key", "value"), [("lr", math.nan), ("lr", -1.0), ("momentum", math.inf)])
@pytest.mark.parametrize("strategy", [None, "zero1"])
def test_a_number_that_no_rank_can_step_with_is_refused_in_mid_run(
    strategy: str | None, key: str, value: float
) -> None:
    param = nn.Parameter(torch.eye(3))
    mesh = None if strategy is None else LocalWorld(Grid.of(dp=1)).mesh(0)
    muon = Muon([param], strategy=strategy, mesh=mesh)
    param.grad = torch.eye(3)
    muon.param_groups[0][key] = value
    with pytest.raises(UsageError, match=rf"{key} must not be negative or infinite, got {value}"):
        muon.step()
    assert torch.equal(param, torch.eye(3))


@pytest.mark.parametrize("strategy", [None, "zero1"])
def test_an_lr_that_is_no_number_or_missing_is_refused_with_its_group(strategy: str | None) -> None:
    param = nn.Parameter(torch.eye(3))
    mesh = None if strategy is None else LocalWorld(Grid.of(dp=1)).mesh(0)
    muon = Muon([("one", param)], strategy=strategy, mesh=mesh)
    param.grad = torch.eye(3)
    muon.param_groups[0]["lr"] = "0.1"
    with pytest.raises(UsageError, match=r"lr must be a number, got '0\.1', in the group of one"):
        muon.step()
    del muon.param_groups[0]["lr"]
    with pytest.raises(UsageError, match="a group needs an lr, in the group of one"):
        muon.step()
    assert torch.equal(param, torch.eye(3))


@pytest.mark.parametrize("strategy", [None, "zero1"])
def test_a_gradient_of_another_shape_is_refused(strategy: str | None) -> None:
    """It is set by ``.grad.data``, which torch does not check; a plan would have sliced it silently."""
    param = nn.Parameter(torch.eye(3))
    mesh = None if strategy is None else LocalWorld(Grid.of(dp=1)).mesh(0)
    muon = Muon([param], strategy=strategy, mesh=mesh)
    param.grad = torch.eye(3)
    param.grad.data = torch.ones(4, 3)
    with pytest.raises(GradientError, match=r"shape \(3, 3\) on cpu has a gradient of shape \(4, 3\)"):
        muon.step()
    assert torch.equal(param, torch.eye(3))


def built_with(rank: int, odd: bool) -> str:
    """A rank's error if rank 1 gives AdamW one more parameter when it makes the pair."""
    up, down = nn.Linear(6, 8), nn.Linear(8, 6)
    muon = Muon([up.weight], strategy="zero1", mesh=build_mesh({"dp": 2}))
    beside = [up.bias, *([down.bias] if odd and rank == 1 else [])]
    try:
        MuonWithAdamW(muon, torch.optim.AdamW(beside))
    except MismatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.live
def test_another_number_of_parameters_beside_is_found_when_the_pair_is_made() -> None:
    assert launch(built_with, 2, args=(False,)) == ["nothing"] * 2
    for heard in launch(built_with, 2, args=(True,)):
        assert "the parameters' dimensions, group by group," in heard
        assert "ranks 0 and 1 differ" in heard


def test_ranks_of_one_process_with_other_first_values_are_refused() -> None:
    grid = Grid.of(dp=2)
    world = LocalWorld(grid)
    params = [nn.Parameter(torch.eye(4) * (1 + rank)) for rank in grid.ranks]
    muons = [Muon([param], strategy="owner", mesh=world.mesh(rank)) for rank, param in enumerate(params)]
    for param in params:
        param.grad = torch.eye(4)
    with pytest.raises(MismatchError, match=r"is not the same on all ranks .*: ranks 0 and 1 differ"):
        world.run([muon.program() for muon in muons])


def test_a_rank_that_readies_alone_is_found_before_anything_moves() -> None:
    grid = Grid.of(dp=2)
    world = LocalWorld(grid)
    params = [nn.Parameter(torch.eye(4)) for _ in grid.ranks]
    muons = [Muon([param], strategy="zero1", mesh=world.mesh(rank)) for rank, param in enumerate(params)]
    for param in params:
        param.grad = torch.eye(4)
    with pytest.raises(MismatchError, match=r"the call \(here ready_gradients\(max_norm=None\)\)"):
        world.run([muons[0].ready_program(), muons[1].program()])
    assert all(torch.equal(param, torch.eye(4)) for param in params)


@pytest.mark.parametrize("strategy", ["replicated", "round_robin", "zero1", "owner"])
@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0, 0)])
def test_a_matrix_without_elements_is_stepped_over(strategy: str, shape: tuple[int, int]) -> None:
    grid = Grid.of(dp=2)
    world = LocalWorld(grid)
    params = [[nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.eye(4))] for _ in grid.ranks]
    muons = [Muon(own, strategy=strategy, mesh=world.mesh(rank)) for rank, own in enumerate(params)]
    for _ in range(2):
        for param in (param for own in params for param in own):
            param.grad = torch.ones_like(param)
        world.run([muon.program() for muon in muons])
    alone = [nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.eye(4))]
    muon = Muon(alone)
    for _ in range(2):
        for param in alone:
            param.grad = torch.ones_like(param)
        muon.step()
    assert all(torch.equal(own[1], alone[1]) for own in params)
