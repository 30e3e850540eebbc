"""Lesson 08: its checkers know right from wrong, its step is the package's, its recording a real step's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from muon_tutorial import Grid, LocalWorld, launch
from muon_tutorial.engine.collective import Walk
from muon_tutorial.engine.hops import take
from muon_tutorial.engine.travel import travel
from muon_tutorial.errors import UsageError
from muon_tutorial.learn import lesson08 as lesson
from muon_tutorial.learn.exercises.judge import AnswerVerdict
from muon_tutorial.learn.lesson08 import replay

GRIDS = [(2, 2), (3, 2), (1, 4), (4, 1), (2, 4), (1, 1)]


def forwards(x: Any, route: Any, at: Any, label: Any) -> Walk:
    for hop in route.hops:
        x = yield from take(x, hop.inverse, route.dtype, at, label)
    return x


def not_turned(x: Any, route: Any, at: Any, label: Any) -> Walk:
    for hop in reversed(route.hops):
        x = yield from take(x, hop, route.dtype, at, label)
    return x


def without_return(x: Any, route: Any, at: Any, label: Any) -> Walk:
    for hop in reversed(route.hops):
        x = yield from take(x, hop.inverse, route.dtype, at, label)


def one_hop(x: Any, route: Any, at: Any, label: Any) -> Walk:
    x = yield from take(x, route.hops[-1].inverse, route.dtype, at, label)
    return x


def with_route(x: Any, route: Any, at: Any, label: Any) -> Walk:
    for hop in reversed(route.inverse.hops):
        x = yield from take(x, hop, route.dtype, at, label)
    return x


def stub(x: Any, route: Any, at: Any, label: Any) -> Walk:
    for hop in ...:  # type: ignore[attr-defined]
        x = yield from take(x, hop, route.dtype, at, label)
    return x


def says(verdict: AnswerVerdict, words: str) -> None:
    assert verdict.passed is False
    assert words in verdict.message


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (forwards, "Which hop"),
        (with_route, "Which hop"),
        (one_hop, "came back with"),
        (not_turned, "Take the hop the other way"),
        (travel, "Take the hop the other way"),
        (without_return, "return x"),
        (lambda x, route, at, label: x, "It asks nobody"),
        (3, "Give a function"),
    ],
)
def test_a_wrong_way_back_is_told_what_is_wrong_with_it(answer: Any, words: str) -> None:
    says(lesson.way_back_exercise().check(answer), words)


def test_the_right_way_back_passes_and_the_stub_is_open() -> None:
    assert lesson.way_back_exercise().check(lesson.way_back)
    assert lesson.way_back_exercise().check(stub).passed is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda flat, meta: flat[slice(*meta.global_range)].view(-1), "1 dimension"),
        (lambda flat, meta: flat[slice(*meta.global_range)].view(meta.global_shape), "raised RuntimeError"),
        (lambda flat, meta: flat[slice(*meta.global_range)].view(meta.shape[::-1]), "this rank's piece is"),
        (
            lambda flat, meta: flat[: math.prod(meta.shape)].view(meta.shape),
            "it begins with number 0",
        ),
        (lambda flat, meta: None, "give a tensor"),
    ],
)
def test_wrong_shapes_are_told_what_is_wrong_with_them(answer: Any, words: str) -> None:
    says(lesson.unpack_exercise().check(answer), words)


def test_the_right_shape_passes_and_the_stub_is_open() -> None:
    assert lesson.unpack_exercise().check(lesson.unpack)
    assert lesson.unpack_exercise().check(lambda flat, meta: flat.view(...)).passed is None


def all_of_the_first(groups: list[dict], update: Any) -> None:
    for group in groups:
        for param in groups[0]["params"]:
            update(param, group)


def before_the_loop(groups: list[dict], update: Any) -> None:
    params = [param for group in groups for param in group["params"]]
    for group in groups:
        for param in params:
            update(param, group)


def first_only(groups: list[dict], update: Any) -> None:
    for param in groups[0]["params"]:
        update(param, groups[0])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (all_of_the_first, "down was never updated"),
        (before_the_loop, "another group's"),
        (first_only, "down was never updated"),
        (lambda groups, update: update(groups["params"], groups), "raised TypeError"),
        ("params", "Give a function"),
    ],
)
def test_wrong_loops_are_told_what_is_wrong_with_them(answer: Any, words: str) -> None:
    says(lesson.loop_exercise().check(answer), words)


def test_the_right_loop_passes() -> None:
    assert lesson.loop_exercise().check(lesson.update_loop)


def test_the_blueprints_loop_names_what_it_lacks_and_where() -> None:
    assert lesson.blueprint_error() == (
        "NameError: name 'params' is not defined\n  in the line: for param in params:"
    )


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_prediction_knows_right_from_wrong(dp: int, tp: int) -> None:
    exercise = lesson.mirror_exercise(lesson.plan_of(dp, tp))
    mirror = {1: 7, 2: 6, 3: 5}
    silent = [4, 5, 6] + ([1, 2, 7] if dp == 1 else []) + ([3] if tp == 1 else [])
    assert exercise.check(mirror, silent)
    says(exercise.check({1: 4, 2: 5, 3: 6}, silent), "Phase 1 (gradient reduce_scatter) is not undone")
    says(exercise.check({1: 7, 2: 5, 3: 6}, silent), "Phase 2 (dp gather) is not undone")
    says(exercise.check(mirror, silent[1:]), "Phase 4 (Newton–Schulz) sends nothing either")
    if dp > 1:
        says(exercise.check(mirror, [*silent, 7]), "Phase 7 does send: all_gather over dp")
    says(exercise.check([7, 6, 5], silent), "as a dictionary")
    says(exercise.check({7: 1, 6: 2, 5: 3}, silent), "says nothing of phase 1. Its keys")
    says(exercise.check(mirror, 4), "as a list of phases")


def test_a_tp_that_leaves_uneven_pieces_is_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="tp = 3 does not divide the sides that it cuts; take 1, 2 or 4"):
        lesson.all_exercises(lesson.plan_of(2, 3))


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2)])
def test_the_quiz_knows_right_from_wrong(dp: int, tp: int) -> None:
    quiz = lesson.quiz(lesson.plan_of(dp, tp))
    right = {(2, 2): {"requests": 5, "whole": 4}, (3, 2): {"requests": 4, "whole": 2}}[dp, tp]
    assert quiz.check({**right, "different": 0})
    says(quiz.check({**right, "different": 1}), "numbers that differ")
    says(quiz.check({**right, "requests": 99, "different": 0}), "diary.sent")
    says(quiz.check({**right, "whole": 1, "different": 0}), "Put the slider on phase 4")


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_a_step_put_together_by_hand_is_the_packages_own(dp: int, tp: int) -> None:
    _, broke, reports = lesson.messages(lesson.reference_step, dp, tp, 0)
    assert broke == ""
    world = LocalWorld(Grid.of(dp=dp, tp=tp))
    muons = [lesson.muon_on(world.mesh(rank), world.grid.at(rank), 0) for rank in world.grid.ranks]
    with torch.no_grad():
        world.run([muon.program() for muon in muons])
    for muon, report in zip(muons, reports, strict=True):
        for param, mine in zip(muon.param_groups[0]["params"], report.after.values(), strict=True):
            assert torch.equal(param.detach(), mine)


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_same_gradient_gives_the_same_bits_and_the_sum_keeps_its_bound(dp: int, tp: int) -> None:
    plan = lesson.plan_of(dp, tp)
    _, _, reports = lesson.messages(lesson.reference_step, dp, tp, 0)
    gradients = lesson.whole_gradients(plan, reports)
    alone = lesson.step_alone(gradients, 0)
    assert lesson.different_bits(lesson.whole_weights(plan, reports), alone) == 0
    assert 0 <= lesson.sum_error(gradients, 0, dp).of_bound <= 1
    spoilt = {name: whole * (1 + 2**-18) for name, whole in gradients.items()}
    assert lesson.sum_error(spoilt, 0, dp).of_bound > 1


def test_the_first_wrong_message_is_named_by_rank_matrix_and_interval() -> None:
    def upside_down(flat: torch.Tensor, meta: Any) -> torch.Tensor:
        right = lesson.unpack(flat, meta)
        return right.flip(0) if meta.name == "o" else right

    said = lesson.first_difference(lesson.step_of(lesson.way_back, upside_down, lesson.update_loop), 2, 2, 0)
    *before, last = said.splitlines()
    assert len(before) == 2
    assert last.startswith("tp gather")
    assert "sends other numbers of o: the first at 0, the last at 511 of 512" in last


def test_a_step_that_stops_is_said_to() -> None:
    step = lesson.step_of(
        lesson.way_back, lambda flat, meta: flat[slice(*meta.global_range)], lesson.update_loop
    )
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
    one, other = lesson.local_gradients(0, 0), lesson.local_gradients(0, 1)
    assert not torch.equal(one["o"], other["o"])


def test_the_shipped_recording_is_of_this_step() -> None:
    shipped, here = replay.load(), lesson.record_here(2, 2, 0)
    assert shipped.shapes == here.shapes
    for mine, theirs in zip(shipped.diaries, here.diaries, strict=True):
        assert mine.tiles == theirs.tiles
        assert list(mine.sent) == list(theirs.sent)
