"""Momentum moves from other packages to ours and back: two more steps equal those without the move.

torch's, Keller Jordan's (PyPI ``muon-optimizer``) and DeepSpeed's optimizers make the states themselves, if
installed. dion's and Megatron-LM's are not on PyPI; a stand-in makes states in their published formats, and
takes the two steps as their code does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from muon_tutorial import (
    Grid,
    LocalWorld,
    Muon,
    MuonWithAdamW,
    UsageError,
    build_mesh,
    launch,
    zeropower_via_newtonschulz,
)
from muon_tutorial.optimizer.other_packages import FORMATS, Package, load_momentum, momentum_for

from ..configs.setups import error_of

SHAPES = {"up.weight": (24, 12), "down.weight": (12, 24), "o.weight": (12, 12)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}


def build() -> dict[str, nn.Parameter]:
    made = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=made)) for name, shape in SHAPES.items()}


def train(steps: range, *trained: tuple[dict[str, nn.Parameter], Any]) -> None:
    """Step each optimizer with the same gradients of its parameters."""
    for step in steps:
        for params, optimizer in trained:
            for number, name in enumerate(SHAPES):
                made = torch.Generator().manual_seed(10 * step + number)
                params[name].grad = torch.randn(SHAPES[name], generator=made)
            optimizer.step()


class ByFormat(torch.optim.Optimizer):
    """Muon as dion computes it (momentum is a sum of gradients) or Megatron-LM (momentum is an average)."""

    def __init__(self, params: Any, key: str, is_sum: bool) -> None:
        super().__init__(params, {**OPTIONS})
        self.key, self.is_sum = key, is_sum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                grad, rate = param.grad, group["momentum"]
                momentum = self.state[param].setdefault(self.key, torch.zeros_like(param))
                if self.is_sum:
                    momentum.mul_(rate).add_(grad)
                    update = momentum * rate + grad
                else:
                    momentum.lerp_(grad, 1 - rate)
                    update = grad.lerp(momentum, rate)
                rows, columns = param.shape
                factor = max(1, rows / columns) ** 0.5
                param.add_(zeropower_via_newtonschulz(update), alpha=-group["lr"] * factor)


def keller_jordans(params: Any) -> Any:
    muon: Any = pytest.importorskip("muon", reason="pip install muon-optimizer: Keller Jordan's own")
    return muon.SingleDeviceMuon(list(params), **OPTIONS)


@pytest.fixture(autouse=True)
def stance() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("default")


def deepspeeds(params: Any) -> Any:
    module = "deepspeed.runtime.zero.muon.original_muon"
    ours: Any = pytest.importorskip(module, reason="pip install deepspeed")
    torch.compiler.set_stance("force_eager")  # DeepSpeed compiles the update; ``stance`` undoes this
    return ours.SingleDeviceMuon(list(params), **OPTIONS, ns_method="standard")


THEIRS: dict[Package, Callable[[Any], Any]] = {
    "torch": lambda params: torch.optim.Muon(list(params), **OPTIONS),
    "muon-optimizer": keller_jordans,
    "dion": lambda params: ByFormat(params, "momentum", is_sum=True),
    "megatron": lambda params: ByFormat(params, "momentum_buffer", is_sum=False),
    "deepspeed": deepspeeds,
}


def near(package: str, mine: dict[str, nn.Parameter], theirs: dict[str, nn.Parameter]) -> bool:
    """Whether parameters are equal to the bit.

    For dion, Keller Jordan and DeepSpeed, parameters may differ by rounding: dion sums where others average,
    and the other two multiply in another order in bf16.
    """
    if package in ("torch", "megatron"):
        return all(torch.equal(mine[name], theirs[name]) for name in mine)
    start = build()
    moved = {name: (theirs[name] - start[name]).norm() for name in mine}
    return all(bool((mine[name] - theirs[name]).norm() < 0.02 * moved[name]) for name in mine)


@pytest.mark.parametrize("package", THEIRS)
def test_two_more_steps_after_coming_from_another_package_are_its_own(package: Package) -> None:
    theirs = build()
    other = THEIRS[package](theirs.values())
    train(range(3), (theirs, other))
    mine = {name: nn.Parameter(param.detach().clone()) for name, param in theirs.items()}
    muon = Muon(mine.items(), **OPTIONS)
    report = load_momentum(muon, other.state_dict(), package, names=list(theirs))
    assert (report.momenta, report.anew) == (tuple(SHAPES), ())
    train(range(3, 5), (mine, muon), (theirs, other))
    assert near(package, mine, theirs)


@pytest.mark.parametrize("package", THEIRS)
def test_two_more_steps_after_going_to_another_package_are_ours(package: Package) -> None:
    mine = build()
    muon = Muon(mine.items(), **OPTIONS)
    train(range(3), (mine, muon))
    order = ["o.weight", "up.weight", "down.weight"]
    theirs = {name: nn.Parameter(mine[name].detach().clone()) for name in order}
    other = THEIRS[package](theirs.values())
    other.load_state_dict({**other.state_dict(), **momentum_for(muon, package, order)})
    train(range(3, 5), (mine, muon), (theirs, other))
    assert near(package, mine, theirs)


@pytest.mark.parametrize(("package", "at"), [("muon-optimizer", "step"), ("dion", "step_dev"), ("dion", "")])
def test_a_pair_takes_over_adams_moments_and_gives_them_back(package: Package, at: str) -> None:
    """dion counts steps in the parameter's state; its earlier versions counted them in the group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    params = dict(model.named_parameters())
    rest, hidden = ([name for name in params if word in name] for word in ("bias", "weight"))
    names, keys = [*rest, *hidden], FORMATS[package]
    state: dict[int, dict[str, Any]] = {}
    for i, name in enumerate(names):
        held = [keys.first, keys.second] if name in rest else [keys.momentum]
        state[i] = {key: torch.rand_like(params[name]) for key in held}
        if name in rest and at:
            state[i][at] = torch.tensor(7.0)
    groups: list[dict[str, Any]] = [{"params": [0, 1], "step": 7}, {"params": [2, 3], "step": 7}]
    pair = MuonWithAdamW.from_model(model, lr=0.02)
    report = load_momentum(pair, {"state": state, "param_groups": groups}, package, names)
    assert str(report) == f"{package}: momentum of 2 matrices, moments of 2 others"
    assert [float(pair.state[params[name]]["step"]) for name in rest] == [7.0, 7.0]
    given = momentum_for(pair, package, names)["state"]
    assert {int(given[i][keys.step]) for i in (0, 1)} == {7}
    for i, entry in state.items():
        for key in entry.keys() - {at}:
            assert torch.allclose(given[i][key], entry[key])
    for where in (*groups, *state.values()):
        where.pop("step", None), where.pop(at, None)
    with pytest.raises(UsageError, match="does not say how many steps AdamW has taken"):
        load_momentum(pair, {"state": state, "param_groups": groups}, package, names)


