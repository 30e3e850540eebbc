"""Lesson 00: its checkers know right from wrong on several grids, and its gradients sum without rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from muon_tutorial.learn import first_look

from .answers import assert_quiz, assert_wrong

GRIDS = [(2, 2), (3, 2), (1, 4), (4, 1), (2, 3)]


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_guess_knows_right_from_wrong(dp: int, tp: int) -> None:
    weight, momentum = [position * tp + tp - 1 for position in range(dp)], [dp * tp - 1]
    guess = first_look.guess_holders(first_look.plan_of(dp, tp))
    assert guess.check(weight, momentum)
    wrong: list[tuple[Any, Any, str]] = [
        (3, momentum, "weight: give a list of ranks"),
        (weight, "0", "momentum: give a list of ranks"),
        ([dp * tp], momentum, f"weight: there is no rank {dp * tp}"),
        (weight, [], "holds it, too"),
        (weight[:-1], momentum, "holds it, too"),
    ]
    wrong += [([0, *weight], momentum, "rank 0 (dp=0, tp=0) keeps all rows, columns 0 to")] if tp > 1 else []
    wrong += [(weight, weight, "rows 0 to")] if dp > 1 else []
    for case in wrong:
        assert_wrong(guess, *case)


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_quiz_knows_right_from_wrong(dp: int, tp: int) -> None:
    kept = 48 * 64 // (dp * tp) if (dp, tp) != (2, 3) else 48 * 22 // 2
    wrong = {"copies": (dp + 1, ""), "kept": (1, "numel"), "difference": (1e-7, "torch.equal")}
    assert_quiz(
        first_look.quiz(first_look.plan_of(dp, tp)),
        {"copies": dp, "kept": kept, "difference": 0.0},
        wrong,
    )


@pytest.mark.parametrize("dp", [2, 3, 5, 7])
def test_the_sum_of_gradients_has_no_rounding_in_any_order(dp: int) -> None:
    gradients = [first_look.local_gradient(0, position) for position in range(dp)]
    zero = torch.zeros(first_look.SHAPE)
    exact = torch.stack(gradients).double().sum(0)
    assert torch.equal(sum(gradients, zero), exact.float())
    assert torch.equal(sum(reversed(gradients), zero), exact.float())


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_join_columns_undoes_my_columns(tp: int) -> None:
    whole = first_look.weight(0)
    assert torch.equal(
        first_look.join_columns([first_look.my_columns(whole, rank, tp) for rank in range(tp)]),
        whole,
    )
