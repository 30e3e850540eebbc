"""Lesson 00: its checkers know right from wrong on several grids, and its gradients sum without rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from muon_tutorial.learn import lesson00
from muon_tutorial.learn.widgets.shell import Shell

GRIDS = [(2, 2), (3, 2), (1, 4), (4, 1), (2, 3)]


def right(dp: int, tp: int) -> tuple[list[int], list[int]]:
    return [position * tp + tp - 1 for position in range(dp)], [dp * tp - 1]


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_right_guess_passes(dp: int, tp: int) -> None:
    assert lesson00.guess_holders(lesson00.plan_of(dp, tp)).check(*right(dp, tp))


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_wrong_guesses_are_told_what_is_wrong_with_them(dp: int, tp: int) -> None:
    weight, momentum = right(dp, tp)
    wrong: list[tuple[Any, Any, str]] = [
        (3, momentum, "weight: give a list of ranks"),
        (weight, "0", "momentum: give a list of ranks"),
        ([dp * tp], momentum, f"weight: there is no rank {dp * tp}"),
        (weight, [], "holds it, too"),
        (weight[:-1], momentum, "holds it, too"),
    ]
    wrong += [([0, *weight], momentum, "rank 0 (dp=0, tp=0) keeps all rows, columns 0 to")] if tp > 1 else []
    wrong += [(weight, weight, "rows 0 to")] if dp > 1 else []
    for weight_holders, momentum_holders, says in wrong:
        verdict = lesson00.guess_holders(lesson00.plan_of(dp, tp)).check(weight_holders, momentum_holders)
        assert verdict.passed is False
        assert says in verdict.message


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_quiz_knows_right_from_wrong(dp: int, tp: int) -> None:
    quiz = lesson00.quiz(lesson00.plan_of(dp, tp))
    kept = 48 * 64 // (dp * tp) if (dp, tp) != (2, 3) else 48 * 22 // 2
    assert quiz.check({"copies": dp, "kept": kept, "difference": 0.0})
    assert "copies" in quiz.check({"copies": dp + 1, "kept": kept, "difference": 0}).message
    assert "numel" in quiz.check({"copies": dp, "kept": 1, "difference": 0}).message
    assert "torch.equal" in quiz.check({"copies": dp, "kept": kept, "difference": 1e-7}).message


@pytest.mark.parametrize("dp", [2, 3, 5, 7])
def test_the_sum_of_gradients_has_no_rounding_in_any_order(dp: int) -> None:
    gradients = [lesson00.local_gradient(0, position) for position in range(dp)]
    zero = torch.zeros(lesson00.SHAPE)
    exact = torch.stack(gradients).double().sum(0)
    assert torch.equal(sum(gradients, zero), exact.float())
    assert torch.equal(sum(reversed(gradients), zero), exact.float())


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_join_columns_undoes_my_columns(tp: int) -> None:
    whole = lesson00.weight(0)
    assert torch.equal(
        lesson00.join_columns([lesson00.my_columns(whole, rank, tp) for rank in range(tp)]), whole
    )


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_every_position_of_its_widget_can_be_drawn(dp: int, tp: int) -> None:
    shell = lesson00.explore(lesson00.plan_of(dp, tp))
    assert isinstance(shell, Shell)
    seen = set()
    for rank in range(dp * tp):
        for moment in range(1, 7):
            shell.controls["rank"].value, shell.controls["moment"].value = rank, moment
            assert "<img " in shell.canvas.value
            seen.add(shell.canvas.value)
    assert len(seen) > dp * tp
