"""Lesson 14: its steps are the planner's, its claims hold, and its checkers tell right from wrong."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from muon_tutorial.learn.many_ranks import exercises, scaling
from muon_tutorial.timing.recommend import plan_model

from .answers import assert_quiz, assert_wrong

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_unseen_grid_is_as_the_solution_says() -> None:
    exercise = exercises.unseen_exercise()
    assert exercises.unseen() == {"idle": 288, "shrinks": 1.0, "slower": True}
    assert exercise.check(4096 // 8 - 7 * 32, 1, True)
    assert_wrong(exercise, 0, 1, True, "idle: not 0. A matrix has one owner")
    assert_wrong(exercise, 288, 2, True, "shrinks: not 2.")
    assert_wrong(exercise, 288, 1, "yes", "slower: not yes.")


def test_the_floor_is_reached_with_so_many_owners() -> None:
    right = exercises.enough_owners
    owners = {step.owners: step.busiest / step.floor for step in scaling.steps()}
    assert [fair > 1.01 for fair in owners.values()] == [
        n < right(scaling.seconds_of(scaling.MODEL)) for n in owners
    ]
    assert exercises.enough_exercise().check(right)


def test_seconds_out_of_a_node_are_the_planners() -> None:
    entries = sum(math.prod(matrix.shape) for matrix in scaling.matrices_of(scaling.UNSEEN, 1))
    card = scaling.gradient_wire(scaling.UNSEEN, 64, 8)[1]
    for tp in (1, 4, 8):
        planned = scaling.gradient_wire(scaling.UNSEEN, 64, tp)[2]
        assert exercises.reduce_seconds(entries, tp, card) == pytest.approx(planned, rel=0.01)


def test_clocked_steps_are_those_of_the_published_table() -> None:
    rows = json.loads((ROOT / "results" / "published.json").read_text(encoding="utf-8"))["rows"]
    in_ms = {number for number, row in enumerate(rows, 1) if row["unit"] == "ms"}
    for each in scaling.CLOCKED:
        row = rows[each.row - 1]
        assert row["unit"] == ("%" if "%" in each.what else "ms")
        scale = 100 if "%" in each.what else 1
        assert each.published == pytest.approx(scale * row["published"], 0.002)
        assert each.planned == pytest.approx(scale * row["ours"], 0.002)
    left_out = in_ms - {each.row for each in scaling.CLOCKED}
    assert all(re.search("one product|AdamW", rows[n - 1]["what"]) for n in left_out)
    alone = [it.off for it in scaling.CLOCKED if "Newton" in it.what]
    steps = {it.row: round(it.off, 1) for it in scaling.CLOCKED if "Newton" not in it.what}
    assert (round(max(alone), 1), max(steps.values()), steps[32]) == (1.5, 5.1, 2.4)


@pytest.mark.parametrize("model", [scaling.UNSEEN, scaling.MODEL])
def test_bytes_of_gradients_outlast_backward_from_that_many_ranks_on_whatever_the_model(model: str) -> None:
    most = exercises.most_ranks(scaling.TOKENS, scaling.FLOPS, scaling.card())
    at = scaling.averaging(model, most)
    assert at.transfer == pytest.approx(at.backward, rel=0.02)
    assert at.backward < at.all_reduce  # latency comes on top
    fewer, more = scaling.averaging(model, most // 2), scaling.averaging(model, 2 * most)
    assert fewer.all_reduce < fewer.backward
    assert more.transfer > 1.9 * more.backward


def test_zero3_has_the_limit_of_ddp_and_tp_is_limited_by_the_width_alone() -> None:
    limits, D, node = exercises.found_limits(), 8192, 360e9
    assert limits == {"zero3": "as many", "tp_ranks": 4, "tp_ranks over NVLink": 26}
    most = exercises.most_ranks(scaling.TOKENS, scaling.FLOPS, scaling.card())
    assert most == 446  # as the open task's solution says
    for more in (0, 1):
        ranks, n = most + more, 10**9
        share = 2 * n / ranks * (ranks - 1) / scaling.card()
        forward = 2 * n * scaling.TOKENS / ranks / scaling.FLOPS
        assert (share <= forward) == (2 * share <= 2 * forward) == (more == 0)  # backward: twice both
        for name, link in (("tp_ranks", scaling.card()), ("tp_ranks over NVLink", node)):
            ranks = limits[name] + more
            products = 2 * 2 * scaling.TOKENS * D * scaling.WIDTH / ranks / scaling.FLOPS
            all_reduce = 2 * (ranks - 1) * 2 * scaling.TOKENS * D / ranks / link
            assert (all_reduce <= products) == (more == 0)


def test_the_quiz_knows_right_from_wrong() -> None:
    first, *_, last = scaling.steps()
    assert len(repr(last)) < 2000
    right = {"idle": 1488, "floor": 1000 * last.floor, "latency": last.latency / first.latency}
    assert_quiz(exercises.quiz(), right)


@pytest.mark.parametrize(
    ("sizes", "strategy", "seconds", "between"),
    [
        ({"dp": 64, "tp": 8}, "layerwise", 1.79, 50.5),
        ({"dp_shard": 64, "tp": 8}, "owner", 0.9, 34.4),
        ({"dp": 8, "tp": 8, "pp": 8}, "layerwise", 0.27, None),
    ],
)
def test_the_open_tasks_scores_are_the_planners(
    sizes: dict[str, int], strategy: str, seconds: float, between: float | None
) -> None:
    plan = plan_model(scaling.find_model(scaling.MODEL), sizes, scaling.find_machine(scaling.MACHINE))
    assert plan.best is not None
    assert (plan.best.strategy, round(plan.best.seconds, 2)) == (strategy, seconds)
    assert plan.memory(plan.best) <= 80e9
    text = (ROOT / "notebooks" / "src" / "14_from_32_to_16384_ranks.py").read_text(encoding="utf-8")
    assert between is None or round(plan.best.between / 1e9, 1) == between
    said = f"falls to {seconds} s" if between is None else f"{seconds} s and {between} GB"
    assert said in " ".join(text.replace("\n# ", " ").split())
