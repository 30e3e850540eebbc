"""Lesson 15: broken runs on real ranks, what their evidence proves, and what is said to wrong findings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from muon_tutorial.errors import UsageError
from muon_tutorial.learn import broken_runs as lesson
from muon_tutorial.learn.broken_runs.broken import KINDS, PHASE_OF
from muon_tutorial.learn.broken_runs.on_ranks import LETTERS, TrainingRun, run_with
from muon_tutorial.learn.exercises.judge import Exercise

from .answers import assert_quiz, message_of_wrong

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def clinic() -> Any:
    return lesson.open_clinic(2, 2)


@pytest.fixture(scope="module")
def hang() -> TrainingRun:
    return lesson.worked_hang(2, 2)


@pytest.fixture(scope="module")
def lie() -> TrainingRun:
    return lesson.worked_lie(2, 2)


def run_of(clinic: Any, letter: str) -> TrainingRun:
    return clinic.kept.get(letter) or clinic.run(letter)


def truth(clinic: Any, letter: str) -> tuple[Any, str, str]:
    """The right finding of a run with one mistake."""
    [fault] = clinic.faults(letter)
    return "all" if fault.rank < 0 else fault.rank, PHASE_OF[fault.kind][0], fault.kind


def test_a_sound_run_has_every_rung_of_the_oracle_and_keeps_the_order_of_calls() -> None:
    run = run_with(dp=2, tp=2)
    assert not run.hangs
    assert all(rung.reached and not rung.wrong for rung in lesson.rungs(run))
    assert (not lesson.first_difference(run), not lesson.first_missing_call(run)) == (True, True)
    assert repr(lesson.first_difference(run)) == "nothing differs from the oracle"
    assert repr(lesson.first_missing_call(run)) == "no call is missing: nobody waits for ever"
    assert lesson.waits(run) == []
    assert lesson.copies_agree(run)
    assert [len(report.notes.calls) for report in run.reports] == [len(lesson.program(2))] * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("grid", [(3, 2), (2, 4)])
def test_on_other_grids_sound_runs_are_the_oracles_and_every_finding_is_the_tools(
    grid: tuple[int, int],
) -> None:
    assert not lesson.first_difference(run_with(dp=grid[0], tp=grid[1]))
    for letter in "ABCDEF":
        clinic = lesson.open_clinic(*grid)
        assert found_by_tools(clinic.run(letter)) == truth(clinic, letter)[:2]


def found_by_tools(run: TrainingRun) -> tuple[Any, str]:
    """Rank and phase as the two tools give them."""
    if run.hangs:
        call = lesson.first_missing_call(run)
        return call.rank, call.phase
    spot = lesson.first_difference(run)
    return spot.who, spot.phase


@pytest.mark.parametrize("letter", "ABCDEF")
def test_the_tools_find_rank_and_phase_and_the_right_finding_passes_with_the_guilty_lines(
    letter: str, clinic: Any
) -> None:
    assert found_by_tools(run_of(clinic, letter)) == truth(clinic, letter)[:2]
    verdict = clinic.check(letter, truth(clinic, letter))
    assert verdict
    assert "def " in repr(verdict)
    assert clinic.check(letter, ...).passed is None


@pytest.mark.parametrize("letter", "ABCDEF")
def test_each_other_rank_phase_and_kind_is_excluded_by_evidence_with_a_hint(letter: str, clinic: Any) -> None:
    who, phase, kind = truth(clinic, letter)
    run, [fault] = run_of(clinic, letter), clinic.faults(letter)
    wrong = [(other, phase, kind) for other in (0, 1, 2, 3, "all") if other != who]
    wrong += [(who, other, kind) for other in lesson.PHASES if other not in PHASE_OF[kind]]
    wrong += [(who, phase, other) for other in KINDS if other != kind]
    for answer in wrong:
        found = lesson.judge(run, fault, answer)
        assert isinstance(found, lesson.Diagnosis), answer
        assert found.hints, answer
        assert "{" not in found.what
        assert kind not in found.what or answer[2] == kind


@pytest.mark.parametrize(
    ("letter", "change", "says"),
    [
        ("A", lambda who, phase, kind: (who, "gradient", kind), "the numbers are wrong already"),
        ("A", lambda who, phase, kind: ("all", phase, kind), "Not all: at the first rung that differs"),
        ("A", lambda who, phase, kind: ((who + 1) % 4, phase, kind), "has the oracle's bits"),
        ("B", lambda who, phase, kind: ((who + 2) % 4, phase, kind), "has made every call that was due"),
        ("B", lambda who, phase, kind: (who, phase, "leaves early"), "has returned. Rank"),
        ("B", lambda who, phase, kind: (who, phase, "another seed"), "These ranks stand still"),
        ("C", lambda who, phase, kind: (0, phase, kind), "is wrong, but not alone"),
        ("C", lambda who, phase, kind: (who, phase, "no bug"), "Rounding leaves differences near 1e-07"),
        ("D", lambda who, phase, kind: (who, phase, "skipped call"), "goes on to the next of the program"),
        ("E", lambda who, phase, kind: (who, phase, "stale momentum"), "gradient of step 2 differs first"),
        ("F", lambda who, phase, kind: (who, "average", kind), "After average, all is as the oracle has it"),
        ("F", lambda who, phase, kind: (who, phase, "order of calls"), "every rank made every call"),
        ("F", lambda who, phase, kind: (9, phase, kind), "neither"),
        ("F", lambda who, phase, kind: (who, "backward", kind), "is no phase"),
        ("F", lambda who, phase, kind: (who, phase, "gremlins"), "is no kind"),
        ("F", lambda who, phase, kind: "rank 2", "Give (rank, phase, kind)"),
    ],
)  # fmt: skip
def test_a_wrong_finding_is_told_what_the_evidence_says_against_it(
    letter: str, change: Callable[..., Any], says: str, clinic: Any
) -> None:
    verdict = clinic.check(letter, change(*truth(clinic, letter)))
    assert verdict.passed is False
    assert says in verdict.message


def test_two_mistakes_are_found_one_after_the_other(clinic: Any) -> None:
    packing, averaging = clinic.faults("G")
    right = [(packing.rank, "average", packing.kind), ("all", "average", averaging.kind)]
    assert lesson.packs_otherwise(run_of(clinic, "G"), 1, "average") == packing.rank
    left = lesson.first_difference(clinic.run("G", repaired=[packing.kind]))
    assert (left.who, left.step, left.phase) == ("all", 2, "average")
    for answer, says in (
        (right[0], "Give a list of two findings"),
        ([right[0], (1, "start", "another seed")], "The other is not 'another seed'"),
        ([("all", "average", packing.kind), right[1]], "Not all"),
        ([(0, "start", "another seed"), (0, "start", "no bug")], "oracle"),
    ):
        verdict = clinic.check("G", answer)
        assert verdict.passed is False
        assert says in verdict.message
    assert clinic.check("G", right[::-1])


def test_each_wrong_rank_or_phase_of_two_findings_is_answered_by_a_run_with_that_mistake_alone(
    clinic: Any,
) -> None:
    faults = clinic.faults("G")
    right = [("all" if fault.rank < 0 else fault.rank, "average", fault.kind) for fault in faults]
    for place, (who, phase, kind) in enumerate(right):
        wrong = [(who, other, kind) for other in lesson.PHASES if other != phase]
        wrong += [(other, phase, kind) for other in (0, 1, 2, 3, "all") if other != who]
        for finding in wrong:
            answer = [finding if each == place else right[each] for each in range(2)]
            verdict = clinic.check("G", answer)
            assert verdict.passed is False, answer
            assert f"In a run with {kind!r} alone: " in verdict.message
            assert not re.search(r"\b[Nn]one\b|no rank", verdict.message), verdict.message


@pytest.mark.parametrize(
    "repaired", [["nonsense"], ["another seed"], ["not averaged", "nonsense"], "nonsense"]
)
def test_a_repair_of_what_is_not_in_the_run_is_refused(repaired: Any, clinic: Any) -> None:
    with pytest.raises(
        UsageError, match=r"run G has no '(nonsense|another seed)' to repair\. The kinds are"
    ) as told:
        clinic.run("G", repaired=repaired)
    assert all(repr(kind) in str(told.value) for kind in KINDS)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("letter", ["H", "a", 3, None, ["A"]])
def test_a_run_that_is_not_there_is_refused_in_one_sentence(letter: Any, clinic: Any) -> None:
    for ask in (clinic.run, clinic.faults, partial(clinic.check, answer=(0, "start", "another seed"))):
        with pytest.raises(UsageError, match=r"there is no run .*\. The runs are A, B, C, D, E, F, G\.$"):
            ask(letter)


@pytest.mark.parametrize("kind", [["another seed"], {"another seed"}, None, 3])
def test_a_kind_that_is_no_word_is_told_the_kinds(kind: Any, clinic: Any) -> None:
    who, phase, _ = truth(clinic, "A")
    assert "is no kind" in message_of_wrong(clinic_exercise(clinic, "A"), (who, phase, kind))
    with pytest.raises(UsageError, match="to repair"):
        clinic.run("G", repaired=[kind])


def clinic_exercise(clinic: Any, letter: str) -> Any:
    """A fresh exercise of the clinic's run."""
    run_of(clinic, letter)
    return Exercise(lambda given: lesson.judge(clinic.kept[letter], clinic.faults(letter)[0], given))


