"""Lesson 04: buffers are those of real ranks; checkers find what is wrong with a way to share updates."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch

from muon_tutorial import launch
from muon_tutorial.errors import GradientError, RankFailedError
from muon_tutorial.learn import first_muon as lesson
from muon_tutorial.learn.first_muon import exercises as misplaced
from muon_tutorial.learn.first_muon import on_ranks as sharing
from muon_tutorial.learn.first_muon import pictures as buffers

from . import sharings
from .answers import assert_wrong, judged, message_of_wrong

SIZES = [1, 3]
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 64, 128)


def reported(handed: list[list[torch.Tensor]], returned: list[Any], lacking: Any = ()) -> sharing.SharingRun:
    """A run without processes, from the tensors that each rank passed on and got back."""
    pairs = zip(handed, returned, strict=True)
    return sharing.SharingRun(0, lacking, tuple(sharing.BufferReport(tuple(h), back) for h, back in pairs))


def pretended(ranks: int, lacking: sharing.Lacking = ()) -> sharing.SharingRun:
    """A run of the early code: this process adds up the buffers of all ranks."""
    return lesson.imitate(ranks, lacking=lacking, skips=True)


@pytest.mark.parametrize("way", sharings.RIGHT)
def test_the_solution_and_other_ways_to_share_pass(way: str) -> None:
    exercise = lesson.check_share(3)
    assert exercise.check(sharings.RIGHT[way])
    assert exercise.accepted is sharings.RIGHT[way]


@pytest.mark.parametrize(
    ("ranks", "place", "since"),
    [
        (2, "v1, 2,048 to 3,072", ""),
        (3, "o1, 3,072 to 4,096", ""),
        (4, "up1, 4,096 to 8,192", ", from 7,168 on"),
    ],
)
def test_the_first_wrong_interval_is_named(ranks: int, place: str, since: str) -> None:
    message = message_of_wrong(lesson.check_share(ranks), sharings.early)
    assert message.startswith("Where rank 1 lacks the gradient of k1: the first wrong place is that of ")
    assert f"that of {place}, in every rank's buffer{since}." in message
    assert "entries of ranks 0 and 1 are added up" in message


FAILS = "A run failed: rank 1 of 2 raised RuntimeError.*. Your function left no buffers to show"


def test_the_reference_stands_in_for_a_function_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert lesson.run_share(sharings.moves_the_offset_first, 2, lacking="k1").wrong() == []
    assert re.fullmatch(f"{FAILS}: this is the reference.", " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize("ranks", SIZES)
def test_real_ranks_do_what_intervals_predict(ranks: int) -> None:
    lacking = sharing.owner_lacks("k1", ranks)
    whole, torn = sharing.run_cases(sharings.early, ranks, [(), lacking])
    assert whole.wrong() == []
    assert torn.wrong() == misplaced.early_wrong(ranks, lacking) != []
    assert torn.agree()
    assert f"{12 - len(torn.wrong())} of 12" in lesson.say_outcome(torn)
    for run, imitated in ((whole, pretended(ranks)), (torn, pretended(ranks, lacking))):
        assert buffers.draw_run(run).svg == buffers.draw_run(imitated).svg


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 9])
def test_the_guess_knows_right_from_wrong(ranks: int) -> None:
    more, guess = ranks + 1, lesson.guess(ranks)
    owner, zeros = 11 % more, ranks / more
    for right in (zeros, round(zeros, 2), Fraction(ranks, more)):
        assert guess.check(torch.tensor(owner), right)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 13])
def test_the_prediction_knows_right_from_wrong(ranks: int) -> None:
    right = misplaced.early_wrong(ranks, sharing.owner_lacks("k1", ranks))
    assert lesson.predict(ranks).check(right)
    assert lesson.predict(ranks).check(name for name in reversed(right))
    odd: list[Any] = ["up1", ["W"], 5, None, [["q1"]], [0]]
    wrong: list[tuple[Any, str]] = [(answer, "list of names") for answer in odd]
    wrong += [([*right, "q1"], "q1 comes out as it should. Its owner puts the update")]
    wrong += [([*right, "k1"], "No rank has an update for it")] if ranks > 1 else []
    wrong += [([other for other in right if other != name], f"{name} comes out wrong, too") for name in right]
    for case in wrong:
        assert_wrong(lesson.predict(ranks), *case)


def test_sums_of_other_things_are_not_taken_for_the_buffer() -> None:
    run = pretended(2)
    flag, flats = torch.ones(3), [run.filled(rank) for rank in range(2)]
    noted = reported([[flats[0].view(-1, 2), flag], [flats[1], flag]], [run.after(0)] * 2)
    assert [noted.zeros(rank) for rank in range(2)] == [run.zeros(rank) for rank in range(2)]
    assert noted.found(1) == run.found(1)
    unknown = reported([[flag], [flag]], [run.after(0) / 2] * 2)
    assert not unknown.writers().any()
    assert "are not Newton–Schulz of the gradient of q1" in str(misplaced.explain(unknown))


@pytest.mark.parametrize("ranks", RANKS)
def test_longest_first_is_never_worse_than_by_index(ranks: int) -> None:
    assert lesson.fair_shares(ranks) == pytest.approx(lesson.shares_by_index(lesson.COSTS, ranks))
    assert 1 - 1e-9 <= lesson.fair_shares(ranks, "longest first") <= lesson.fair_shares(ranks) + 1e-9


def test_the_package_refuses_what_the_early_code_got_wrong() -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(sharings.lack_a_gradient, 2)
    assert isinstance(caught.value.original, GradientError)
    assert "k1 is missing on 1 of 2 ranks" in lesson.say_refusal(caught.value).replace("\n", " ")


GATHERS: list[tuple[Any, str]] = [
    (sharings.solution, "Leave the zeros at home"),
    (sharings.gathered, "Leave the zeros at home"),
    (sharings.gathers_float32, "Hint: Your buffer is float32, as torch makes it"),
    (sharings.gathers_in_order_of_owners, "there the update of o1 begins"),
    (sharings.keeps_to_itself, "there are zeros"),
    (lambda *given: None, "rank 0 returned NoneType"),
    (sharings.gathers_unequal_segments, "entries of bfloat16; rank 1"),
]


def test_an_all_gather_of_own_updates_passes_at_par() -> None:
    verdict, par = lesson.check_gather(3).check(sharing.gathered), f"{lesson.predict_ring(3):g}"
    assert verdict.passed
    assert f"Yours takes {par} bytes; par is {par}." in verdict.message


test_a_wrong_sharing_is_told_what_is_wrong_with_it = judged(
    (partial(lesson.check_share, 3), sharings.WRONG), (partial(lesson.check_gather, 3), GATHERS)
)
