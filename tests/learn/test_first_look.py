"""Lesson 00: its checkers tell right from wrong on several grids, and its gradients sum without rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from muon_tutorial import Plan
from muon_tutorial.learn import first_look
from muon_tutorial.learn.exercises.judge import Exercise
from muon_tutorial.learn.inputs import measure
from muon_tutorial.learn.pictures import colours

from .answers import assert_wrong

GRIDS = [(1, 4), (4, 1), (2, 3)]


@pytest.mark.parametrize(("dp", "tp"), [*GRIDS, (2, 2)])
def test_the_kept_momentum_is_the_plans_and_each_mistake_is_named(dp: int, tp: int) -> None:
    def part(piece: Callable[[Tensor, int], Tensor], place: Callable[[int], int]) -> Callable[..., Any]:
        return lambda matrix, rank: piece(matrix, rank).chunk(dp)[place(rank)]

    def mine(matrix: Tensor, rank: int) -> Tensor:
        return columns(tp)(matrix, rank).flatten()

    exercise = first_look.check_momentum(dp, tp)
    right = part(mine, lambda rank: rank // tp)
    assert exercise.check(right)
    if 64 % tp == 0:
        stored = first_look.plan_of(dp, tp).buckets[0].stored_shards
        grid = first_look.plan_of(dp, tp).grid
        kept = [right(first_look.weight(0), rank).numel() for rank in grid.ranks]
        assert kept == [stored(grid.at(rank))[0].numel for rank in grid.ranks]
    flat, square = part(lambda matrix, rank: matrix.flatten(), lambda rank: rank // tp), (dp, tp) == (2, 2)
    between = lambda matrix, rank: columns(tp)(matrix, rank).chunk(dp, 1)[rank // tp]  # noqa: E731
    no_row_is_cut = (dp, tp) == (2, 3)
    assert_each_wrong(
        exercise,
        (True, lambda matrix, rank: rank, "Rank 0: return a tensor, not a int"),
        (True, lambda matrix, rank: torch.zeros(3), "Rank 0 gets 3 entries, and should keep"),
        (True, lambda matrix, rank: mine(matrix, rank)[999999], "Rank 0: The function raised IndexError"),
        (no_row_is_cut, part(columns(tp), lambda rank: rank // tp), "Cut the flat list"),
        (dp > 1, columns(tp), "along dp, each rank keeps only a part"),
        (tp > 1, flat, "not cut over tp"),
        (square, part(mine, lambda rank: rank % dp), "as many as it should. They are those of"),
        (square, between, "cut between columns"),
    )


def assert_each_wrong(exercise: Exercise, *cases: tuple[bool, Callable[..., Any], str]) -> None:
    """Each case: whether it can happen on this grid, a function, and the message about it."""
    for _, function, says in (case for case in cases if case[0]):
        assert_wrong(exercise, function, says)


def columns(tp: int) -> Callable[[Tensor, int], Any]:
    return lambda matrix, rank: matrix.chunk(tp, dim=1)[rank % tp]


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_cut_knows_right_from_wrong_and_draws_the_wrong_one(dp: int, tp: int) -> None:
    exercise = first_look.check_columns(dp, tp)
    others = "of the columns should be its own" if 64 % tp else "they belong to another place along tp"
    assert_each_wrong(
        exercise,
        (True, lambda matrix, rank: matrix.tolist(), "Rank 0: return a tensor, not a list"),
        (True, lambda matrix, rank: matrix[:, :1] + 1, "is no block of the matrix"),
        (True, lambda matrix, rank: matrix.chunk(9)[999], "Rank 0: The function raised IndexError"),
        (True, lambda matrix, rank: matrix[:, :3], "of the columns should be its own"),
        (tp > 1, lambda matrix, rank: matrix.chunk(tp)[rank % tp], "rows are cut, and columns should be"),
        (tp > 1, lambda matrix, rank: columns(tp)(matrix, -1 - rank), others),
    )
    taken = exercise.check(lambda matrix, rank: matrix[:, :3]).picture
    assert taken is not None
    assert "rank 0 (dp=0, tp=0) holds all rows, columns 0 to 2" in taken.alt
    assert exercise.check(columns(tp))
    assert first_look.check_columns(dp, tp).check(partial(first_look.my_columns, tp=tp))


@pytest.mark.parametrize(("dp", "tp"), [*GRIDS, (2, 2)])
def test_the_join_knows_right_from_wrong(dp: int, tp: int) -> None:
    exercise = first_look.check_join(dp, tp)
    assert exercise.check(lambda pieces: torch.cat(pieces[:tp], dim=1))
    assert exercise.check(lambda pieces: torch.cat(pieces[-tp:], dim=1))
    assert_each_wrong(
        exercise,
        (True, lambda pieces: pieces, "Return a tensor, not a list"),
        (True, lambda pieces: torch.cat(pieces[:tp], dim=1)[:, :3], "How many ranks together"),
        (dp > 1, lambda pieces: torch.cat(pieces, dim=1), "Along dp the columns are copies"),
        (tp > 1 and 64 % tp == 0, lambda pieces: torch.cat(pieces[:tp]), "one above the other"),
        ((dp, tp) == (2, 2), lambda pieces: torch.cat(pieces[:tp][::-1], dim=1), "not in the order"),
    )


def pretended(dp: int, tp: int) -> tuple[Plan, list[first_look.WeightReport], Tensor]:
    """Reports as real ranks would send them, and the weight that all ranks have."""
    plan, alone = first_look.plan_of(dp, tp), first_look.weight(1)
    reports = [
        first_look.WeightReport(
            first_look.my_columns(first_look.weight(0), rank, tp),
            torch.full((3,), float(rank)),
            first_look.my_columns(alone, rank, tp),
        )
        for rank in range(dp * tp)
    ]
    return plan, reports, alone


def test_the_film_ends_in_no_bit_that_differs_and_would_say_so_if_one_did() -> None:
    plan, reports, alone = pretended(2, 2)
    film = first_look.film_of(plan, reports, alone)
    assert film.verdict == "0 of 98,304 bits differ"
    assert film.label(2, film.moments[0]) == "rank 2 · bytes A"
    alone[3, 40] += 1e-7 * alone[3, 40].abs().clamp(min=1)
    other = first_look.film_of(plan, reports, alone)
    assert 0 < other.differ < 32
    drawn = [first_look.draw_story(each) for each in (film, other)]
    assert [colours.RIGHT in each.svg for each in drawn] == [True, False]
    assert [colours.WRONG in each.svg for each in drawn] == [False, True]


@pytest.mark.parametrize(("dp", "tp"), [(2, 8), (6, 1)])
def test_its_pictures_fit_a_page_and_name_every_rank(dp: int, tp: int) -> None:
    plan, reports, alone = pretended(dp, tp)
    for drawn in (
        first_look.picture_of_momentum(plan),
        first_look.draw_story(first_look.film_of(plan, reports, alone)),
    ):
        assert drawn.width <= 900
        assert all(f"rank {rank} " in drawn.alt for rank in range(dp * tp))


def test_private_memory_grows_with_what_is_held() -> None:
    before = measure.private_bytes()
    held = [torch.ones(16_000_000) for _ in range(4)]  # one tensor may fit into freed memory of the process
    assert measure.private_bytes() - before > sum(it.nbytes for it in held) / 2


@pytest.mark.parametrize("dp", [2, 3, 5, 7])
def test_the_sum_of_gradients_has_no_rounding_in_any_order(dp: int) -> None:
    gradients = [first_look.local_gradient(0, position) for position in range(dp)]
    zero = torch.zeros(first_look.SHAPE)
    exact = torch.stack(gradients).double().sum(0)
    assert torch.equal(sum(gradients, zero), exact.float())
    assert torch.equal(sum(reversed(gradients), zero), exact.float())


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (
            first_look.check_columns,
            "matrix.chunk(tp, dim=1)[rank % tp]",
            "matrix.chunk(dp, dim=1)[rank % dp]",
        ),
        (
            first_look.check_momentum,
            "mine(matrix, rank).chunk(dp)[rank // tp]",
            "mine(matrix, rank).chunk(tp)[rank // dp]",
        ),
        (  # there is no place 2 among two parts, so it raises an error on the longer grid
            first_look.check_momentum,
            "mine(matrix, rank).chunk(dp)[rank // tp]",
            "mine(matrix, rank).chunk(tp)[rank // tp]",
        ),
        (first_look.check_join, "torch.cat(matrix[:tp], dim=1)", "torch.cat(matrix[:dp], dim=1)"),
    ],
)
def test_on_a_square_grid_too_dp_is_not_tp(check: Callable[[int, int], Any], right: str, wrong: str) -> None:
    notebook = {
        "dp": 2,
        "tp": 2,
        "torch": torch,
        "mine": lambda matrix, rank: columns(2)(matrix, rank).flatten(),
    }
    assert check(2, 2).check(eval(f"lambda matrix, rank=0: {right}", notebook))
    assert_wrong(
        check(2, 2),
        eval(f"lambda matrix, rank=0: {wrong}", notebook),
        "but not on dp=3 × tp=2: is dp used where tp belongs?",
    )
    assert (notebook["dp"], notebook["tp"]) == (2, 2)
