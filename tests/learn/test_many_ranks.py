"""Lesson 14: its steps are the planner's, its claims hold, and its checkers know right from wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from muon_tutorial import launch
from muon_tutorial.learn import many_ranks as lesson
from muon_tutorial.learn.many_ranks import balance, exercises, on_ranks, own_model, scaling
from muon_tutorial.timing.planner import estimate
from muon_tutorial.timing.report import plan_model

from .answers import assert_quiz, assert_wrong, message_of_wrong

GRIDS = [(2, 2), (3, 1), (1, 2)]


def in_turn(shapes: Sequence[Any], owners: int) -> list[int]:
    return [index % owners for index in range(len(shapes))]


def test_a_step_is_what_the_planner_says_of_it() -> None:
    step = scaling.step_at(scaling.UNSEEN, 256)
    planned = plan_model(
        scaling.find_model(scaling.UNSEEN),
        {"dp": 32, "tp": 8},
        scaling.find_machine(scaling.MACHINE),
        strategies={"layerwise": scaling.REPEATED},
    )
    assert step.seconds() == pytest.approx(planned.estimates[0].seconds)
    assert step.work == tuple(sorted(step.work, reverse=True)) or len(set(step.work)) > 1
    assert max(step.work) * step.owners / sum(step.work) == pytest.approx(planned.estimates[0].fair_shares)


def test_parts_of_a_step_are_the_step() -> None:
    for step in scaling.steps():
        for links in scaling.LINKS.values():
            computed = step.busiest + step.estimate.copy + step.estimate.others
            parts = computed + step.latency + step.transfer(links)
            assert parts == pytest.approx(step.seconds(links))
        assert 0 <= step.transfer(8.0) < step.transfer() / 2


def test_newton_schulz_of_one_owner_is_that_of_all_matrices() -> None:
    """What is added up shape by shape is what a walk of all matrices on one rank takes."""
    matrices = scaling.matrices_of(scaling.UNSEEN, 1)
    alone = estimate(
        "layerwise",
        scaling.layerwise,
        matrices,
        scaling.Grid.of(dp=1),
        scaling.find_machine(scaling.MACHINE),
    )
    assert scaling.newton_schulz_seconds(matrices) == pytest.approx(alone.product, rel=1e-6)


def test_owners_run_out_the_floor_holds_and_latency_grows() -> None:
    found = scaling.steps()
    assert found[0].matrices == 560
    assert [step.idle_owners for step in found] == [max(0, step.owners - 560) for step in found]
    assert all(step.busiest >= step.floor * (1 - 1e-9) for step in found)
    assert found[-1].busiest == pytest.approx(found[-1].floor)
    latencies = [step.latency for step in found]
    assert latencies == sorted(latencies)
    fastest = min(found, key=lambda step: step.seconds())
    assert fastest.ranks == 4096
    assert found[0].idle < 0.05 < 0.8 < found[-1].idle


def test_the_unseen_grid_is_as_the_solution_says() -> None:
    exercise = exercises.unseen_exercise()
    assert exercises.unseen() == {"idle": 288, "shrinks": 1.0, "slower": True}
    assert exercise.check(4096 // 8 - 7 * 32, 1, True)
    assert exercise.check(..., ..., ...).passed is None
    assert_wrong(exercise, 0, 1, True, "idle: not 0. A matrix has one owner")
    assert_wrong(exercise, 288, 2, True, "shrinks: not 2.")
    assert_wrong(exercise, 288, 1, False, "slower: not False.")
    assert_wrong(exercise, 288, "twice", True, "shrinks: not twice.")
    assert_wrong(exercise, 288, 1, "yes", "slower: not yes.")


def test_neither_ring_is_sooner() -> None:
    exercise = exercises.wires_exercise()
    assert exercises.wires() == "neither"
    assert exercise.check("neither")
    assert_wrong(exercise, "tp=8", "how many network cards")
    assert_wrong(exercise, "tp=1", "how many bytes")
    assert_wrong(exercise, "both", 'Say "tp=1"')
    alone, with_tp = (scaling.gradient_wire(scaling.UNSEEN, 64, tp) for tp in (1, 8))
    assert alone[0] == pytest.approx(8 * with_tp[0], rel=0.01)
    assert alone[1] == pytest.approx(8 * with_tp[1])


WRONG_OWNERS = [
    (balance.by_entries, "Their entries are even: 1.01. Their work is not."),
    (in_turn, "the busiest has"),
    (lambda shapes, owners: [0] * len(shapes), "the busiest has 16.00 fair shares"),
    (lambda shapes, owners: [1] * 3, "give a list of 424 owners"),
    (lambda shapes, owners: "0" * len(shapes), "give a list of 424 owners"),
    (lambda shapes, owners: None, "give a list of 424 owners"),
    (lambda shapes, owners: [owners] * len(shapes), "16 is not one of 0 to 15"),
    (lambda shapes, owners: [0.5] * len(shapes), "0.5 is not one of 0 to 15"),
    (lambda shapes: [], "raised TypeError"),
]


@pytest.mark.parametrize(("answer", "says"), WRONG_OWNERS)
def test_owners_that_are_not_balanced_are_told_why(answer: Any, says: str) -> None:
    assert_wrong(exercises.balance_exercise(), answer, says)


def test_whoever_balanced_entries_sees_both() -> None:
    verdict = exercises.balance_exercise().check(balance.by_entries)
    assert verdict.picture is not None
    assert "entries of an owner are 1.01 fair shares, the most work 1.52" in verdict.picture.alt
    assert "4 s² l + 2 s³" in verdict.message


def test_owners_by_work_pass_at_par_and_a_stub_is_open() -> None:
    verdict = exercises.balance_exercise().check(balance.assign)
    assert verdict
    assert "Yours takes 2 percent above fair shares; par is 2." in verdict.message
    assert exercises.balance_exercise().check(lambda shapes, owners: [...] * len(shapes)).passed is None
    assert exercises.balance_exercise().check(lambda shapes, owners: ...).passed is None


def test_what_the_text_says_of_entries_and_work_is_so() -> None:
    large, expert = (7168, 16384), (2048, 7168)
    assert {large, expert} <= set(balance.owned_models()[0].shapes)
    assert max(balance.owned_models()[0].shapes, key=balance.work) == large
    assert 7168 * 16384 / (2048 * 7168) == 8
    assert round(balance.work(large) / balance.work(expert)) == 30


@pytest.mark.live
@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_any_owners_give_the_bits_of_one_process(dp: int, tp: int) -> None:
    draw = random.Random(dp)
    drawn = [draw.randrange(dp * tp) for _ in on_ranks.SHAPES]
    for assign in (balance.assign, balance.by_entries, lambda shapes, owners: drawn):
        found = launch(on_ranks.step_with, dp * tp, args=(dp, tp, 2, 0, assign))
        assert all(each.same for each in found)
        assert sorted(index for each in found for index in each.owned) == list(range(len(on_ranks.SHAPES)))
    assert "same bits as one process: True" in on_ranks.say_stepped(found)


def test_other_weights_are_told_from_the_right_ones() -> None:
    """The comparison on ranks can fail: another seed's weights have other bits."""
    assert not all(map(torch.equal, on_ranks.stepped_alone(1, 0), on_ranks.stepped_alone(1, 1)))
    assert all(map(torch.equal, on_ranks.stepped_alone(1, 0), on_ranks.stepped_alone(1, 0)))
    assert not any(map(torch.equal, on_ranks.weights_with_gradients(0), on_ranks.stepped_alone(1, 0)))


