"""Lesson 15: broken files on real ranks, the evidence they leave, and the replies to repairs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from muon_tutorial.errors import UsageError
from muon_tutorial.learn import broken_runs as lesson
from muon_tutorial.learn.broken_runs.on_ranks import TrainingRun

from .answers import assert_quiz

REPAIRS: dict[str, Any] = {
    "A": {6: "return self.seed"},
    "B": {43: "", 44: "", 45: ""},
    "C": {80: "return rescale(SHAPES[name])"},
    "D": {40: "", 41: ""},
    "E": "nothing",
    "F": {52: "self.memory[name].mul_(MEMORY).add_((1 - MEMORY) * mean)"},
    "G": {43: "order = list(self.gradients)", 90: "dist.broadcast(flat, group_src=place, group=group)"},
}
"""The lessons' own solutions."""
FIRST = {
    "A": "start of step 0 on ranks 1, 2 and 3",
    "C": "update of step 1 on all ranks",
    "E": "gradient of step 1 on all ranks",
    "F": "momentum of step 1 on all ranks",
    "G": "average of step 1 on ranks 1 and 3",
}


@pytest.fixture(scope="module")
def clinic() -> Any:
    return lesson.open_clinic(2, 2)


@pytest.fixture(scope="module")
def hang(clinic: Any) -> TrainingRun:
    return clinic.run("hang")


@pytest.fixture(scope="module")
def lie(clinic: Any) -> TrainingRun:
    return clinic.run("lie")


@pytest.mark.parametrize("letter", lesson.LETTERS)
def test_each_file_is_broken_as_its_evidence_says_and_the_repair_is_green(letter: str, clinic: Any) -> None:
    run = clinic.run(letter)
    assert run.hangs == (letter in "BD")
    assert run.hangs or repr(lesson.first_difference(run)) == FIRST[letter]
    verdict = clinic.check(letter, REPAIRS[letter])
    assert verdict.passed, verdict
    assert "The ladder of" in verdict.picture.alt


@pytest.mark.exhaustive
@pytest.mark.parametrize("grid", [(3, 2), (2, 4)])
@pytest.mark.parametrize("letter", lesson.LETTERS)
def test_on_other_grids_the_same_lines_are_broken(grid: tuple[int, int], letter: str) -> None:
    clinic = lesson.open_clinic(*grid)
    assert clinic.check(letter, {1: "class Loop(LoopNotes):"}).passed is False
    assert clinic.check(letter, REPAIRS[letter])


@pytest.mark.parametrize(
    ("letter", "repair", "says"),
    [
        ("hang", {10: "for self.step in range(1, steps):"}, "training ends after step 2, not 3, on"),
        ("hang", {10: "for self.step in range(1, steps + 9):"}, "training ends after step 11, not 3, on"),
        ("A", "nothing", "start of step 0 on ranks 1, 2 and 3 still differs"),
        ("A", {6: "return 0"}, "With this seed it is repaired, but not with another"),
        ("B", {43: "if self.loss > 0:"}, "momentum of step 1 on all ranks still differs"),
        ("B", {44: ""}, "waits for rank"),
        ("B", {43: "if self.loss < -1:"}, "with other losses the ranks would hang: rank "),
        ("C", {80: "return rescale(SHAPES[name]) * 1.0000001"}, "Nearly: update of step 1 on all ranks"),
        ("C", {80: "return 1.0"}, "size 0.7071, cosine 1.0000"),
        ("D", {40: "if self.loss < 0:", 41: "pass"}, ""),
        ("D", {15: ""}, "has no attribute 'whole'"),
        ("E", {33: "return []"}, "Line 33 needs no repair."),
        ("F", {52: "self.memory[name].mul_("}, "was never closed, in line 52"),
        ("F", {0: "x"}, "The file has lines 1 to 99, and no line 0"),
        ("F", {"52": "x"}, "Give a dictionary"),
        ("F", "mul_", "Give a dictionary"),
        ("G", {43: "order = list(self.gradients)"}, "share of step 1 on all ranks still differs"),
    ],
)  # fmt: skip
def test_a_repair_is_judged_by_what_the_repaired_file_does(
    letter: str, repair: Any, says: str, clinic: Any
) -> None:
    verdict = clinic.check(letter, repair)
    assert verdict.passed is (not says)
    assert says in verdict.message


def test_a_repair_without_a_line_is_told_what_to_answer(clinic: Any) -> None:
    verdict = clinic.check("E", {})
    assert (verdict.passed, verdict.message) == (None, 'To change no line, answer "nothing".')


def test_a_hang_and_a_lie_that_are_left_have_hints_of_their_own() -> None:
    clinic = lesson.open_clinic(2, 2)
    said = [clinic.check(letter, "nothing").message for letter in "BC"]
    assert "A rank that waits has done its duty" in said[0]
    assert "Find the first red rung" in said[1]


def test_a_method_and_a_rung_that_are_not_there_are_refused(clinic: Any, lie: TrainingRun) -> None:
    with pytest.raises(UsageError, match=r"no method 'backward'; it has own_seed, .*, log"):
        clinic.read("F", "backward")
    with pytest.raises(UsageError, match="there is no rung 'average' of step 0"):
        lesson.say_numbers(lie, 0, "average")