@pytest.mark.parametrize("letter", "ABCDEF")
def test_a_first_wrong_try_is_told_neither_the_right_rank_nor_the_right_phase(
    letter: str, clinic: Any
) -> None:
    who, phase, kind = truth(clinic, letter)
    run, [fault] = run_of(clinic, letter), clinic.faults(letter)
    other = next(each for each in (0, 1) if each != who)
    said = lesson.judge(run, fault, (other, phase, kind))
    assert f"rank {who}" not in said.what.replace(f"for rank {who}", "")
    wrong_phase = next(each for each in lesson.PHASES[::-1] if each not in PHASE_OF[kind])
    assert phase not in lesson.judge(run, fault, (who, wrong_phase, kind)).what


def test_no_bug_is_within_rounding_and_every_lie_is_far_outside(clinic: Any) -> None:
    off = {letter: lesson.first_difference(run_of(clinic, letter)).off for letter in "ACEF"}
    assert 0 < off["E"] < 20 * lesson.ROUNDING
    assert min(off[letter] for letter in "ACF") > 1e4 * lesson.ROUNDING


def test_the_guilty_rank_is_silent_and_all_who_wait_point_to_it(hang: TrainingRun) -> None:
    assert [rank for rank, report in enumerate(hang.reports) if not report.stuck] == [2]
    missing = lesson.first_missing_call(hang)
    assert (missing.rank, missing.step, missing.phase, missing.instead) == (2, 3, "load", "it returned")
    assert [(each.waiter, each.awaited, each.phase) for each in lesson.waits(hang)] == [
        (0, 2, "average"),
        (1, 3, "average"),
        (3, 2, "load"),
    ]
    assert lesson.say_calls(hang, 3).splitlines()[2:] == ["rank 2: none", "rank 3: load …"]
    assert "rank 3: self.load()" in lesson.say_lines(hang)
    assert "rank 2: returned" in lesson.say_lines(hang)


