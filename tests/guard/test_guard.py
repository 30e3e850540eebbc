"""The guard by itself: its states, what it refuses, what it allows, and a step without it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_tutorial import (
    STRATEGIES,
    Grid,
    LocalWorld,
    Muon,
    MuonWithAdamW,
    build_mesh,
    launch,
    split_parameters,
)
from muon_tutorial.errors import GradientError, MismatchError, UsageError
from muon_tutorial.guard.guard import State
from muon_tutorial.step import orthogonalize, step

from ..configs.setups import heard
from ..oracle import UNEVEN, assert_own_parts, perceptron, seated, single_process, whole_gradients


def square() -> nn.Parameter:
    param = nn.Parameter(torch.eye(4))
    param.grad = torch.eye(4)
    return param


def muon_of(*params: nn.Parameter, strategy: str | None = None, **options: Any) -> Muon:
    mesh = None if strategy is None else LocalWorld(Grid.of(dp=1)).mesh(0)
    named = [(f"w{index}", param) for index, param in enumerate(params)]
    return Muon(named, strategy=strategy, mesh=mesh, **options)


@pytest.mark.parametrize("strategy", [None, "zero1", "owner"])
def test_the_states_of_a_step(strategy: str | None) -> None:
    param = square()
    muon = muon_of(param, strategy=strategy)
    seen = [muon.guard.state]
    muon.ready_gradients(1.0)
    seen.append(muon.guard.state)
    before_step = muon.guard.before_step

    def watched(*arguments: Any) -> Any:
        steps = yield from before_step(*arguments)
        seen.append(muon.guard.state)
        return steps

    with patch.object(muon.guard, "before_step", watched):
        muon.step()
    seen.append(muon.guard.state)
    assert seen == [State.OPEN, State.READY, State.STEPPING, State.OPEN]
    assert muon.guard.steps_done == 1


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"gram"}))
def test_without_the_guard_the_bits_are_the_same(strategy: str) -> None:
    """Without the guard, a rank assumes that the others have gradients of the same parameters; here they
    have."""
    ranks = seated(Grid.of(dp=2, tp=2), strategy, guard="off")
    ranks.steps(whole_gradients(UNEVEN))
    assert_own_parts(ranks.params, single_process(UNEVEN), UNEVEN, ranks.world.grid)


def test_without_the_guard_ranks_exchange_no_word_about_the_step() -> None:
    def phases(guard: str) -> set[str]:
        told: set[str] = set()
        ranks = seated(Grid.of(dp=2), "zero1", guard=guard)
        ranks.world.observers.append(lambda asked, _: told.add(asked.label.phase))
        ranks.steps(whole_gradients(UNEVEN))
        return told

    assert phases("on") - phases("off") == {"gradient flags"}


SPOIL: dict[str, Callable[[Any], object]] = {
    "widen": lambda it: it.update(momentum_buffer=it["momentum_buffer"].double()),
    "widen in place": lambda it: setattr(it["momentum_buffer"], "data", it["momentum_buffer"].double()),
    "lose": lambda it: it.pop("momentum_buffer"),
}


@pytest.mark.parametrize("strategy", ["owner", "zero1"])
@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
@pytest.mark.parametrize("matrices", [(None, 0), (0, 1)], ids=["one rank", "another matrix on each"])
def test_momentum_of_another_dtype_on_one_rank_is_named(
    matrices: tuple[int | None, int], spoil: Callable[[Any], object], strategy: str
) -> None:
    ranks, gradients = seated(Grid.of(dp=2), strategy), whole_gradients(UNEVEN)
    ranks.steps([next(gradients)])
    for muon, matrix in zip(ranks.muons, matrices, strict=True):
        if matrix is not None:
            spoil([*muon.state.values()][matrix])
    ranks.give(next(gradients))
    with pytest.raises(MismatchError, match=r"the momentum's dtypes \(here .*ranks 0 and 1 differ"):
        ranks.step()


def test_an_extra_zero_grad_on_one_rank_is_harmless() -> None:
    ranks = seated(Grid.of(dp=2), "zero1")
    for grads in whole_gradients(UNEVEN):
        for muon in ranks.muons:
            muon.zero_grad()
        ranks.muons[1].zero_grad(set_to_none=False)
        ranks.give(grads)
        ranks.step()
        ranks.muons[0].zero_grad(set_to_none=False)
    assert_own_parts(ranks.params, single_process(UNEVEN), UNEVEN, ranks.world.grid)


MISSING = object()
WRONG: list[tuple[str, Any, str]] = [
    ("lr", "0.1", "lr must be a number, got '0.1'"),
    ("lr", None, "lr must be a number, got None"),
    ("lr", 1j, "lr must be a number, got 1j"),
    ("lr", len, "lr must be a number, got <built-in"),
    ("lr", math.nan, "lr must not be negative or infinite, got nan"),
    ("lr", -1.0, "lr must not be negative or infinite, got -1.0"),
    ("lr", MISSING, "a group needs an lr"),
    ("momentum", math.inf, "momentum must not be negative or infinite, got inf"),
    ("orthogonalize", "fast", "orthogonalize must be"),
    ("ns_steps", 2.5, "ns_steps must be a whole number, got 2.5"),
    ("ns_steps", 100, "Newton–Schulz takes 0 to 99 steps, got 100"),
    ("ns_coefficients", ((3.0, -4.0, 2.0),) * 4, "one triple, or one per step: got 4 for 5 steps"),
    ("adjust_lr_fn", "rms", "adjust_lr_fn must be one of"),
    ("eps", math.nan, "eps must not be negative or infinite, got nan"),
    ("ns_coefficients", (3.4, math.nan, 2.0), "ns_coefficients must be finite numbers"),
    ("betas", (0.9, math.nan), "betas must be finite numbers"),
]


@pytest.mark.parametrize("strategy", [None, "zero1", "owner", "gram"])
@pytest.mark.parametrize(("key", "value", "said"), WRONG, ids=lambda it: str(it)[:20])
def test_what_a_group_must_not_say_is_refused_by_rank_and_group(
    key: str, value: Any, said: str, strategy: str | None
) -> None:
    param = square()
    muon = muon_of(param, strategy=strategy)
    muon.step()
    before = param.detach().clone(), muon.state[param]["momentum_buffer"].clone()
    muon.param_groups[0][key] = value
    if value is MISSING:
        del muon.param_groups[0][key]
    with pytest.raises(UsageError) as caught:
        muon.step()
    assert said in str(caught.value)
    assert (
        key in ("orthogonalize", "adjust_lr_fn")
        or "steps" in said
        or "in the group of w0" in str(caught.value)
    )
    assert strategy is None or str(caught.value).startswith("rank 0: ")
    assert all(map(torch.equal, (param, muon.state[param]["momentum_buffer"]), before))


@pytest.mark.parametrize("strategy", [None, "zero1"])
def test_a_gradient_of_another_shape_is_refused(strategy: str | None) -> None:
    """The gradient is set by ``.grad.data``, which torch does not check. A plan would slice it silently."""
    param = square()
    assert param.grad is not None
    param.grad.data = torch.ones(5, 4)
    with pytest.raises(GradientError, match=r"shape \(4, 4\) on cpu has a gradient of shape \(5, 4\)"):
        muon_of(param, strategy=strategy).step()
    assert torch.equal(param, torch.eye(4))


def test_other_decay_of_adamws_is_named() -> None:
    def pair(rank: int, world: LocalWorld) -> MuonWithAdamW:
        model = nn.Linear(4, 4)
        for param in model.parameters():
            param.data.zero_()
            param.grad = torch.ones_like(param)
        return MuonWithAdamW.from_model(model, lr=0.1, strategy="zero1", mesh=world.mesh(rank))

    world = LocalWorld(Grid.of(dp=2))
    pairs = [pair(rank, world) for rank in range(2)]
    pairs[1].adamw.param_groups[0]["decoupled_weight_decay"] = False
    with pytest.raises(MismatchError, match=r"decoupled_weight_decay \(here"):
        world.run([both.muon.program() for both in pairs])


FLATTENED = r"w0 had shape \(4, 4\) when .* FSDP1 .* DeepSpeed's ZeRO flatten"
ANOTHER = r"w0 had shape \(4, 4\) when its momentum began, and has \(2, 8\) now"


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("strategy", [None, "zero1", "owner"])
@pytest.mark.parametrize(("shape", "said"), [((16,), FLATTENED), ((2, 8), ANOTHER)], ids=str)
def test_a_matrix_that_was_flattened_or_became_another_is_refused(
    shape: tuple[int, ...], said: str, strategy: str | None, stepped: bool
) -> None:
    param = square()
    muon = muon_of(param, strategy=strategy)
    if stepped:
        muon.step()
    param.grad = None
    param.data = param.data.reshape(shape)
    param.grad, before = torch.ones(shape), param.detach().clone()
    with pytest.raises(UsageError, match=said):
        muon.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_first_step_without_gradients_warns_and_changes_nothing(loaded: bool) -> None:
    """Accelerate's wrapper loads a state immediately."""
    param = square()
    muon = muon_of(param)
    if loaded:
        muon.load_state_dict(muon.state_dict())
    param.grad = None
    with pytest.warns(UserWarning, match="no parameter of this Muon has a gradient"):
        muon.step()
    assert torch.equal(param, torch.eye(4))
    assert not muon.state
    param.grad = torch.eye(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        muon.step()
        param.grad = None
        muon.step()


@pytest.mark.parametrize("names", [["k", "q"], ["k", "module._orig_mod.q"]], ids=str)
def test_a_state_is_loaded_by_names_where_both_sides_have_them(names: list[str]) -> None:
    q, k = square(), square()
    assert k.grad is not None
    k.grad[0, 0] = 7.0
    saver = Muon([("q", q), ("k", k)])
    saver.step()
    loader = Muon([(name, nn.Parameter(torch.eye(4))) for name in names])
    loader.load_state_dict(saver.state_dict())
    first, second = loader.param_groups[0]["params"]
    assert torch.equal(loader.state[first]["momentum_buffer"], saver.state[k]["momentum_buffer"])
    assert torch.equal(loader.state[second]["momentum_buffer"], saver.state[q]["momentum_buffer"])
    assert loader.param_groups[0]["param_names"] == names


def test_names_that_are_partly_others_are_refused_and_a_prefix_is_not() -> None:
    saver = Muon([("q", square()), ("k", square())])
    saver.step()
    for names in (("k", "v"), ("v", "k")):
        with pytest.raises(UsageError, match="group 0 was saved with q and has v here"):
            Muon([(name, square()) for name in names]).load_state_dict(saver.state_dict())
    for first, second in (("other.v", "other.w"), ("module.q", "module.k"), ("_orig_mod.q", "k")):
        Muon([(first, square()), (second, square())]).load_state_dict(saver.state_dict())


def test_momentum_of_a_matrix_that_went_to_adamw_is_given_to_no_other() -> None:
    """With two matrices, neither optimizer's group has a name in common with the saved group."""

    def pair(exclude: str) -> MuonWithAdamW:
        model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "qk"})
        for param in model.parameters():
            param.grad = torch.ones(4, 4)
        return MuonWithAdamW.from_model(model, lr=0.1, exclude=[exclude])

    saver, loader = pair("q.weight"), pair("k.weight")
    saver.step()
    with pytest.raises(UsageError, match=r"saved with k\.weight and has q\.weight here"):
        loader.load_state_dict(saver.state_dict())
    assert not loader.state