def test_given_names_count_even_if_the_state_has_names() -> None:
    """A layer was added in front, so that each old layer's name belongs to another layer now."""
    old = {f"{i}.weight": nn.Parameter(torch.ones(4, 4)) for i in range(2)}
    theirs = torch.optim.Muon(old.items(), **OPTIONS)
    for param in old.values():
        param.grad = torch.eye(4)
    theirs.step()
    new = {f"{i}.weight": nn.Parameter(torch.ones(4, 4)) for i in range(3)}
    muon = Muon(new.items(), **OPTIONS)
    report = load_momentum(muon, theirs.state_dict(), "torch", ["1.weight", "2.weight"])
    assert (report.momenta, report.anew) == (("1.weight", "2.weight"), ("0.weight",))
    assert str(report) == "torch: momentum of 2 matrices, moments of 0 others; nothing for 0.weight"
    assert [bool(muon.state[param]) for param in new.values()] == [False, True, True]


def test_dions_sum_is_averaged_by_its_own_rate() -> None:
    params = build()
    state = {0: {"momentum": torch.full((12, 12), 10.0)}}  # the sum of many gradients of 1
    muon = Muon(params.items(), **OPTIONS)
    load_momentum(muon, {"state": state, "param_groups": [{"params": [0], "mu": 0.9}]}, "dion", ["o.weight"])
    momentum = muon.state[params["o.weight"]]["momentum_buffer"]
    assert torch.allclose(momentum, torch.ones(12, 12))


