"""Lesson 11: its checkers tell right from wrong on real ranks; its first picture is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from muon_tutorial import launch, zeropower_via_newtonschulz
from muon_tutorial.learn import own_sharding as lesson
from muon_tutorial.learn.exercises.judge import Diagnosis, Exercise
from muon_tutorial.learn.own_sharding import exercises, on_ranks, pictures

from . import three_functions as tried
from .answers import assert_wrong, judged

QUICK = 4.0


def open_exercise() -> Exercise:
    return Exercise(lambda *_: None)


def test_the_references_functions_pass() -> None:
    grid = (3, 2)
    assert lesson.check_assign(*grid, 0).check(on_ranks.assign)
    assert lesson.check_gather(*grid, 0, open_exercise()).check(on_ranks.gather)
    given_back = lesson.check_redistribute(*grid, 0, (open_exercise(), open_exercise()))
    verdict = given_back.check(on_ranks.redistribute)
    assert verdict
    par = exercises.par_bytes(*grid)
    assert f"Yours takes {par:g} bytes a rank on the way back; par is {par:g}." in verdict.message


def test_other_right_ways_pass_and_a_broadcast_sends_more() -> None:
    assert lesson.check_assign(3, 1, 0).check(tried.backwards)
    for gather in (tried.point_to_point, tried.padded, tried.gather_later):
        assert lesson.check_gather(3, 2, 1, open_exercise()).check(gather)
    given_back = lesson.check_redistribute(2, 2, 0, (open_exercise(), open_exercise()))
    assert (
        "Yours takes 108 bytes a rank on the way back; par is 56."
        in given_back.check(tried.broadcast).message
    )
    assert given_back.check(tried.redistribute_later)


test_a_wrong_function_is_told_what_is_wrong_with_it = judged(
    (lambda: lesson.check_assign(2, 2, 0, timeout=QUICK), tried.ASSIGNED),
    (lambda: lesson.check_gather(2, 2, 0, open_exercise(), timeout=QUICK), tried.GATHERED),
    (
        lambda: lesson.check_redistribute(2, 2, 0, (open_exercise(), open_exercise()), timeout=QUICK),
        tried.GIVEN_BACK,
    ),
)


GRIDS_OF_WORK = [(2, 2), (3, 2), (4, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("grid", GRIDS_OF_WORK)
def test_shared_work_can_be_spread_at_least_as_well_as_par(grid: tuple[int, int]) -> None:
    model = lesson.mixed_model(*grid)
    verdict = lesson.check_shared_work(model).check(lesson.longest_first_joint)
    assert verdict
    assert "par is" in verdict.message
    assert "par is" in lesson.draw_loads(model, tried.in_turn(model)).alt


def by_shard_allowed(params: list[torch.Tensor], state: dict[str, Any]) -> dict[int, int]:
    holders = state["holders"]
    return {i: holders[i][(len(param) == 0) % len(holders[i])] for i, param in enumerate(params)}


@pytest.mark.parametrize("grid", [(2, 2), (3, 2)])
def test_each_wrong_way_to_share_work_is_told_what_is_wrong_with_it(grid: tuple[int, int]) -> None:
    model = lesson.mixed_model(*grid)
    wrong: list[tuple[Any, str]] = [
        (lambda params, state: dict.fromkeys(range(len(params)), 0), "hold rows of it"),
        (lambda params, state: {}, "Return a dict with an owner for each"),
        (lambda params, state: tried.in_turn(model), "The busiest rank,"),
        (by_shard_allowed, "Only the shards differ between them"),
        (lambda params, state: state["ranks"], "raised KeyError"),
    ]
    for function, says in wrong:
        assert_wrong(lesson.check_shared_work(model), function, says)
    shown = lesson.check_shared_work(model).check(wrong[2][0])
    assert shown.picture is not None
    assert "GFLOP" in shown.picture.alt


@pytest.mark.parametrize("layout", lesson.LAYOUTS)
def test_the_first_picture_is_what_a_helpers_functions_do_on_real_ranks(layout: str) -> None:
    found = launch(tried.travelled, 4, args=(layout,), output="quiet")
    moments = pictures.journey_of(layout).moments
    for rank, mine in enumerate(found):
        for way, name in (("out", "gather"), ("back", "redistribute")):
            due = [each for each in moments[name].sent if each.sender == rank]
            assert sorted(mine[way], key=str) == sorted(due, key=str)
        assert mine["part"] == moments["redistribute"].held[rank][0].box.shape
        assert (mine["full"] is None) == (moments["gather"].held[rank] == ())
        for each in moments["gather"].held[rank]:
            assert torch.tensor(mine["full"])[each.box.slices].unique().tolist() == [each.keeper]


def test_a_failed_step_and_a_wrong_step_are_told() -> None:
    notes = tuple(on_ranks.TrialNote("assign", 0, {}) for _ in range(1))
    owners = dict.fromkeys(range(5), 0)
    trial = on_ranks.RankTrial((0,), owners, notes, differs=2)
    run = on_ranks.FunctionsRun(1, 1, 0, (trial,))
    assert "matrix 2 differs on rank 0" in str(exercises.explain_functions(run))
    failed = replace(trial, notes=(*notes, on_ranks.TrialNote("step", 1, error="ConfigError: no")))
    found = exercises.explain_functions(replace(run, trials=(failed,)))
    assert isinstance(found, Diagnosis)
    assert "step 1 of Muon raised: ConfigError: no" in found.what


def test_every_rank_calls_for_every_matrix() -> None:
    def step(params: Any, momenta: Any, owners: Any, config: Any, lr: float) -> None:
        for index, param in enumerate(params):
            state = {**config.state, "param_idx": index, "local_shape": tuple(param.shape)}
            full = config.gather_fn(momenta[index], owners[index], state)
            update = None if full is None else zeropower_via_newtonschulz(full)
            param -= lr * config.redistribute_fn(update, owners[index], state)

    assert lesson.run_loop(step, lesson.ThreeFunctions(), 3, 0) == ([True] * 3, [2 * 5] * 3)