@pytest.mark.parametrize("letter", ["H", "a", 3, None, ["A"]])
def test_a_run_that_is_not_there_is_refused_in_one_sentence(letter: Any, clinic: Any) -> None:
    for ask in (clinic.run, clinic.read, lambda name: clinic.check(name, {})):
        with pytest.raises(UsageError, match=r"there is no run .*\. The runs are A, B, C, D, E, F, G\.$"):
            ask(letter)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dp", [2, 3])
def test_one_place_alone_is_below_or_above_what_trips_a_file(seed: int, dp: int) -> None:
    files = [lesson.file_of(letter, dp, 2, seed) for letter in "BD"]
    low, high = (float(re.findall(r"self.loss [<>] ([\d.]+)", text)[0]) for text in files)
    assert 0 < low < high
    assert all("{" not in text.replace("= {", "").replace("{name:", "") for text in files)


def test_no_bug_is_within_rounding_and_every_lie_is_far_outside(clinic: Any) -> None:
    off = {letter: lesson.first_difference(clinic.run(letter)).off for letter in "ACEFG"}
    assert 0 < off["E"] < 20 * lesson.ROUNDING
    assert min(off[letter] for letter in "ACFG") > 1e4 * lesson.ROUNDING


def test_the_first_picture_is_the_recording_of_that_run(hang: TrainingRun) -> None:
    recorded, fresh = lesson.hero().alt, lesson.draw_waits(hang, guilty=2).alt
    assert recorded.partition(". ")[2] == fresh.partition(". ")[2]
    assert "rank 3 waits for rank 2 in load of step 3" in recorded


def test_a_bit_that_is_flipped_in_a_report_is_the_first_difference(lie: TrainingRun) -> None:
    notes = lie.reports[3].notes
    rungs = {key: dict(found) for key, found in notes.rungs.items()}
    flipped = rungs[1, "momentum"]["out"].clone()
    flipped.view(torch.int32)[0, 0] ^= 1
    rungs[1, "momentum"]["out"] = flipped
    reports = (*lie.reports[:3], replace(lie.reports[3], notes=replace(notes, rungs=rungs)))
    spot = lesson.first_difference(replace(lie, reports=reports))
    assert (spot.step, spot.phase, spot.who, spot.matrices) == (1, "momentum", 3, ("out",))


def test_the_prediction_is_what_the_lying_run_shows(lie: TrainingRun) -> None:
    assert lesson.guess().check(*lesson.outcomes(lie).values())


def test_the_quiz_is_what_the_runs_say(hang: TrainingRun, lie: TrainingRun) -> None:
    assert_quiz(lesson.quiz(hang, lie), {"waiting": 3, "agree": 1, "step": 2})


def test_waits_found_from_logs_are_those_of_the_run(clinic: Any) -> None:
    for name in ("hang", "B", "D"):
        run = clinic.run(name)
        assert lesson.waiting_pairs(lesson.logs(run)) == {(it.waiter, it.awaited) for it in lesson.waits(run)}
    assert lesson.waiting_pairs(lesson.logs(clinic.run("A"))) == set()
    for kind in (list, set, tuple, frozenset):
        assert lesson.write_waits().check(lambda logs, kind=kind: kind(lesson.waiting_pairs(logs)))
        assert lesson.write_suspects().check(lambda pairs, kind=kind: kind(lesson.suspects(pairs)))


def test_suspects_are_awaited_and_wait_for_nobody(clinic: Any) -> None:
    assert lesson.write_suspects().check(lambda pairs: [*{j for _, j in pairs} - {i for i, _ in pairs}])
    assert [
        lesson.suspects(lesson.waiting_pairs(lesson.logs(clinic.run(name)))) for name in ("hang", "D")
    ] == [
        {2},
        set(),
    ]


def test_the_search_finds_the_first_wrong_bit(lie: TrainingRun) -> None:
    spot = lesson.first_difference(lie)
    assert lesson.first_wrong(lie) == (spot.step, spot.phase, spot.ranks[0])


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 3)])
def test_a_grid_with_nothing_to_break_is_refused(grid: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="this lesson needs dp of 2 or more"):
        lesson.open_clinic(*grid)


def test_words_are_wrapped_and_a_recorder_that_is_off_says_how_to_turn_it_on(lie: TrainingRun) -> None:
    off = replace(lie, reports=tuple(replace(report, flight=()) for report in lie.reports))
    assert "TORCH_FR_BUFFER_SIZE" in lesson.say_flight(off, 0)
    entry = {
        "profiling_name": "gloo:all_gather",
        "process_group": ["3", ""],
        "collective_seq_id": 7,
        "input_sizes": [[4]],
    }
    on = replace(lie, reports=(replace(lie.reports[0], flight=(entry,)), *lie.reports[1:]))
    assert re.fullmatch(r"gloo:all_gather +group 3 +call 7 +sizes \[\[4\]\]", lesson.say_flight(on, 0))


def test_the_recorded_dump_names_the_call_in_which_the_run_says_that_rank_stands(hang: TrainingRun) -> None:
    stack = re.findall(r"^    (\w+) \(", lesson.recorded_dump(), re.MULTILINE)
    assert stack[0] == "all_gather"
    assert stack[-2:] == ["load", "take_step"]
    assert "rank 3: line 28, in load" in lesson.say_stacks(hang)