def test_a_state_that_says_less_of_its_groups_loads_and_steps() -> None:
    """Keller Jordan's Muon saves such a state."""
    param = square()
    muon = muon_of(param, momentum=0.9)
    saved = {
        "state": {0: {"momentum_buffer": torch.ones(4, 4)}},
        "param_groups": [{"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, "params": [0]}],
    }
    muon.load_state_dict(saved)
    muon.step()
    assert (muon.param_groups[0]["lr"], muon.param_groups[0]["nesterov"]) == (0.02, True)


def test_one_tensor_lr_is_not_scaled_once_a_group() -> None:
    lr = torch.tensor(0.4)
    muon = Muon([{"params": [square()]}, {"params": [square()]}], lr=lr)
    for group in muon.param_groups:
        group["lr"].mul_(0.5)
    assert [float(group["lr"]) for group in muon.param_groups] == [pytest.approx(0.2)] * 2
    both = MuonWithAdamW.from_model(nn.Linear(4, 4), lr=torch.tensor(0.4))
    for group in both.param_groups:
        group["lr"].mul_(0.5)
    assert [float(group["lr"]) for group in both.param_groups] == [pytest.approx(0.2)] * 2


def other_lengths(rank: int) -> dict[str, str]:
    """A rank's errors in three cases in which the ranks would exchange tensors of different lengths."""
    mesh = build_mesh({"dp": 2})
    torch.manual_seed(0)

    def head() -> object:
        body, own = nn.Linear(6, 8, bias=False), nn.Linear(8, 7 if rank else 9)
        muon = Muon([("body", body.weight)], strategy="zero1", mesh=mesh)
        return MuonWithAdamW(muon, torch.optim.AdamW([("head", own.weight)]))

    def other_order() -> None:
        few, many = [square()], [square() for _ in range(3)]
        muons = [Muon(params, strategy="zero1", mesh=mesh) for params in (few, many)]
        for muon in muons[::-1] if rank else muons:
            muon.step()

    def other_number() -> object:
        up, down = nn.Linear(6, 8), nn.Linear(8, 6)
        muon = Muon([("up", up.weight)], strategy="zero1", mesh=mesh)
        return MuonWithAdamW(muon, torch.optim.AdamW([up.bias, *([down.bias] if rank else [])]))

    return {case.__name__: heard(case) for case in (head, other_order, other_number)}


def test_ranks_that_hold_other_lengths_are_told_so_and_none_aborts() -> None:
    for found in launch(other_lengths, 2):
        assert found["head"].startswith("MismatchError: ranks would step differently: the parameters' dim")
        assert "the optimizer's number among the Muons of this mesh" in found["other_order"]
        assert "the parameters' dimensions, group by group," in found["other_number"]
        assert "ranks 0 and 1 differ" in found["other_number"]


def uncut_along_tp(rank: int) -> str:
    """A rank's error if a norm's weight differs along tp, because its gradient is not summed there."""
    mesh = build_mesh({"dp": 1, "tp": 2})
    torch.manual_seed(0)
    weight, norm = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4))
    weight.partition_dim = norm.partition_dim = -1  # type: ignore[attr-defined]
    muon = Muon([("weight", weight)], strategy="zero1", mesh=mesh, tp_dim=None, compare_every=2)
    both = MuonWithAdamW(muon, torch.optim.AdamW([("norm", norm)]))

    def step() -> None:
        for grad in range(6):
            weight.grad, norm.grad = torch.ones(4, 4), torch.full((4,), float(rank + grad - 1))
            both.step()

    return heard(step)


