"""Muon with ``orthogonalize=``: all strategies give a recipe's bits; the default gives stock Muon's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from muon_tutorial import STRATEGIES, Grid, LocalWorld, Muon, UsageError
from muon_tutorial.newton_schulz import YOU_JIACHENG
from muon_tutorial.orthogonalizers import stack_sizes
from muon_tutorial.orthogonalizers.iterate import orthogonalize
from muon_tutorial.orthogonalizers.named import RECIPES
from muon_tutorial.orthogonalizers.stack_sizes import RUN_BYTES
from muon_tutorial.step import orthogonalize as orthogonalize_step
from muon_tutorial.step import single_process
from muon_tutorial.step.orthogonalize import newton_schulz_update
from muon_tutorial.step.single_process import AloneStep

SIDES = [(6, 10), (16, 8), (12, 12)]


def weights(shapes: Sequence[tuple[int, int]] = SIDES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*sides, generator=generator)) for sides in shapes]


def gradient(param: Tensor, step: int) -> Tensor:
    return torch.sin(torch.arange(param.numel()).reshape(param.shape) * 0.37 + step).to(param.dtype)


def stepped(muon: Muon, params: list[torch.nn.Parameter], steps: int = 2) -> list[Tensor]:
    for step in range(steps):
        for param in params:
            param.grad = gradient(param, step)
        muon.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_subtracts_what_the_recipe_makes_of_the_momentum(name: str) -> None:
    params = weights()
    before = params[0].detach().clone()
    muon = Muon(params, lr=0.1, weight_decay=0.0, momentum=0.0, nesterov=False, orthogonalize=name)
    stepped(muon, params, 1)
    update = orthogonalize(gradient(before, 0), RECIPES[name]).float()
    torch.testing.assert_close(params[0].detach(), before - 0.1 * update)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["stock", *RECIPES])
def test_autocast_around_a_step_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    params, others = weights(), weights()
    stepped(Muon(params, orthogonalize=name), params)
    with torch.autocast("cpu", dtype):
        stepped(Muon(others, orthogonalize=name), others)
    assert all(map(torch.equal, params, others))


def test_stock_is_the_default_to_the_bit_and_groups_may_go_different_ways() -> None:
    params, default, theirs, gram = (weights() for _ in range(4))
    ways = {"stock": params[:1], "gram": params[1:]}
    stepped(Muon([{"params": its, "orthogonalize": name} for name, its in ways.items()]), params)
    stepped(Muon(default), default)
    stepped(torch.optim.Muon(theirs), theirs)  # type: ignore[arg-type]
    stepped(Muon(gram, orthogonalize="gram"), gram)
    assert all(map(torch.equal, default, theirs))
    assert all(map(torch.equal, params, [default[0], *gram[1:]]))
    assert not any(map(torch.equal, default, gram))


def small_weights() -> list[torch.nn.Parameter]:
    return weights([(48, 64)] * 7 + [(64, 64)] * 3 + [(40, 24)])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of matrices orthogonalized in each call of Newton–Schulz."""
    counts: list[int] = []

    def noted(whole: Tensor, *given: Any) -> Tensor:
        counts.append(len(whole) if whole.ndim == 3 else 1)
        return newton_schulz_update(whole, *given)

    for module in (orthogonalize_step, single_process):
        monkeypatch.setattr(module, "newton_schulz_update", noted)
    monkeypatch.setattr(stack_sizes, "_keeps_bits", lambda *_: True)
    return counts


@pytest.mark.parametrize(
    ("run_bytes", "stacks"),
    [(RUN_BYTES, [1, 3, 7]), (130_000, [1] * 5 + [3, 3])],  # 130,000 hold 3 of 48 × 64, 1 of 64 × 64
)
def test_small_equal_matrices_are_stepped_in_full_stacks_to_the_bits_of_one_by_one(
    counted: list[int], run_bytes: int, stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_sizes, "RUN_BYTES", run_bytes)
    stacked, alone = small_weights(), small_weights()
    stepped(Muon(stacked, orthogonalize="gram"), stacked, 1)
    assert sorted(counted) == stacks
    for param in alone:
        stepped(Muon([param], orthogonalize="gram"), [param], 1)
    assert all(map(torch.equal, stacked, alone))


def test_matrices_of_two_dtypes_are_stepped_apart(counted: list[int]) -> None:
    params = small_weights()[:6]
    params = [torch.nn.Parameter(param.detach().to(torch.bfloat16)) for param in params[:2]] + params[2:]
    stepped(Muon(params, orthogonalize="gram"), params, 1)
    assert sorted(counted) == [2, 4]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize(
    ("make", "name", "stack"),
    [(small_weights, "gram", 3), *((weights, name, 1) for name in ("minimax", "minimax_bf16", "turbo"))],
)
def test_every_strategy_gives_one_process_bits(
    strategy: str, make: Callable[[], list[torch.nn.Parameter]], name: str, stack: int, counted: list[int]
) -> None:
    """The cases include small matrices, which are stepped in stacks."""
    alone = make()
    stepped(Muon(alone, orthogonalize=name), alone)
    counted.clear()
    world = LocalWorld(Grid.of(dp=2))
    ranks = [make() for _ in range(2)]
    own: list[dict[str, Any]] = [{"strategy": strategy, "mesh": world.mesh(rank)} for rank in range(2)]
    muons = [Muon(params, orthogonalize=name, **its) for params, its in zip(ranks, own, strict=True)]
    for step in range(2):
        for params in ranks:
            for param in params:
                param.grad = gradient(param, step)
        world.run([muon.program() for muon in muons])
    assert max(counted) >= stack
    assert all(all(map(torch.equal, params, alone)) for params in ranks)


def test_an_unknown_name_and_coefficients_beside_a_recipe_are_refused() -> None:
    said = r"must be 'stock', 'auto' or one of float32, gram, .*minimax_bf16, three_steps; got 'automatic'"
    with pytest.raises(UsageError, match=said):
        Muon(weights(), orthogonalize="automatic")
    for name, own in (("gram", {"ns_coefficients": YOU_JIACHENG}), ("auto", {"ns_steps": 4})):
        with pytest.raises(UsageError, match="brings its own coefficients and steps"):
            Muon(weights(), orthogonalize=name, **own)
    muon = Muon(weights())
    with pytest.raises(UsageError, match="orthogonalize must be"):
        muon.add_param_group({"params": [torch.nn.Parameter(torch.eye(3))], "orthogonalize": "fast"})


def test_memory_of_a_recipe_is_kept_between_steps_and_not_copied() -> None:
    params = weights()
    muon = Muon(params, orthogonalize="minimax")
    stepped(muon, params)
    (mesh,) = muon.steps
    assert isinstance(mesh.step, AloneStep)
    kept = mesh.step.workspace.nbytes()
    stepped(muon, params)
    assert mesh.step.workspace.nbytes() == kept > 0
    assert copy.deepcopy(muon).param_groups[0]["orthogonalize"] == "minimax"
