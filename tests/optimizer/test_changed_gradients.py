"""Gradients that change between ``ready_gradients()`` and ``step()`` are detected, whatever changed them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from muon_tutorial import Grid, LocalWorld, Muon, MuonWithAdamW
from muon_tutorial.errors import GradientError, NotFiniteError, UsageError

from ..oracle import UNEVEN, Ranks, assert_alike, perceptron, seated, whole_gradients


def flip_a_sign(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.data[-1, -1] = -param.grad.data[-1, -1]


WRITES: dict[str, Callable[[Any], object]] = {
    "scaled": lambda param: param.grad.data.mul_(0.5),  # old PyTorch style, which moves no version counter
    "clamped": lambda param: param.grad.clamp_(-1e-3, 1e-3),
    "a sign": flip_a_sign,
    "another tensor of the same bits": lambda param: setattr(param, "grad", param.grad.clone()),
}


def readied(strategy: str) -> Ranks:
    ranks = seated(Grid.of(dp=2), strategy)
    ranks.give(next(whole_gradients(UNEVEN)))
    ranks.ready(max_norm=0.5)
    return ranks


@pytest.mark.parametrize("strategy", ["zero1", "owner"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_on_one_rank_is_refused(write: Callable[[Any], object], strategy: str) -> None:
    ranks = readied(strategy)
    write(next(param for param in ranks.params[0] if param.grad is not None))
    before = ranks.held()
    said = "rank 0: gradients have changed since ready_gradients.* call it once per step, after the last"
    with pytest.raises(GradientError, match=said):
        ranks.step()
    assert_alike(ranks.params, before)


def test_a_process_alone_steps_by_the_gradients_that_it_sees() -> None:
    """The process keeps nothing from ``ready_gradients()`` except the clipping, which is done in place."""
    weights = [torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    gradients = [torch.arange(24.0).view(4, 6) for _ in weights]
    for weight, grad in zip(weights, gradients, strict=True):
        weight.grad = grad
    ready, plain = (Muon([weight]) for weight in weights)
    ready.ready_gradients()
    for grad in gradients:
        grad.data.neg_()
    ready.step()
    plain.step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("strategy", ["zero1", "owner"])
def test_a_write_that_leaves_every_bit_is_none(strategy: str) -> None:
    """``clip_grad_norm_`` writes like this if users give it an infinite limit, to get only the norm."""
    ranks = readied(strategy)
    for grad in (param.grad for param in ranks.params[0] if param.grad is not None):
        grad.mul_(1.0)
    ranks.step()


@pytest.mark.parametrize("strategy", ["zero1", "owner", None])
def test_a_closure_that_changes_no_gradient_leaves_them_readied(strategy: str | None) -> None:
    """Lightning's manual optimization passes a closure that does nothing."""
    (model, both), (of_pair, with_closure), (of_muon, apart) = (pair(strategy) for _ in range(3))
    for each, optimizer in ((model, both), (of_pair, with_closure), (of_muon, apart)):
        backward_into(each)
        optimizer.ready_gradients(0.1)
    both.step()
    with_closure.step(lambda: 0.0)
    apart.muon.step(lambda: 0.0)
    apart.adamw.step()
    for other in (of_pair, of_muon):
        assert all(map(torch.equal, other.parameters(), model.parameters()))


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("strategy", ["zero1", "owner", None])
def test_a_closure_may_drop_readied_gradients(strategy: str | None, again: bool) -> None:
    (model, both), (other, its) = pair(strategy), pair(strategy)

    def closure() -> float:
        model.zero_grad()
        backward_into(model)
        if again:
            both.ready_gradients(0.1)
        return 0.0

    for each, optimizer in ((model, both), (other, its)):
        backward_into(each, 3.0 if each is model else 1.0)
        if again or each is model:
            optimizer.ready_gradients(0.1)
    both.step(closure)
    its.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("strategy", ["zero1", "owner"])
def test_a_closure_that_adds_to_readied_gradients_is_refused(strategy: str) -> None:
    model, both = pair(strategy)

    def closure() -> float:
        backward_into(model)
        return 0.0

    closure()
    both.ready_gradients(0.1)
    with pytest.raises(GradientError, match="gradients have changed since ready_gradients"):
        both.step(closure)


def test_a_closure_that_changes_nothing_does_not_make_gradients_finite() -> None:
    model, both = pair(None)
    backward_into(model, math.nan)
    both.ready_gradients(1.0)
    with pytest.raises(NotFiniteError):
        both.step(lambda: 0.0)


def backward_into(model: torch.nn.Module, factor: float = 1.0) -> None:
    (factor * model(torch.arange(12.0).view(2, 6)).square().sum()).backward()


@pytest.mark.parametrize("strategy", [None, "zero1", "owner"])
@pytest.mark.parametrize(("factor", "again"), [(1.0, True), (math.nan, True), (math.nan, False)])
def test_a_skipped_step_leaves_no_trace(strategy: str | None, factor: float, again: bool) -> None:
    (model, both), (other, its) = pair(strategy), pair(strategy)
    backward_into(model, factor)
    norm = both.ready_gradients(1.0)
    assert norm is not None
    assert bool(norm.isfinite()) == (factor == 1.0)
    model.zero_grad()
    for some in (model, other):
        backward_into(some)
    if again:
        assert both.ready_gradients(1.0) is not None
        its.ready_gradients(1.0)
    both.step()
    its.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def pair(strategy: str | None) -> tuple[torch.nn.Sequential, MuonWithAdamW]:
    model = perceptron()
    mesh = LocalWorld(Grid.of(dp=1)).mesh(0) if strategy else None
    return model, MuonWithAdamW.from_model(model, lr=0.1, strategy=strategy, mesh=mesh)


@pytest.mark.parametrize("readied", [True, False])
def test_a_scaled_step_that_overflowed_is_skipped_by_a_process_alone(readied: bool) -> None:
    """The model's ``zero_grad()`` resets the gradients, also after they were readied."""
    model, both = pair(None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (math.inf, 1.0):
        before = [param.detach().clone() for param in model.parameters()]
        model.zero_grad()
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        next(grad for param in model.parameters() if (grad := param.grad) is not None)[0, 0] *= factor
        if readied:
            scaler.unscale_(both)
            both.ready_gradients(1.0)
        scaler.step(both)
        scaler.update()
        assert scaler.get_scale() == 1.0
        stays = all(map(torch.equal, model.parameters(), before))
        assert stays == (factor != 1.0)


def test_the_same_gradients_are_not_readied_twice() -> None:
    model, both = pair(None)
    backward_into(model)
    both.ready_gradients(1.0)
    backward_into(model)  # adds to the gradients
    with pytest.raises(UsageError, match="already called for this step"):
        both.ready_gradients(1.0)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_is_not_finite_is_not_clipped_and_refused_until_it_is_another(to_none: bool) -> None:
    model, both = pair(None)
    backward_into(model)
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    gradients[0][0, 0] = math.nan
    before = [[it.detach().clone() for it in its] for its in (model.parameters(), gradients)]
    for _ in range(2):
        assert both.ready_gradients(1.0) == math.inf
        with pytest.raises(NotFiniteError, match=r"as ready_gradients\(\) found.* skip this step"):
            both.step()
        with pytest.raises(NotFiniteError):
            both.step()
    assert all(map(torch.equal, model.parameters(), before[0]))
    for grad, was in zip(gradients, before[1], strict=True):
        torch.testing.assert_close(grad, was, rtol=0, atol=0, equal_nan=True)
    model.zero_grad(set_to_none=to_none)
    backward_into(model)
    both.step()
    assert not any(map(torch.equal, model.parameters(), before[0]))