def test_two_states_of_one_parameter_must_be_the_same() -> None:
    params = build()
    muon = Muon(params.items(), **OPTIONS)
    files = [
        {"state": {0: {"momentum_buffer": torch.full((12, 12), value)}}, "param_groups": [{"params": [0]}]}
        for value in (1.0, 2.0)
    ]
    assert load_momentum(muon, files[:1] * 2, "megatron", ["o.weight"]).momenta == ("o.weight",)
    with pytest.raises(UsageError, match=r"two states of o\.weight were passed, and they differ"):
        load_momentum(muon, files, "megatron", ["o.weight"])


def load_one_file_on_each_rank(rank: int, numel: int = 0) -> tuple[str, str]:
    params = build()
    mesh = build_mesh({"dp": 2})
    muon = Muon(params.items(), strategy="zero1", mesh=mesh, **OPTIONS)
    name = ["up.weight", "down.weight"][rank]
    state = {0: {"momentum_buffer": torch.ones(numel if numel and rank else SHAPES[name])}}
    file = {"state": state, "param_groups": [{"params": [0]}]}
    return error_of(lambda: load_momentum(muon, file, "muon-optimizer", [name]))


def test_a_rank_that_loads_only_its_own_file_is_refused() -> None:
    """``zero1`` cuts all momenta, so the slices of the other file's matrices would start from zero."""
    for kind, said in launch(load_one_file_on_each_rank, 2):
        assert kind == "MismatchError"
        assert "the list of matrices whose momentum is loaded" in said
    (first, _), (second, said) = launch(load_one_file_on_each_rank, 2, args=(3,))
    assert (first, second) == ("MismatchError", "UsageError")
    assert "its saved state is (3,)" in said


def test_ranks_files_come_together_and_slices_are_cut_from_whole_momenta() -> None:
    """In Keller Jordan's distributed class, a rank keeps momentum only of matrices that it orthogonalizes."""
    whole = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    groups = [{"params": [0, 1, 2]}]
    states = [{i: {"momentum_buffer": whole[name]}} for i, name in enumerate(SHAPES)]
    files = [{"state": state, "param_groups": groups} for state in states]
    world = LocalWorld(Grid.of(dp=2))
    muons = [Muon(build().items(), strategy="zero1", mesh=world.mesh(rank), **OPTIONS) for rank in range(2)]
    for muon in muons:
        load_momentum(muon, files, "muon-optimizer", list(SHAPES))
        with pytest.raises(UsageError, match="each rank keeps a slice of its momentum"):
            momentum_for(muon, "torch")
    entries = [entry for muon in muons for entry in muon.state.values()]
    kept = sum(int(entry["momentum_buffer"].count_nonzero()) for entry in entries)
    assert kept == sum(it.numel() for it in whole.values())


@pytest.mark.parametrize(
    ("state", "names", "message"),
    [
        ({"momentum_buffer": torch.ones(3, 3)}, ["o.weight"], r"but its saved state is \(3, 3\)"),
        ({"momentum_buffer": torch.ones(144)}, ["o.weight"], "ZeRO has flattened it"),
        ({"momentum_buffer": torch.ones(12, 12)}, ["x"], "has x, which this optimizer does not step"),
        ({"momentum_buffer": torch.ones(12, 12)}, None, "1 parameters, and 0 names: pass names="),
        ({"exp_avg": torch.ones(12, 12), "exp_avg_sq": torch.ones(12, 12)}, ["o.weight"], "is AdamW's"),
    ],
)
def test_a_state_that_fits_no_parameter_is_refused(state: Any, names: list[str] | None, message: str) -> None:
    muon = Muon(build().items(), **OPTIONS)
    before = dict(muon.state)
    with pytest.raises(UsageError, match=message):
        load_momentum(muon, {"state": {0: state}, "param_groups": [{"params": [0]}]}, "torch", names)
    assert dict(muon.state) == before
