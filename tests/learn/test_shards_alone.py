"""Lesson 08: the effect of a cut on UVᵀ, and a checker that tells right gathers from wrong on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial.learn import shards_alone

from .answers import altered, assert_quiz, assert_wrong, judged, message_of_wrong


def found(matrix: str, cut: str, pieces: int) -> shards_alone.Comparison:
    whole = shards_alone.matrices()[matrix]
    return shards_alone.compare(shards_alone.pieces_alone(whole, shards_alone.DIMS[cut], pieces), whole)


def test_one_piece_is_the_whole_and_no_rescaling_brings_others_nearer_than_at_best() -> None:
    for alone in (found("real", "columns", 1), found("real", "rows", 1)):
        assert alone.distance < 1e-9
        assert alone.cosine == pytest.approx(1)
    whole = shards_alone.gradient()
    update, ideal = shards_alone.pieces_alone(whole, 1, 4), shards_alone.orthogonal(whole)
    best = min(((scale * update - ideal).norm() / ideal.norm()).item() for scale in torch.linspace(0, 1, 401))
    assert shards_alone.compare(update, whole).at_best == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_guess_and_the_quiz_know_right_from_wrong(tp: int) -> None:
    root, guess = tp**0.5, shards_alone.guess(tp)
    assert guess.check(root, True)
    assert shards_alone.outcomes(tp) == {"largest": round(root, 2), "noise_too": True}
    cosine = round(found("real", "columns", tp).cosine, 3)
    right = {"cosine": cosine, "factor": tp**0.5, "sent": (tp - 1) * 64 * 256 // tp}
    assert_quiz(shards_alone.quiz(tp), right)


def gathered(piece: Tensor, group: Any) -> list[Tensor]:
    pieces = [torch.empty_like(piece) for _ in range(group.size())]
    dist.all_gather(pieces, piece, group=group)
    return pieces


gather = shards_alone.gather_whole
backwards = altered(gather, ("cat(shards", "cat(shards[::-1]"))
below = altered(gather, ("dim=dim", "dim=0"))


WRONG: list[tuple[Callable, str]] = [
    (
        altered(gather, (" for _ in range(group.size())]", "] * group.size()")),
        "Hint: [empty] * n is one tensor, n times",
    ),
    (altered(gather, ("dim=dim", "dim=1")), "Cut by rows, rank 0: the shape is"),
    (below, "Cut by columns, rank 0: the shape is"),
    (lambda *given: below(*given).view(shards_alone.SHAPE), "right, but at row 0, column"),
    (backwards, "the shape is right, but at row 0, column 0 is the entry of row 0, column"),
    (altered(gather, ("cat", "stack")), "without a new dimension"),
    (lambda piece, dim, group: piece, "nothing was put together"),
    (lambda piece, dim, group: torch.full(shards_alone.SHAPE, -1.0), "was never filled"),
    (altered(gather, ("torch.cat(shards, dim=dim)", "shards")), "return a matrix, not list"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_a_wrong_gather_is_told_what_is_wrong_with_it(wrong: Callable, says: str) -> None:
    message = message_of_wrong(shards_alone.check_gather(2, 2), wrong)
    assert says in message
    assert "Without group" not in message


def test_a_gather_that_leaves_out_its_group_is_told_so_in_a_few_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left_out, world = (", group=group", ""), ("group.size()", "dist.get_world_size()")
    everybody, without_group = altered(gather, left_out, world), altered(gather, left_out)
    first_of_the_world = altered(gather, left_out, world, ("cat(shards", "cat(shards[: group.size()]"))
    assert_wrong(shards_alone.check_gather(2, 2), everybody, "shards of all ranks")
    assert_wrong(shards_alone.check_gather(2, 2), first_of_the_world, "another tp group's")
    said = shards_alone.check_gather(2, 2).check(without_group).message
    assert "Without group=group all 4 ranks of the grid answer, not the 2 of your tp group." in said
    assert said.count("RuntimeError") == 1
    broken = shards_alone.run_gather(without_group, 2, 2)
    assert "Without group=group" in capsys.readouterr().out
    assert shards_alone.picture_of_gathered(broken).alt.count("no matrix") == 2


def test_pictures_show_the_readers_run() -> None:
    def shown(function: Callable) -> str:
        return shards_alone.picture_of_gathered(shards_alone.run_gather(function, 1, 2)).alt

    assert shown(backwards).count("wrong from row 0, column 0") == 2
    assert "128 × 128, a wrong shape" in shown(below)
    assert "no matrix" in shown(lambda piece, dim, group: [piece])


surviving = shards_alone.surviving_update
halved = (
    "dist.all_reduce(gram, group=group)",
    "rows, columns = torch.triu_indices(len(gram), len(gram)).unbind()\n    half = gram[rows, columns]\n"
    "    dist.all_reduce(half, group=group)\n    gram[rows, columns] = gram[columns, rows] = half",
)
"""Sends only one half of GGᵀ, which is symmetric."""


def after_gather(shard: Tensor, group: Any) -> Tensor:
    whole = torch.cat(gathered(shard, group), dim=1)
    place = dist.get_rank(group)
    return shards_alone.my_piece(shards_alone.orthogonal(whole), 1, place, group.size())


def test_an_update_that_needs_only_a_sum_of_gram_matrices_passes_at_par() -> None:
    said = shards_alone.check_survival(2, 2).check(surviving).message
    assert f"Yours takes {64 * 64 * 4} bytes; par is" in said
    better = shards_alone.check_survival(1, 4).check(altered(surviving, halved))
    assert better
    assert "You are below it!" in better.message


WRONG_UPDATES: list[tuple[Callable, str]] = [
    (lambda shard, group: shards_alone.orthogonal(shard), "no rank has sent anything"),
    (altered(surviving, ("rsqrt()", "reciprocal()")), "it is U S^-1 Vᵀ, where S^0 is wanted"),
    (altered(surviving, ("rsqrt()", "pow(0)")), "it is U S^1 Vᵀ"),
    (lambda shard, group: surviving(shard, group) / 2, "points the right way, and its singular values are"),
    (after_gather, "The update is right, but a rank sends"),
    (lambda shard, group: surviving(shard.double(), group), "is it float64"),
    (
        altered(surviving, ("(gram, g", "(gram := gram.bfloat16(), g"), ("(gram)", "(gram.float())")),
        "The real matrix: ",
    ),
    (altered(surviving, ("all_reduce(gram", "broadcast(gram, 0")), "dist.broadcast is not counted here"),
    (lambda shard, group: torch.cat(gathered(shard, group), dim=1), "That is the whole update"),
    (lambda shard, group: [shard], "return a matrix, not list"),
]


test_an_update_that_does_not_survive_is_told_why = judged(
    (partial(shards_alone.check_survival, 2, 2), WRONG_UPDATES)
)


def test_a_wrong_update_is_shown_in_the_directions_of_the_gradient() -> None:
    verdict = shards_alone.check_survival(2, 2).check(lambda shard, group: surviving(shard, None))
    assert "singular values are near 0.7" in verdict.message
    assert "group=group is missing" in verdict.message
    assert verdict.picture is not None
    assert verdict.picture.alt.startswith("Your update of the real matrix: cosine 1.00.")