def test_copies_along_tp_are_compared_where_they_say_that_tp_does_not_cut_them() -> None:
    for said in launch(uncut_along_tp, 2):
        assert said.startswith("MismatchError: after 2 steps norm is not the same on all ranks")


FAILURES = {"step": (orthogonalize, "newton_schulz_update"), "ready_gradients": (step, "clip_gradients")}
"""A call, and the function in which it fails, after ranks have agreed and gradients were averaged."""


def after_a_failure(rank: int, call: str, guard: str) -> list[Tensor]:
    """Parameters after three things: a call that fails halfway, the model's ``zero_grad()``, and a step."""
    model, mesh = perceptron(), build_mesh({"dp": 2})
    both = MuonWithAdamW.from_model(model, lr=0.1, strategy="zero1", mesh=mesh, muon={"guard": guard})
    for seed, fails in ((0, call in FAILURES), (1, False)):
        model.zero_grad()
        torch.manual_seed(2 * seed + rank)
        model(torch.randn(4, 6)).square().sum().backward()
        if fails:
            with (
                patch.object(*FAILURES[call], side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                both.step() if call == "step" else both.ready_gradients(max_norm=1.0)
    both.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("guard", ["on", "off"])
@pytest.mark.parametrize("call", FAILURES)
def test_after_a_call_that_failed_halfway_gradients_are_averaged_anew(call: str, guard: str) -> None:
    first, second = launch(after_a_failure, 2, args=(call, guard), output="quiet")
    whole, _ = launch(after_a_failure, 2, args=("nothing", "on"), output="quiet")
    assert all(map(torch.equal, first, second))
    same = [torch.equal(*pair) for pair in zip(first, whole, strict=True)]
    assert same == ([False, True] * 2 if call == "step" else [True] * 4)  # a failed step moves the momentum


@pytest.mark.parametrize("guard", ["on", "off"])
def test_after_a_step_that_failed_halfway_all_gradients_count(guard: str) -> None:
    ranks, gradients = seated(Grid.of(dp=2), "zero1", guard=guard), next(whole_gradients(UNEVEN))
    before = ranks.params[0][-1].detach().clone()
    ranks.give([*gradients[:-1], None])
    with patch.object(*FAILURES["step"], side_effect=MemoryError), pytest.raises(MemoryError):
        ranks.step()
    ranks.give(gradients)
    ranks.step()
    assert not torch.equal(ranks.params[0][-1], before)


def after_adamw_failed(rank: int, on: tuple[int, ...]) -> list[str]:
    """What a state, a second step and one after a load say, if AdamW failed in the first on some ranks."""
    model = perceptron()
    both = MuonWithAdamW.from_model(model, lr=0.1, strategy="owner", mesh=build_mesh({"dp": 2}))
    model(torch.ones(4, 6)).square().sum().backward()
    if rank in on:
        with patch.object(both.adamw, "step", side_effect=MemoryError), pytest.raises(MemoryError):
            both.step()
    else:
        both.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both.muon.state_dict()
        told = [", ".join(str(it.message) for it in caught), heard(both.step)]
        both.load_state_dict(both.state_dict())
    return [*told, heard(both.step)]


def test_a_step_that_failed_halfway_is_named_when_saved_and_on_all_ranks_if_it_failed_on_some() -> None:
    zero, one = launch(after_adamw_failed, 2, args=((0,),))
    assert "step() was interrupted halfway" in zero[0]
    assert one[0] == ""
    for said in (zero[1], one[1]):
        assert said.startswith("MismatchError: ranks would step differently: whether a step was interrupted")
    for found in launch(after_adamw_failed, 2, args=((0, 1),)):
        assert found[1:] == ["nothing"] * 2


def beside_adamw(rank: int, way: str) -> list[str]:
    """The warnings of two steps of a Muon that averages gradients, with a separate AdamW beside it."""
    model, mesh = perceptron(), build_mesh({"dp": 2})
    hidden, rest = split_parameters(model)
    muon, adamw = Muon(hidden, strategy="zero1", mesh=mesh), torch.optim.AdamW(rest, lr=0.1)
    both = MuonWithAdamW(muon, adamw) if way == "pair" else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            torch.manual_seed(2 * step + rank)
            model(torch.randn(4, 6)).square().sum().backward()
            if way == "all_reduce":
                for _, param in rest:
                    dist.all_reduce(param.grad)
            if way in ("rest", "alone"):
                muon.ready_gradients(rest=[param for _, param in rest] if way == "rest" else ())
            for optimizer in (muon, adamw) if both is None else (both,):
                optimizer.step()
                optimizer.zero_grad()
    return [str(it.message) for it in caught if "another optimizer" in str(it.message)]


def beside_adamw_in_all_ways(rank: int) -> dict[str, list[str]]:
    return {way: beside_adamw(rank, way) for way in ("nothing", "alone", "rest", "all_reduce", "pair")}


def test_an_adamw_beside_whose_gradients_are_not_averaged_causes_one_warning() -> None:
    for found in launch(beside_adamw_in_all_ways, 2):
        assert {way: len(said) for way, said in found.items() if said} == {"nothing": 1, "alone": 1}
        assert "Put both optimizers into one MuonWithAdamW(muon, adamw)" in found["nothing"][0]
