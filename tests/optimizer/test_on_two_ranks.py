"""On two ranks, users' calls around a pair of optimizers work as in one process, or both refuse them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muon_tutorial import Muon, MuonWithAdamW, build_mesh, launch, split_parameters
from muon_tutorial.errors import GradientError, MismatchError, TutorialError, UsageError
from muon_tutorial.step.unreduced_gradient import UnreducedGradient

from ..configs.setups import error_of

Way = Callable[[MuonWithAdamW, nn.Module], object]
Case = Callable[[int], list[Tensor] | None]


class Network(nn.Module):
    """Three matrices that train by Muon, and vectors that train by AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def pair_of(model: nn.Module, rank: int | None, **settings) -> MuonWithAdamW:
    strategy, mesh = (None, None) if rank is None else ("zero1", build_mesh({"dp": 2}))
    return MuonWithAdamW.from_model(model, lr=0.1, adamw_lr=0.01, strategy=strategy, mesh=mesh, **settings)


def give(model: nn.Module, step: int, rank: int | None) -> None:
    """Set gradients by ``backward()``, with so few bits that the mean over two ranks is exact."""
    made = torch.Generator().manual_seed(step)
    for param in model.parameters():
        each = torch.randint(-31, 32, (2, *param.shape), generator=made) * 2.0**-6
        if param.requires_grad:
            (param * (each.mean(0) if rank is None else each[rank])).sum().backward()


def trained(how: Way, rank: int | None) -> list[Tensor]:
    model = network()
    both = pair_of(model, rank)
    for step in range(3):
        give(model, step, rank)
        how(both, model)
        both.zero_grad()
    return [param.detach() for param in model.parameters()]


def step_each(both: MuonWithAdamW, _: nn.Module) -> None:
    both.muon.step()
    both.adamw.step()


def ready_all_of_the_model(both: MuonWithAdamW, model: nn.Module) -> None:
    """The model's parameters, passed as ``rest``, include Muon's own matrices."""
    both.muon.ready_gradients(0.5, rest=model.parameters())
    both.step()


def ready(both: MuonWithAdamW, _: nn.Module) -> None:
    both.ready_gradients(0.5)
    both.step()


def ready_muons_alone(both: MuonWithAdamW, _: nn.Module) -> None:
    both.muon.ready_gradients(0.5)


def clip_adamws(both: MuonWithAdamW, _: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(both.adamw.param_groups[0]["params"], 0.1)


def frozen_and_seeded_otherwise(rank: int) -> list[Tensor]:
    model = network(seed=rank)
    model.two.requires_grad_(False)
    pair_of(model, rank)
    return [param.detach() for param in model.parameters()]


def added_and_other_on_each_rank(rank: int) -> None:
    model = network()
    model.three.requires_grad_(False)
    both = pair_of(model, rank)
    if rank == 1:
        with torch.no_grad():
            model.three.weight[0, 0] += 1
    model.three.requires_grad_(True)
    both.add_param_group({"params": list(model.three.parameters())})
    give(model, 0, rank)
    both.step()


def reordered(other: str, rank: int) -> None:
    """Pass two vectors to ``ready_gradients()``, in another order on each rank, and step."""
    model = network()
    muon = Muon([("w", model.one.weight)], strategy="zero1", mesh=build_mesh({"dp": 2}))
    rest = [model.one.bias, model.get_parameter(other)]
    give(model, 0, rank)
    muon.ready_gradients(rest=rest[::-1] if rank else rest)
    muon.step()


def states(rank: int) -> tuple[nn.Module, Muon, list[dict]]:
    """A network after two steps, a new Muon for it, and the old Muon's state after each step."""
    model = network()
    muon = Muon(split_parameters(model).hidden, strategy="zero1", mesh=build_mesh({"dp": 2}))
    kept = []
    for step in range(2):
        give(model, step, rank)
        muon.step()
        model.zero_grad()
        kept.append(copy.deepcopy(muon.state_dict()))
    give(model, 2, rank)
    return model, Muon(split_parameters(model).hidden, strategy="zero1", mesh=build_mesh({"dp": 2})), kept


def loaded(steps: tuple[int | None, int | None], rank: int) -> None:
    """Load the state saved after step ``steps[rank]``, or nothing if that is None. Then take a step."""
    _, muon, kept = states(rank)
    step = steps[rank]
    if step is not None:
        muon.load_state_dict(kept[step])
    muon.step()


def loaded_in_one_process(rank: int) -> None:
    model, _, kept = states(rank)
    Muon(split_parameters(model).hidden).load_state_dict(kept[-1])


def not_averaged(rank: int) -> None:
    model = network()
    muon = Muon(split_parameters(model).hidden, strategy="owner", mesh=build_mesh({"dp": 2}))
    give(model, 0, rank)
    muon.step()


def placed_otherwise_on_one_rank(rank: int) -> None:
    mesh = build_mesh({"dp": 2})
    weight = nn.Parameter(distribute_tensor(torch.eye(4), mesh, [Shard(0)]))
    muon = Muon([("weight", weight)], strategy="owner", mesh=mesh)
    grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    weight.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()]) if rank else grad
    muon.step()


