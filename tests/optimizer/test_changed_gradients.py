"""Gradients that change between ``ready_gradients()`` and ``step()`` are found, however they were changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from muon_tutorial import Grid, Muon
from muon_tutorial.errors import GradientError

from ..oracle import UNEVEN, Ranks, seated, whole_gradients


def scale_data(grad: Tensor) -> None:
    """As loops from before PyTorch 0.4 do: no version counter moves."""
    grad.data.mul_(0.5)


def clamp_in_place(grad: Tensor) -> None:
    grad.clamp_(-1e-3, 1e-3)


def flip_a_sign(grad: Tensor) -> None:
    grad.data[-1, -1] = -grad.data[-1, -1]


def readied(strategy: str) -> Ranks:
    ranks = seated(Grid.of(dp=2), strategy)
    ranks.give(next(whole_gradients(UNEVEN)))
    ranks.ready(max_norm=0.5)
    return ranks


def gradient(ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The first parameter of rank 0 that has a gradient, and that."""
    return next((param, param.grad) for param in ranks.params[0] if param.grad is not None)


def assert_refused(ranks: Ranks) -> None:
    before = [[param.detach().clone() for param in params] for params in ranks.params]
    with pytest.raises(GradientError, match="rank 0: gradients have changed since ready_gradients"):
        ranks.step()
    for params, kept in zip(ranks.params, before, strict=True):
        assert all(map(torch.equal, params, kept))


@pytest.mark.parametrize("strategy", ["zero1", "owner"])
@pytest.mark.parametrize("write", [scale_data, clamp_in_place, flip_a_sign])
def test_a_write_on_one_rank_is_refused_and_steps_nothing(
    write: Callable[[Tensor], None], strategy: str
) -> None:
    ranks = readied(strategy)
    write(gradient(ranks)[1])
    assert_refused(ranks)


def test_another_tensor_of_the_same_bits_is_another_gradient() -> None:
    ranks = readied("zero1")
    param, grad = gradient(ranks)
    param.grad = grad.clone()
    assert_refused(ranks)


def test_reading_changes_nothing() -> None:
    ranks = readied("zero1")
    assert gradient(ranks)[1].data.isfinite().all()
    ranks.step()


def test_a_process_alone_steps_by_the_gradients_that_it_sees() -> None:
    """There nothing is kept from ``ready_gradients()`` but its clipping, which is done in place."""
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
