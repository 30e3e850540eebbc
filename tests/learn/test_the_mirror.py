"""Lesson 09: its checkers know right from wrong, its step is the package's, its recording a real step's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from muon_tutorial import Grid, LocalWorld, launch
from muon_tutorial.engine.collective import Walk
from muon_tutorial.engine.hops import take
from muon_tutorial.engine.travel import travel
from muon_tutorial.errors import UsageError
from muon_tutorial.learn import the_mirror as lesson
from muon_tutorial.learn.exercises.judge import Exercise
from muon_tutorial.learn.the_mirror import replay

from .answers import assert_quiz, assert_wrong

GRIDS = [(2, 2), (3, 2), (1, 4), (4, 1), (2, 4), (1, 1)]


def walking(hops_of: Callable[[Any], Iterable[Any]], turned: bool = True) -> Callable[..., Walk]:
    """A way back over hops of its own choice, each the other way or not."""

    def way_back(x: Any, route: Any, at: Any, label: Any) -> Walk:
        for hop in hops_of(route):
            x = yield from take(x, hop.inverse if turned else hop, route.dtype, at, label)
        return x

    return way_back


def without_return(x: Any, route: Any, at: Any, label: Any) -> Walk:
    yield from lesson.way_back(x, route, at, label)


def stub(x: Any, route: Any, at: Any, label: Any) -> Walk:
    for hop in ...:  # type: ignore[attr-defined]
        x = yield from take(x, hop, route.dtype, at, label)
    return x


def flat_of(flat: torch.Tensor, meta: Any) -> torch.Tensor:
    return flat[slice(*meta.global_range)]


def looping(params_of: Callable[[list[dict], dict], list], most: int | None = None) -> Callable[..., None]:
    """A loop over groups, up to ``most`` of them, that updates parameters of its own choice in each."""

    def update_loop(groups: list[dict], update: Any) -> None:
        for group in groups[:most]:
            for param in params_of(groups, group):
                update(param, group)

    return update_loop


WAYS_BACK = [
    (walking(lambda route: route.hops), "Which hop"),
    (walking(lambda route: reversed(route.inverse.hops), turned=False), "Which hop"),
    (walking(lambda route: route.hops[-1:]), "came back with"),
    (walking(lambda route: reversed(route.hops), turned=False), "Take the hop the other way"),
    (travel, "Take the hop the other way"),
    (without_return, "return x"),
    (lambda x, route, at, label: x, "It asks nobody"),
    (3, "Give a function"),
]
SHAPES = [
    (lambda flat, meta: flat_of(flat, meta).view(-1), "1 dimension"),
    (lambda flat, meta: flat_of(flat, meta).view(meta.global_shape), "raised RuntimeError"),
    (lambda flat, meta: flat_of(flat, meta).view(meta.shape[::-1]), "this rank's piece is"),
    (lambda flat, meta: flat[: math.prod(meta.shape)].view(meta.shape), "it begins with number 0"),
    (lambda flat, meta: None, "give a tensor"),
]
LOOPS = [
    (looping(lambda groups, group: groups[0]["params"]), "down was never updated"),
    (looping(lambda groups, group: [p for each in groups for p in each["params"]]), "another group's"),
    (looping(lambda groups, group: group["params"], most=1), "down was never updated"),
    (lambda groups, update: update(groups["params"], groups), "raised TypeError"),
    ("params", "Give a function"),
]


@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    [
        *((lesson.way_back_exercise(), *case) for case in WAYS_BACK),
        *((lesson.unpack_exercise(), *case) for case in SHAPES),
        *((lesson.loop_exercise(), *case) for case in LOOPS),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong_with_it(exercise: Exercise, answer: Any, words: str) -> None:
    assert_wrong(exercise, answer, words)


def test_right_answers_pass_and_stubs_are_open() -> None:
    assert lesson.way_back_exercise().check(lesson.way_back)
    assert lesson.way_back_exercise().check(stub).passed is None
    assert lesson.unpack_exercise().check(lesson.unpack)
    assert lesson.unpack_exercise().check(lambda flat, meta: flat.view(...)).passed is None
    assert lesson.loop_exercise().check(lesson.update_loop)


def test_the_blueprints_loop_names_what_it_lacks_and_where() -> None:
    assert lesson.blueprint_error() == (
        "NameError: name 'params' is not defined\n  in the line: for param in params:"
    )


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_prediction_knows_right_from_wrong(dp: int, tp: int) -> None:
    exercise, mirror = lesson.mirror_exercise(lesson.plan_of(dp, tp)), {1: 7, 2: 6, 3: 5}
    silent = [4, 5, 6] + ([1, 2, 7] if dp == 1 else []) + ([3] if tp == 1 else [])
    assert exercise.check(mirror, silent)
    wrong: list[tuple[Any, Any, str]] = [
        ({1: 4, 2: 5, 3: 6}, silent, "Phase 1 (gradient reduce_scatter) is not undone"),
        ({1: 7, 2: 5, 3: 6}, silent, "Phase 2 (dp gather) is not undone"),
        (mirror, silent[1:], "Phase 4 (Newton–Schulz) sends nothing either"),
        ([7, 6, 5], silent, "as a dictionary"),
        ({7: 1, 6: 2, 5: 3}, silent, "says nothing of phase 1. Its keys"),
        (mirror, 4, "as a list of phases"),
    ]
    wrong += [(mirror, [*silent, 7], "Phase 7 does send: all_gather over dp")] if dp > 1 else []
    for case in wrong:
        assert_wrong(exercise, *case)


def test_a_tp_that_leaves_uneven_pieces_is_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="tp = 3 does not divide the sides that it cuts; take 1, 2 or 4"):
        lesson.all_exercises(lesson.plan_of(2, 3))


@pytest.mark.parametrize(("dp", "tp", "requests", "whole"), [(2, 2, 5, 4), (3, 2, 4, 2)])
def test_the_quiz_knows_right_from_wrong(dp: int, tp: int, requests: int, whole: int) -> None:
    wrong = {"requests": (99, "diary.sent"), "whole": (1, "Put the slider on phase 4")}
    right = {"requests": requests, "whole": whole, "different": 0}
    assert_quiz(
        lesson.quiz(lesson.plan_of(dp, tp)), right, {**wrong, "different": (1, "numbers that differ")}
    )


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_a_step_put_together_by_hand_is_the_packages_own_and_that_of_one_process(dp: int, tp: int) -> None:
    plan = lesson.plan_of(dp, tp)
    _, broke, reports = lesson.messages(lesson.reference_step, dp, tp, 0)
    assert broke == ""
    world = LocalWorld(Grid.of(dp=dp, tp=tp))
    muons = [lesson.muon_on(world.mesh(rank), world.grid.at(rank), 0) for rank in world.grid.ranks]
    with torch.no_grad():
        world.run([muon.program() for muon in muons])
    for muon, report in zip(muons, reports, strict=True):
        for param, mine in zip(muon.param_groups[0]["params"], report.after.values(), strict=True):
            assert torch.equal(param.detach(), mine)
    gradients = lesson.whole_gradients(plan, reports)
    alone = lesson.step_alone(gradients, 0)
    assert lesson.different_bits(lesson.whole_weights(plan, reports), alone) == 0
    assert 0 <= lesson.sum_error(gradients, 0, dp).of_bound <= 1
    spoilt = {name: whole * (1 + 2**-18) for name, whole in gradients.items()}
    assert lesson.sum_error(spoilt, 0, dp).of_bound > 1


def test_the_first_wrong_message_is_named_by_rank_matrix_and_interval_and_a_step_that_stops() -> None:
    def upside_down(flat: torch.Tensor, meta: Any) -> torch.Tensor:
        right = lesson.unpack(flat, meta)
        return right.flip(0) if meta.name == "o" else right

    said = lesson.first_difference(lesson.step_of(lesson.way_back, upside_down, lesson.update_loop), 2, 2, 0)
    *before, last = said.splitlines()
    assert len(before) == 2
    assert last.startswith("tp gather")
    assert "sends other numbers of o: the first at 0, the last at 511 of 512" in last
    step = lesson.step_of(lesson.way_back, flat_of, lesson.update_loop)
    assert "stopped" in lesson.first_difference(step, 2, 1, 0)


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_names_come_home(dp: int, tp: int) -> None:
    walk = lesson.trace(dp, tp)
    home = LocalWorld(Grid.of(dp=dp, tp=tp)).run([walk(rank) for rank in range(dp * tp)])
    lines = lesson.say_home(lesson.plan_of(dp, tp), home).splitlines()
    assert [line.split("them ")[1] for line in lines] == [str(rank) for rank in range(dp * tp)]


@pytest.mark.live
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 1)])
def test_real_ranks_write_the_diary_of_one_process(dp: int, tp: int) -> None:
    diaries = launch(lesson.record_rank, dp * tp, args=(dp, tp, 0))
    here = lesson.record_here(dp, tp, 0)
    for mine, theirs in zip(diaries, here.diaries, strict=True):
        assert mine.tiles == theirs.tiles
        assert mine.sent == theirs.sent
        assert dp > 2 or mine.contents == theirs.contents  # the order of larger sums is Gloo's own


def test_orders_of_summation_give_other_gradients() -> None:
    tried, gradients, weights = (int(line.split()[-1]) for line in lesson.say_orders(0, 8, 6).splitlines())
    assert (tried, gradients) == (5, 5)
    assert 0 <= weights <= 5


def test_one_number_over_a_rounding_edge_moves_a_whole_matrix() -> None:
    gradients = lesson.exact_gradients(0, 2)
    nudged = lesson.nudged(gradients)
    assert lesson.different_bits(gradients, nudged) == 1
    place = (gradients["o"] != nudged["o"]).nonzero()[0].tolist()
    before, after = gradients["o"][tuple(place)], nudged["o"][tuple(place)]
    assert abs(before - after) <= abs(before) * 2**-12
    one, two = lesson.step_alone(gradients, 0), lesson.step_alone(nudged, 0)
    assert lesson.different_bits(one, two) > 100


def test_other_texts_have_other_gradients() -> None:
    assert not torch.equal(lesson.local_gradients(0, 0)["o"], lesson.local_gradients(0, 1)["o"])


def test_the_shipped_recording_is_of_this_step() -> None:
    shipped, here = replay.load(), lesson.record_here(2, 2, 0)
    assert shipped.shapes == here.shapes
    for mine, theirs in zip(shipped.diaries, here.diaries, strict=True):
        assert mine.tiles == theirs.tiles
        assert list(mine.sent) == list(theirs.sent)