def whole_gradient(whose: str, rank: int) -> None:
    """As after ``p.grad = p.grad.full_tensor() * 0.5``."""
    mesh = build_mesh({"dp": 2})
    params = [nn.Parameter(distribute_tensor(torch.eye(4), mesh, [Shard(0)])) for _ in range(2)]
    both = MuonWithAdamW(Muon([("weight", params[0])]), torch.optim.AdamW([("other", params[1])]))
    for param in params:
        param.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    params[whose == "AdamW's"].grad = torch.ones(4, 4)
    both.step()


def sharded_beside(call: str, rank: int) -> None:
    """FSDP2 cuts AdamW's parameter over the ranks over which the step averages."""
    mesh = build_mesh({"dp": 2})
    sharded = nn.Parameter(distribute_tensor(torch.eye(4), mesh, [Shard(0)]))
    muon = Muon([("weight", nn.Parameter(torch.eye(4)))], strategy="zero1", mesh=mesh)
    if call == "made":
        MuonWithAdamW(muon, torch.optim.AdamW([("sharded", sharded)]))
    muon.ready_gradients(rest=[sharded])


def complex_norm(rank: int) -> list[Tensor]:
    weight, other = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(3, dtype=torch.complex64))
    muon = Muon([("weight", weight)], strategy="zero1", mesh=build_mesh({"dp": 2}))
    both = MuonWithAdamW(muon, torch.optim.AdamW([("other", other)]))
    weight.grad, other.grad = torch.zeros(4, 4), torch.full((3,), 3 + 4j)
    norm = both.ready_gradients(0.5)
    assert norm is not None
    return [norm, other.grad]


def wide_gradients(rank: int) -> list[Tensor]:
    """fp32 gradients of bf16 parameters; only one rank has gradients for AdamW."""
    weight, other = (nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in ((4, 6), (3,)))
    weight.grad_dtype = other.grad_dtype = torch.float32
    muon = Muon([("weight", weight)], lr=0.1, strategy="zero1", mesh=build_mesh({"dp": 2}))
    both = MuonWithAdamW(muon, torch.optim.AdamW([("other", other)]))
    weight.grad = torch.arange(24.0).view(4, 6) / 7
    other.grad = None if rank else torch.ones(3)
    both.ready_gradients()
    assert muon.state[weight]["momentum_buffer"].dtype == torch.float32
    assert other.grad is not None
    return [other.grad]