def test_copies_agree_though_they_are_wrong(lie: TrainingRun) -> None:
    assert lesson.outcomes(lie) == {"rung": "share", "agree": True}
    spot = lesson.first_difference(lie)
    assert (spot.step, spot.ranks) == (2, (1, 3))
    assert "copies agree to the last bit at the end   yes" in lesson.say_outcome(lie)
    ladder = lesson.draw_ladder(lie).alt
    assert "the first rungs that differ: step 2 share on rank 1; step 2 share on rank 3" in ladder


def test_a_bit_that_is_flipped_in_a_report_is_the_first_difference(lie: TrainingRun) -> None:
    notes = lie.reports[3].notes
    rungs = {key: dict(found) for key, found in notes.rungs.items()}
    kept = rungs[1, "momentum"]["out"]
    assert kept is not None
    flipped = kept.clone()
    flipped.view(torch.int32)[0, 0] ^= 1
    rungs[1, "momentum"]["out"] = flipped
    reports = (*lie.reports[:3], replace(lie.reports[3], notes=replace(notes, rungs=rungs)))
    spot = lesson.first_difference(replace(lie, reports=reports))
    assert (spot.step, spot.phase, spot.who, spot.matrices) == (1, "momentum", 3, ("out",))


@pytest.mark.parametrize(
    ("rung", "agree", "says"),
    [
        ("momentum", True, "momentum does not use the learning rate"),
        ("share", False, "all copies take its rows"),
        ("weights", True, "give one of gradient"),
    ],
)
def test_a_wrong_prediction_is_told_why(rung: str, agree: bool, says: str) -> None:
    assert says in message_of_wrong(lesson.guess(), rung, agree)
    assert lesson.guess().check("share", True)


def test_the_quiz_is_what_the_runs_say(hang: TrainingRun, lie: TrainingRun) -> None:
    wrong = {"waiting": (4, "Count who waits"), "agree": (0, "copies_agree"), "step": (3, "first_difference")}
    assert_quiz(lesson.quiz(hang, lie), {"waiting": 3, "agree": 1, "step": 2}, wrong)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 3)])
def test_a_grid_with_nothing_to_break_is_refused(grid: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="this lesson needs dp of 2 or more"):
        lesson.open_clinic(*grid)


@pytest.mark.parametrize("seed", range(6))
def test_the_places_of_mistakes_follow_from_the_seed_and_the_kinds_do_not(seed: int) -> None:
    for letter, kinds in LETTERS.items():
        faults = lesson.faults_of(letter, 2, 2, seed)
        assert tuple(fault.kind for fault in faults) == kinds
        assert faults == lesson.faults_of(letter, 2, 2, seed)


# Played in a local world.


def test_a_wrong_number_reaches_everybody_and_a_skipped_call_stops_all() -> None:
    wrong = lesson.film_of(2, 2, 2, "average", "wrong")
    assert wrong[-1].end == ""
    assert {rank for phase, rank in wrong[-1].wrong if phase == "average"} == {0, 2}
    assert {rank for phase, rank in wrong[-1].wrong if phase == "gather"} == {0, 1, 2, 3}
    stands = lesson.film_of(2, 2, 2, "average", "skips")
    assert stands[-1].end.startswith("Nobody can go on")
    assert ("average", 0) in stands[-1].waiting
    assert ("average", 2) not in stands[-1].waiting | stands[-1].done


@pytest.mark.parametrize("phase", lesson.CALLS)
@pytest.mark.parametrize("rank", range(4))
def test_every_fault_ends_in_numbers_or_in_a_stand(phase: str, rank: int) -> None:
    assert len(lesson.film_of(2, 2, rank, phase, "wrong")) == lesson.moments_of(2, 2) + 1
    skipped = lesson.film_of(2, 2, rank, phase, "skips")
    assert skipped[-1].end
    assert (phase, rank) not in skipped[-1].done
