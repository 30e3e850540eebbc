"""Predicted and measured seconds: the arithmetic of the tables, and the files of the results folder."""

from __future__ import annotations

from typing import Any

import pytest

from muon_tutorial import launch
from muon_tutorial.timing.machine import Link, Machine
from scripts import step_times
from scripts.result_files import RESULTS, read_tables
from scripts.step_times import ALONE, EARLY, LATE, OverlapCase, OverlapSeconds, StepCase, accuracy

FLAT = ((1.0, 1e9),)
MACHINE = Machine("flat", {"float32": FLAT, "bfloat16": FLAT}, FLAT, 1e-6, 1e-6, Link(1e9, 1e-5), cores=2)


def test_errors_and_pairs_are_counted_by_hand() -> None:
    row = accuracy("all", seen=[1.0, 2.0, 2.1, 4.0], said=[1.1, 2.0, 1.9, 1.0])
    assert row["median error"] == pytest.approx((0.2 / 2.1 + 0.1) / 2, abs=1e-4)
    assert row["largest"] == pytest.approx(0.75)
    # Five pairs differ by more than a tenth (2.0 and 2.1 do not). The three pairs with 4.0 are predicted in
    # the wrong order.
    assert row["pairs that differ by more than 10%"] == 5
    assert row["told right"] == pytest.approx(2 / 5)


def test_there_are_cases_enough_on_every_link_and_each_is_walked() -> None:
    found = [case for mbit in (None, 1000, 200, 50) for case in step_times.cases(mbit)]
    assert len(found) >= 60
    assert {case.strategy for case in found} == set(step_times.BUILDERS)
    assert {case.grid.world_size for case in found} == {2, 4, 8}
    slow, fast = (
        step_times.predict_step(StepCase("zero1", (("dp", 2),), 100_000, 1, 32, 1, mbit), MACHINE).seconds
        for mbit in (1, 1000)
    )
    assert slow > 10 * fast


def test_windows_are_compared_case_by_case() -> None:
    one = StepCase("owner", (("dp", 4),), 100_000, 1, 128, 2, 200)
    three = StepCase("owner", (("dp", 4),), 100_000, 3, 128, 2, 200)
    table = step_times.windows_table([(one, 10.0), (three, 8.0)], [11.0, 9.9], "x")
    (row,) = table.rows
    assert (row["measured saving %"], row["predicted saving %"]) == (20.0, 10.0)
    assert row["apart by points"] == 10.0


def test_steps_and_reductions_are_measured_on_real_ranks() -> None:
    (seconds,) = step_times.measure_steps([StepCase("layerwise", (("dp", 2),), 100_000, 3, 32, 1)], rounds=1)
    assert seconds > 0
    for times, same in launch(step_times.time_rounds, 2, args=(OverlapCase("zero1", 2, 8, "loopback"), 2)):
        assert {kind: len(its) for kind, its in times.items()} == {ALONE: 2, LATE: 2, EARLY: 2}
        assert same


def test_what_is_exposed_is_what_backward_did_not_hide() -> None:
    assert OverlapSeconds({ALONE: 2.0, LATE: 6.0, EARLY: 3.0}, True).exposed == pytest.approx(0.25)


def rows(title: str) -> list[dict[str, Any]]:
    return [*read_tables(RESULTS / "step_times.json")[title].rows]


def test_the_results_cover_every_link_and_their_accuracy_is_that_of_their_rows() -> None:
    steps = rows("Seconds of a step, predicted and measured")
    assert len(steps) >= 60
    assert {row["link"] for row in steps} == {"loopback", "1,000 Mbit/s", "200 Mbit/s", "50 Mbit/s"}
    for row in rows("How far predicted seconds are off"):
        chosen = [step for step in steps if row["link"] in ("all", step["link"])]
        seen, said = ([step[f"{which} ms"] for step in chosen] for which in ("measured", "predicted"))
        again = accuracy(row["link"], seen, said)
        assert again["median error"] == pytest.approx(row["median error"], abs=2e-3)
        assert again["told right"] == pytest.approx(row["told right"], abs=2e-3)


def test_reductions_during_backward_kept_their_bits() -> None:
    found = rows("Gradient reduction during backward")
    assert {row["strategy"] for row in found} == {"zero1", "layerwise"}
    assert all(row["same bits"] == "yes" for row in found)