REFUSED: dict[str, tuple[Case, type[TutorialError], str]] = {
    "added": (added_and_other_on_each_rank, MismatchError, "three.weight is not the same on all ranks"),
    "reordered": (partial(reordered, "two.bias"), MismatchError, "parameter 0 of the rest is not the same"),
    "other shapes": (partial(reordered, "three.bias"), MismatchError, "the list of other averaged gradients"),
    "loaded on one rank": (partial(loaded, (None, 1)), MismatchError, "whether the optimizer has stepped or"),
    "loaded from other steps": (
        partial(loaded, (0, 1)),
        MismatchError,
        "the number of steps that have updated the momentum",
    ),
    "loaded in one process": (loaded_in_one_process, UsageError, "one rank's slice, saved with a strategy"),
    **{
        f"{whose} whole gradient of a shard": (
            partial(whole_gradient, whose),
            GradientError,
            "a DTensor of shape (4, 4), of which this rank holds (2, 4), has a plain gradient",
        )
        for whose in ("Muon's", "AdamW's")
    },
    **{
        f"cut over dp, {call}": (
            partial(sharded_beside, call),
            UsageError,
            "a DTensor of shape (4, 4) is cut over dp, so its gradient is averaged already",
        )
        for call in ("made", "readied")
    },
    "not averaged": (not_averaged, GradientError, "strategy 'owner' expects gradients already averaged"),
}
WAYS: list[Way] = [step_each, ready_all_of_the_model, ready]
WRONG: list[Way] = [ready_muons_alone, clip_adamws]


def everything(rank: int) -> dict[str, Any]:
    """All cases in one launch, with a rank's error or tensors; after each, the ranks can go on together."""
    refused: dict[str, Callable] = {name: partial(case, rank) for name, (case, *_) in REFUSED.items()}
    refused |= {way.__name__: partial(trained, way, rank) for way in WRONG}
    refused["placed otherwise"] = partial(placed_otherwise_on_one_rank, rank)
    found: dict[str, Any] = {name: error_of(case) for name, case in refused.items()}
    others = frozen_and_seeded_otherwise, complex_norm, wide_gradients
    found |= {case.__name__: case(rank) for case in others}
    return found | {way.__name__: trained(way, rank) for way in WAYS}


Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    return launch(everything, 2, timeout=60)


@pytest.mark.parametrize("case", REFUSED)
def test_both_ranks_are_told(results: Results, case: str) -> None:
    _, error, said = REFUSED[case]
    for of_rank in results:
        name, text = of_rank[case]
        assert name == error.__name__
        assert said in text


def test_a_gradient_placed_otherwise_on_one_rank_is_refused_on_both(results: Results) -> None:
    (name, other), (own_name, own) = (of_rank["placed otherwise"] for of_rank in results)
    assert (name, own_name) == ("MismatchError", "GradientError")
    assert "rank 1 cannot take this step" in other
    assert "but the parameter has (Shard(dim=0),)" in own


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_two_ranks_are_one_process(results: Results, way: Way) -> None:
    alone = trained(way, None)
    for of_rank in results:
        for one, other in zip(of_rank[way.__name__], alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "said"),
    [(ready_muons_alone, "ready_gradients() of the MuonWithAdamW"), (clip_adamws, "clipping it here would")],
)
def test_half_of_the_pair_is_refused(results: Results, way: Callable, said: str) -> None:
    assert all(said in of_rank[way.__name__][1] for of_rank in results)


def test_frozen_parameters_begin_with_the_first_ranks_values(results: Results) -> None:
    first = list(network().parameters())
    for of_rank in results:
        assert all(map(torch.equal, of_rank["frozen_and_seeded_otherwise"], first))


def test_imaginary_parts_count_in_the_norm(results: Results) -> None:
    for norm, grad in (of_rank["complex_norm"] for of_rank in results):
        assert norm.item() == pytest.approx(75**0.5)
        assert torch.linalg.vector_norm(grad).item() == pytest.approx(0.5)


def test_gradients_have_the_dtype_that_parameters_ask_for(results: Results) -> None:
    for [grad] in (of_rank["wide_gradients"] for of_rank in results):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, torch.full((3,), 0.5))


def test_a_norm_of_unreduced_gradients_is_warned_of() -> None:
    grad = torch.ones(3).as_subclass(UnreducedGradient)
    by_functions = (lambda: torch.norm(grad), lambda: torch.linalg.norm(grad))
    for norm in (grad.norm, grad.data.norm, grad.detach().norm, *by_functions):
        with pytest.warns(UserWarning, match="norm of one rank's own gradient"):
            assert float(norm()) == pytest.approx(3**0.5)