WRONG_GRIDS = [
    ({"dp": 32, "tp": 8, "pp": 2}, "a rank; 20 GB are allowed"),
    ({"dp": 8, "tp": 4, "pp": 8}, "a step: it computes"),
    ({"dp": 32, "tp": 4, "pp": 8}, "with 1,024 GPUs. Do it with 512."),
    ({"dp": 9, "tp": 4, "pp": 16}, "At most 8 stages"),
    ({"dp": 9, "tp": 16, "pp": 2}, "at most tp=8"),
    ({"dp": 9, "tp": 3, "pp": 8}, "does not divide the 64 heads"),
    ({"dp": 9, "tp": 4}, 'Give a dictionary with "dp", "tp" and "pp".'),
    ({"dp": 9, "tp": 4, "pp": ...}, "still open"),
    ({"dp": 9.5, "tp": 4, "pp": 8}, "whole numbers"),
    ({"dp": 0, "tp": 4, "pp": 8}, "whole numbers"),
]


@pytest.mark.parametrize(("grid", "says"), WRONG_GRIDS)
def test_a_grid_beyond_the_limits_is_told_which(grid: Any, says: str) -> None:
    assert_wrong(exercises.limits_exercise(), grid, says)


def test_the_smallest_grid_is_par_and_no_smaller_neighbour_keeps_the_limits() -> None:
    exercise = exercises.limits_exercise()
    assert "Yours takes 288 GPUs; par is 288." in exercise.check({"dp": 9, "tp": 4, "pp": 8}).message
    assert exercise.check({"dp": 16, "tp": 4, "pp": 8})
    assert exercise.check(dict.fromkeys(("dp", "tp", "pp"), ...)).passed is None
    for dp, tp, pp in ((8, 4, 8), (4, 8, 8), (10, 4, 7), (17, 2, 8), (35, 1, 8), (5, 8, 7)):
        assert dp * tp * pp < 288
        assert exercise.check({"dp": dp, "tp": tp, "pp": pp}).passed is False


