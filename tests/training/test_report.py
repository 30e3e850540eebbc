"""The report says what happened, in plain words."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from muon_tutorial.training.job import OneProcessRun, describe_result, showing_progress
from muon_tutorial.training.loss_picture import loss_figure
from muon_tutorial.training.records import CheckVerdict, PhaseTraffic, RunResult, StepRecord, TextFacts
from muon_tutorial.training.report import describe_verdict, size, summary_table, traffic_table
from muon_tutorial.training.settings import TrainSettings

RECORDS = tuple(StepRecord(step, 5.0 - step, 0.01, 1.0 if step else 9.0, 0.25) for step in range(3))
RESULT = RunResult(
    settings=TrainSettings(),
    text=TextFacts("a text", 1000, "ab" * 32),
    parameters=100,
    loss_before=5.5,
    loss_after=2.5,
    records=RECORDS,
    traffic=(PhaseTraffic("dp gather", 2, 2000, 1000), PhaseTraffic("tp gather", 3, 500, 500)),
    state_bytes=(100, 200),
    adamw_state_bytes=800,
    check=CheckVerdict(2, 100, 0, 0.0, 0.5),
)


def printed(*things: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_first_step_is_not_counted_in_the_step_time() -> None:
    assert RESULT.step_seconds == 1.0
    assert RESULT.optimizer_share == 0.25
    assert replace(RESULT, records=RECORDS[:1]).step_seconds == 9.0


def test_steps_before_a_run_went_on_are_in_the_picture_and_not_in_the_times() -> None:
    slow = tuple(StepRecord(step, 5.0, 0.01, 100.0, 90.0) for step in range(2))
    resumed = replace(RESULT, earlier=slow)
    assert (resumed.step_seconds, resumed.optimizer_share) == (1.0, 0.25)
    (axes,) = loss_figure(resumed, OneProcessRun(RESULT, 0.0)).axes
    assert [line.get_label() for line in axes.lines] == ["one process", "zero1, dp=2 × tp=2"]
    assert [len(line.get_xdata()) for line in axes.lines] == [3, 5]  # type: ignore[arg-type]
    assert "earlier" not in describe_result(resumed, None)


def test_a_run_that_had_no_step_left_says_so() -> None:
    done = replace(RESULT, records=(), earlier=RECORDS, traffic=(), check=None)
    text = printed(summary_table(done, None))
    assert text.count("no step was left to take") == 2
    assert "not asked for" not in text
    assert describe_result(done, None)["step_seconds"] is None


def test_the_tables_hold_the_figures_and_sum_the_traffic() -> None:
    text = printed(summary_table(RESULT, OneProcessRun(replace(RESULT, loss_after=2.4), 0.02)))
    for words in ("dp=2 × tp=2, 4 processes", "5.500 before, 2.500 after", "2.400 after", "0.020", "25%"):
        assert words in text
    assert "100 B to 200 B per rank: 25% of the 800 B" in text
    assert "1.50 kB" in printed(traffic_table(RESULT))


def test_a_failed_check_says_by_how_much_and_a_gradient_outside_its_bound_fails_it() -> None:
    verdict = CheckVerdict(2, 100, 7, 0.125, 0.5)
    assert not verdict.passed
    assert "7 parameter elements differ" in describe_verdict(verdict, 2)
    assert "by up to 0.12" in describe_verdict(verdict, 2)
    assert not CheckVerdict(2, 100, 0, 0.0, 1.5).passed


def test_an_audit_that_finds_no_muon_fails_the_check_in_red() -> None:
    line = "this is not Muon: the update of w is the gradient itself"
    assert RESULT.check is not None
    verdict = replace(RESULT.check, audit=line, is_muon=False)
    assert not verdict.passed
    assert describe_verdict(verdict, 2) == f"FAILED at step 3: {line}"
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    console.print(summary_table(replace(RESULT, check=verdict), None))
    (row,) = [it for it in console.file.getvalue().splitlines() if "audit" in it]  # type: ignore[attr-defined]
    assert "\x1b[31m" in row
    assert line in row
    good = replace(RESULT, check=replace(verdict, is_muon=True))
    assert "\x1b[31m" not in printed(summary_table(good, None))


def test_the_result_is_plain_data_without_the_steps() -> None:
    data = describe_result(RESULT, None)
    assert data["check"]["passed"] is True
    assert "records" not in data
    assert data["step_seconds"] == 1.0


def test_sizes_are_in_powers_of_ten() -> None:
    assert [size(count) for count in (0, 999, 1500, 2.5e6)] == ["0 B", "999 B", "1.50 kB", "2.50 MB"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_shows_the_loss(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
    with showing_progress(console, "training", 3) as show:
        for record in RECORDS:
            show(record)
    assert "loss 3.000" in console.file.getvalue()  # type: ignore[attr-defined]
