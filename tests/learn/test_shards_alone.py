"""Lesson 08: what a cut does to UVᵀ, and a gather's checker that knows right from wrong on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial.learn import shards_alone

from .answers import assert_quiz, assert_wrong, message_of_wrong

GRIDS = [(1, 2), (2, 2), (1, 4)]


def found(matrix: str, cut: str, pieces: int) -> shards_alone.Comparison:
    whole = shards_alone.matrices()[matrix]
    return shards_alone.compare(shards_alone.pieces_alone(whole, shards_alone.DIMS[cut], pieces), whole)


@pytest.mark.parametrize("matrix", ["real", "Gaussian", "power law"])
@pytest.mark.parametrize("tp", [2, 4])
def test_cut_by_columns_every_singular_value_is_the_root_of_tp_and_the_update_wrong(
    matrix: str, tp: int
) -> None:
    result = found(matrix, "columns", tp)
    assert result.values[0] == pytest.approx(tp**0.5)
    assert result.values[-1] == pytest.approx(tp**0.5)
    assert result.cosine < 0.97
    assert result.at_best > 0.2


def test_cut_by_rows_it_is_nearly_harmless_on_independent_numbers_and_on_nothing_else() -> None:
    assert found("Gaussian", "rows", 4).cosine > 0.97
    assert found("real", "rows", 4).cosine < 0.72
    assert found("power law", "rows", 4).cosine < 0.72
    assert found("Gaussian", "columns", 4).cosine == pytest.approx(0.86, abs=0.01)


def test_one_piece_is_the_whole_and_no_rescaling_brings_others_nearer_than_at_best() -> None:
    for alone in (found("real", "columns", 1), found("real", "rows", 1)):
        assert alone.distance < 1e-9
        assert alone.cosine == pytest.approx(1)
    whole = shards_alone.gradient()
    update, ideal = shards_alone.pieces_alone(whole, 1, 4), shards_alone.orthogonal(whole)
    best = min(((scale * update - ideal).norm() / ideal.norm()).item() for scale in torch.linspace(0, 1, 401))
    assert shards_alone.compare(update, whole).at_best == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("tp", [2, 4])
def test_its_pictures_are_drawn_and_say_their_numbers(tp: int) -> None:
    panels = shards_alone.picture_of_panels(shards_alone.gradient(), tp)
    assert "recorded after 300 steps" in panels.alt
    assert "Cut by columns into 4: singular values 2.00 to 2.00, cosine 0.77" in panels.alt
    assert shards_alone.picture_of_panels(shards_alone.gradient(), tp).svg == panels.svg
    assert f"cut by rows: each of {tp} places holds {64 // tp}" in shards_alone.picture_of_cuts(tp).alt


@pytest.mark.parametrize("tp", [2, 4])
def test_the_guess_and_the_quiz_know_right_from_wrong(tp: int) -> None:
    root, guess = tp**0.5, shards_alone.predict(tp)
    assert guess.check(root, False)
    wrong = [(1, True, "right for each piece"), (tp, False, "squares"), (17, False, "Run the next cells")]
    for case in [*wrong, (root, True, "no singular value but 1"), ("large", False, "True or False")]:
        assert_wrong(guess, *case)
    cosine = round(found("real", "columns", tp).cosine, 3)
    right = {"largest": root, "cosine": cosine, "received": (tp - 1) * 64 * 256 // tp}
    numbers = {"largest": (1.0, ""), "cosine": (1.0, ""), "received": (64 * 256, "")}
    assert_quiz(shards_alone.quiz(tp), right, numbers)


def gathered(piece: Tensor, group: Any) -> list[Tensor]:
    pieces = [torch.empty_like(piece) for _ in range(group.size())]
    dist.all_gather(pieces, piece, group=group)
    return pieces


def solution(piece: Tensor, dim: int, group: Any) -> Any:
    return torch.cat(gathered(piece, group), dim=dim)


def along(dim_of: Callable[[int], int]) -> Callable:
    """Puts the pieces side by side along a dimension of its own choice."""
    return lambda piece, dim, group: torch.cat(gathered(piece, group), dim=dim_of(dim))


def backwards(piece: Tensor, dim: int, group: Any) -> Any:
    return torch.cat(gathered(piece, group)[::-1], dim=dim)


def by_everybody(piece: Tensor, dim: int, group: Any) -> Any:
    return solution(piece, dim, dist.group.WORLD)


@pytest.mark.live
@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_solution_and_the_reference_pass(dp: int, tp: int) -> None:
    assert shards_alone.check_gather(dp, tp).check(solution)
    assert shards_alone.check_gather(dp, tp).check(shards_alone.gather_whole)


WRONG: list[tuple[Callable, str]] = [
    (along(lambda dim: 1), "Cut by rows, rank 0: the shape is"),
    (along(lambda dim: 0), "Cut by columns, rank 0: the shape is"),
    (lambda *given: along(lambda dim: 0)(*given).view(shards_alone.SHAPE), "right, but at row 0, column"),
    (backwards, "the shape is right, but at row 0, column 0 stands the number of row 0, column"),
    (lambda piece, dim, group: torch.stack(gathered(piece, group), dim=dim), "without a new dimension"),
    (lambda piece, dim, group: piece, "nothing was put together"),
    (lambda piece, dim, group: torch.full(shards_alone.SHAPE, -1.0), "was never filled"),
    (lambda piece, dim, group: gathered(piece, group), "return a matrix, not list"),
    (lambda piece, dim, group: [][dim], "IndexError"),
]


@pytest.mark.live
@pytest.mark.parametrize("grid", [(2, 2), (1, 4)])
@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_a_wrong_gather_is_told_what_is_wrong_with_it(wrong: Callable, says: str, grid: tuple) -> None:
    message = message_of_wrong(shards_alone.check_gather(*grid), wrong)
    assert says in message
    assert "Without group" not in message


def without_group(piece: Tensor, dim: int, group: Any) -> Tensor:
    pieces = [torch.empty_like(piece) for _ in range(group.size())]
    dist.all_gather(pieces, piece)
    return torch.cat(pieces, dim=dim)


@pytest.mark.live
def test_a_gather_that_leaves_out_its_group_is_told_so_in_a_few_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_wrong(shards_alone.check_gather(2, 2), by_everybody, "pieces of all ranks")
    said = shards_alone.check_gather(2, 2).check(without_group).message
    assert "Without group=group all 4 ranks of the grid answer, not the 2 of your line along tp." in said
    assert said.count("RuntimeError") == 1
    broken = shards_alone.run_gather(without_group, 2, 2)
    assert "Without group=group" in capsys.readouterr().out
    assert shards_alone.picture_of_gathered(broken).alt.count("no matrix") == 2


@pytest.mark.live
def test_pictures_show_the_readers_run_and_the_reference_for_a_stub(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(function: Callable) -> str:
        return shards_alone.picture_of_gathered(shards_alone.run_gather(function, 1, 2)).alt

    assert shown(solution).count("all in place") == 2
    assert shown(backwards).count("wrong from row 0, column 0") == 2
    assert "256 × 64" not in shown(backwards)
    assert "128 × 128, a wrong shape" in shown(along(lambda dim: 0))
    assert "no matrix" in shown(lambda piece, dim, group: [piece])
    assert shards_alone.check_gather(1, 2).check(lambda *given: ...).passed is None
    capsys.readouterr()
    assert "all in place" in shown(lambda *given: ...)
    assert "reference" in capsys.readouterr().out


@pytest.mark.live
def test_costs_are_said_with_what_travels() -> None:
    from muon_tutorial import launch

    said = shards_alone.say_cost(launch(shards_alone.cost_of_both, 2, args=(solution, 1, 2, 1)), 2)
    assert "8,192" in said
    assert "(32,768 bytes in float32)" in said