def config(**sizes: int) -> dict[str, Any]:
    return {**own_model.MY_MODEL, **sizes}


def deep() -> nn.Module:
    return nn.ModuleList(nn.Linear(32_768, 32_768, bias=False) for _ in range(1024))


WRONG_MODELS = [
    (config(num_hidden_layers=8), "dp=256,tp=8", "fair shares; 1.25 are allowed"),
    (config(hidden_size=8192, num_hidden_layers=80), "dp=512,tp=8", "fair shares; 1.25 are allowed"),
    (config(), "dp=64,tp=8", "512 ranks; 1,024 are asked for"),
    (config(hidden_size=256, intermediate_size=256), "dp=256,tp=8", "entries in matrices; 1,000,000,000"),
    (deep, "dp=1024", "times AdamW's; 2 are allowed"),
    (deep, "dp=256,tp=8", "nobody says how tensor parallelism cuts"),
    (config(hidden_size=0), "dp=256,tp=8", "The planner says"),
    ({"model_type": "abacus"}, "dp=256,tp=8", "The planner says"),
    (config(), 256, "Give the grid as a text"),
    (config(), "256 ranks", "The planner says: a grid is typed as"),
    (3, "dp=256", "give a config as a dict"),
    (lambda: 3, "dp=256", "it returned int"),
    (lambda: 1 / 0, "dp=256", "Your function raised ZeroDivisionError"),
    (lambda: nn.LayerNorm(4), "dp=1024", "no hidden matrix"),
]


@pytest.mark.parametrize(("model", "grid", "says"), WRONG_MODELS)
def test_a_model_that_does_not_do_is_told_why(model: Any, grid: Any, says: str) -> None:
    assert_wrong(exercises.own_model_exercise(), model, grid, says)


def test_a_deep_and_wide_model_passes_at_par() -> None:
    verdict = exercises.own_model_exercise().check(own_model.MY_MODEL, own_model.MY_GRID)
    assert verdict
    assert "Yours takes 116 percent of AdamW's step; par is 116." in verdict.message
    assert exercises.own_model_exercise().check(..., ...).passed is None
    half = {**own_model.MY_MODEL, "hidden_size": ...}
    assert exercises.own_model_exercise().check(half, own_model.MY_GRID).passed is None
    assert "no clock" not in repr(own_model.plan_mine(own_model.MY_MODEL, own_model.MY_GRID))
    assert "predicted, by the file of" in repr(own_model.plan_mine(own_model.MY_MODEL, own_model.MY_GRID))


def test_a_module_and_its_config_are_the_same_to_the_planner() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    shape = own_model.shape_of(lambda: nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(3))}))
    assert shape.hidden == 3 * 2 * 64 * 256
    assert next(iter(shape.families)).shape == (256, 64)


def test_the_quiz_knows_right_from_wrong() -> None:
    first, *_, last = scaling.steps()
    right = {"idle": 1488, "floor": 1000 * last.floor, "latency": last.latency / first.latency}
    wrong = {"idle": (560, "idle_owners"), "floor": (0.06, "milliseconds"), "latency": (512, "Divide")}
    assert_quiz(exercises.quiz(), right, wrong)
    assert "Still open" in message_of_wrong(exercises.quiz(), {**right, "idle": ...})


def test_tables_say_that_they_are_predicted() -> None:
    tables = (scaling.say_steps(scaling.UNSEEN), scaling.say_grid(8, 8, 4), scaling.say_wires())
    assert all("(predicted, by the file of DGX H100" in table for table in tables)
    said = scaling.say_experts()
    assert "dense          610     256      5.80 fair shares" in said
    assert "experts      1,080      32      1.01 fair shares" in said
    assert "fair shares" in scaling.say_grid(8, 8, 4)
    assert "340 GB/s" in scaling.say_wires()


def test_pictures_say_their_numbers_and_that_no_clock_has_run() -> None:
    hero = lesson.hero()
    assert "Predicted seconds" in hero.alt
    assert "16,384 ranks owners are idle for 85% of the busiest one's time" in hero.alt
    assert "no clock has run" in hero.svg
    shell: Any = lesson.explore_scale()
    shown = shell.at(doubling=9, links="slower")
    assert "2,048 owners share 560 matrices; 1,488 have none" in shown.alt
    assert "predicted, with links 0.125 times as fast" in shown.alt
    assert lesson.explore_scale(live=False) == shell.still


@pytest.mark.parametrize("model", balance.owned_models(), ids=lambda model: model.name)
def test_a_picture_of_owners_has_both_shares(model: balance.OwnedModel) -> None:
    chosen = in_turn(model.shapes, model.owners)
    drawn = lesson.draw_balance(model, chosen)
    assert f"the most work {model.plan_work(chosen)[1]:.2f}" in drawn.alt
    assert drawn.width <= 900
