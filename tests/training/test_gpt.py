"""The model starts the same on all ranks, attends only to the past, and computes the same when it is cut."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from muon_tutorial import build_mesh, launch
from muon_tutorial.training.gpt import GPTShape, build_gpt, next_byte_loss, parallelize

from ..oracle import whole

SHAPE = GPTShape(layers=2, width=16, heads=4, context=12)
TOKENS = torch.arange(24).view(2, 12) * 7 % 256
CUT = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.up", "mlp.down")


def test_first_weights_follow_from_the_seed() -> None:
    torch.manual_seed(1)
    one = build_gpt(SHAPE, seed=0).state_dict()
    torch.manual_seed(2)
    two, other = build_gpt(SHAPE, seed=0).state_dict(), build_gpt(SHAPE, seed=1).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_the_first_loss_is_that_of_guessing() -> None:
    loss = next_byte_loss(build_gpt(SHAPE, seed=0), TOKENS[:, :-1], TOKENS[:, 1:])
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_a_position_sees_only_what_came_before() -> None:
    model = build_gpt(SHAPE, seed=0)
    changed = TOKENS.clone()
    changed[:, 6:] += 1
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def gradients_when_cut(rank: int) -> dict[str, tuple[torch.Tensor, bool]]:
    """Each parameter's whole gradient, and whether the parameter is cut."""
    model = build_gpt(SHAPE, seed=0)
    parallelize(model, build_mesh({"dp": 1, "tp": 2})["tp"])
    next_byte_loss(model, TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    named = model.named_parameters()
    return {name: (whole(it.grad), isinstance(it, DTensor)) for name, it in named}  # type: ignore[arg-type]


def test_cutting_the_model_changes_no_gradient() -> None:
    model = build_gpt(SHAPE, seed=0)
    next_byte_loss(model, TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    first, second = launch(gradients_when_cut, 2, output="quiet")
    for name, param in model.named_parameters():
        grad, is_cut = first[name]
        assert is_cut == (name.removesuffix(".weight").split(".", 2)[-1] in CUT)
        torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-7)
        assert torch.equal(grad, second[name][0])
