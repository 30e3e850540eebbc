"""my_muon.py is built from right answers, completed if some are missing, and has torch.optim.Muon's bits."""

from __future__ import annotations

import ast
import linecache
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muon_tutorial import launch, zeropower_via_newtonschulz
from muon_tutorial.engine.collective import Start, Wait
from muon_tutorial.engine.hop_collectives import take
from muon_tutorial.engine.travel import travel
from muon_tutorial.errors import RankFailedError
from muon_tutorial.learn.course import series
from muon_tutorial.learn.exercises.judge import Exercise, Par
from muon_tutorial.learn.my_loop.lives import read
from muon_tutorial.learn.my_loop.port import RunJob
from muon_tutorial.learn.my_muon import blocks, finale, keep, on_ranks, scores, training
from muon_tutorial.learn.my_muon.blocks import KeptBlock
from scripts.notebooks import read_text, sources

from ..exhaustive import left_out
from . import fewer_bytes

NAMES = list(blocks.reference()[1])
OTHERWISE = {"newton_schulz", "gather", "redistribute"}
"""Answers whose solution in the lesson calls a helper, while their text in the reference does not."""
EXERCISES: dict[str, Callable[[Any], Iterable[Exercise]]] = {
    "02": lambda lesson: lesson.all_exercises(5),
    "03": lambda lesson: (lesson.check_ring(4), lesson.check_reduce_scatter(4)),
    "04": lambda lesson: lesson.all_exercises(4, "gloo", 0),
    "05": lambda lesson: lesson.all_exercises(4, 1, 400),
    "06": lambda lesson: lesson.all_exercises(2, 3, "gloo"),
    "07": lambda lesson: lesson.all_exercises(2, 3, "gloo"),
    "08": lambda lesson: lesson.all_exercises(2, 4, "gloo"),
    "09": lambda lesson: lesson.all_exercises(lesson.plan_of(2, 2), 0),
    "10": lambda lesson: lesson.all_exercises(2, 2),
    "11": lambda lesson: lesson.all_exercises(2, 2, 0, "gloo"),
    "12": lambda lesson: lesson.all_exercises(4, 0),
    "16": lambda lesson: lesson.all_exercises(4, 1, lesson.RunJob(12, 0), "gloo"),
}


def solutions(number: str) -> str:
    """The functions in a lesson's folded solutions, as one text."""
    [path] = sources([number])
    cells = read_text(path.read_text(encoding="utf-8")).cells
    folded = [cell.source for cell in cells if "solution" in cell.metadata.get("tags", [])]
    code = "\n".join(
        found for each in folded for found in re.findall(r"```python\n(.*?)```", each, re.DOTALL)
    )
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    return "\n\n\n".join(ast.get_source_segment(code, node) or "" for node in functions) + "\n"


def cell(text: str, place: Path, **more: Any) -> dict[str, Any]:
    """The definitions of a notebook's cell: functions of ``__main__`` that have a source."""
    place.write_text(text, encoding="utf-8")
    scope: dict[str, Any] = {
        "__name__": "__main__",
        "math": math,
        "torch": torch,
        "dist": dist,
        "take": take,
        "travel": travel,
        "Start": Start,
        "Wait": Wait,
        "zeropower_via_newtonschulz": zeropower_via_newtonschulz,
        "local_shape": on_ranks.load_file(blocks.REFERENCE).local_shape,
        **more,
    }
    exec(compile(text, str(place), "exec"), scope)
    return scope


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has answered every exercise in order, using the solutions."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, make in EXERCISES.items():
            lesson = import_module(f"muon_tutorial.learn.{series.lesson(number).package}")
            answers = cell(solutions(number), folder / f"cell_{number}.py")
            for exercise in make(lesson):
                if exercise.keeps:
                    verdict = exercise.check(*(answers[name] for name in exercise.keeps))
                    assert verdict, (number, verdict)
                    assert " in my_muon.py now." in verdict.message
    return folder


def tried(path: Path) -> set[str | None]:
    """Four ranks' messages about a file, on all three grids."""
    return {
        wrong
        for grid in finale.GRIDS
        for wrong in launch(on_ranks.try_file, 4, args=(str(path), *grid), output="quiet")
    }


def without(folder: Path, skipped: Iterable[str], to: Path) -> Path:
    """A reader's folder without the answers ``skipped``."""
    text = (folder / keep.FILE).read_text(encoding="utf-8")
    for name in skipped:
        text = text.replace(str(blocks.blocks_of(text)[name]), "")
    (to / keep.FILE).write_text(text, encoding="utf-8")
    return to


def test_all_answers_together_are_torch_optim_muon_to_the_bit_on_three_grids(built: Path) -> None:
    assert list(keep.read_mine(built).blocks) == NAMES
    assert tried(finale.complete(built)) == {None}
    assert "18 of its 18 functions are yours" in keep.say_whose(keep.read_mine(built))


@pytest.mark.parametrize("seed", [0, left_out(1), 2])
def test_whatever_was_skipped_it_still_is_and_says_what_is_whose(
    built: Path, tmp_path: Path, seed: int
) -> None:
    skipped = random.Random(seed).sample(NAMES, 5 + 4 * seed)
    reader = without(built, skipped, tmp_path)
    assert tried(finale.complete(reader)) == {None}
    yours, others = keep.say_whose(keep.read_mine(reader)).split("; from the reference: ")
    assert others.rstrip(".").split(", ") == [name for name in NAMES if name in skipped]
    mine, of_18, lines, of_all = map(int, re.findall(r"\d+", yours))
    assert (mine, of_18) == (18 - len(skipped), 18)
    assert 5 * mine < lines < of_all < 700


def test_a_helper_of_two_answers_counts_once() -> None:
    helper = "def twice(x):\n    return 2 * x\n\n\n"
    once, again = (f"{helper}def {name}(x):\n    return twice(x)\n" for name in "ab")
    assert keep.lines_of(once) == 4
    assert keep.lines_of(once, again) == keep.lines_of(f"{once}\n{again}") == 6


def test_the_file_and_the_reference_need_torch_alone(built: Path) -> None:
    paths = [str(path) for path in (blocks.REFERENCE, built / keep.FILE, finale.complete(built))]
    code = f"import runpy, sys; sys.modules['muon_tutorial'] = None; [*map(runpy.run_path, {paths})]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_solutions_are_the_reference() -> None:
    for name, block in blocks.reference()[1].items():
        if name not in OTHERWISE:
            due = ast.dump(ast.parse(block.source))
            found = ast.parse(solutions(block.lesson)).body
            assert due in [ast.dump(ast.Module([node], [])) for node in found], name


WRONG_GROUPS = "def groups(dp, tp):\n    return [[0]], [[0]]\n"


@pytest.mark.parametrize(
    ("damage", "says", "lost"),
    [
        (("def groups(dp, tp):", "def groups(dp, tp:"), "never closed", {"groups"}),
        (("def groups(dp, tp):", "def grups(dp, tp):"), "the block of groups does not define it", {"groups"}),
        (("def bill(", "1 / 0\n\ndef bill("), "the block of bill raised ZeroDivisionError", {"bill"}),
        (("# ── end of groups ──\n", ""), "the block of groups has no end", set(NAMES)),
        (("# ── lesson 06: groups ──\n", ""), "the block of groups has no beginning", set(NAMES)),
    ],
)
def test_a_broken_file_is_one_clear_message_and_stops_nothing(
    built: Path, tmp_path: Path, damage: tuple[str, str], says: str, lost: set[str]
) -> None:
    text = (built / keep.FILE).read_text(encoding="utf-8")
    assert damage[0] in text
    (tmp_path / keep.FILE).write_text(text.replace(*damage), encoding="utf-8")
    mine = keep.read_mine(tmp_path)
    [problem] = mine.problems
    assert says in problem
    assert re.match(r"line \d+: ", problem)
    assert set(NAMES) - set(mine.blocks) == lost
    assert f"{problem}. The reference stands in for it." in keep.say_whose(mine)
    compile(finale.complete(tmp_path).read_text(encoding="utf-8"), "complete", "exec")


def test_a_file_that_is_no_text_is_said_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / keep.FILE).write_bytes(b"\xff\xfe\x00")
    assert "not a text in UTF-8" in keep.say_whose(keep.read_mine(tmp_path))
    answer = cell(solutions("06"), tmp_path / "cell.py")["groups"]
    assert "not a text in UTF-8" in keep.keep({"groups": answer}, tmp_path)
    assert (tmp_path / keep.FILE).read_bytes() == b"\xff\xfe\x00"


def test_an_answer_replaces_the_one_before_and_what_the_reader_added_stays(tmp_path: Path) -> None:
    for text in (
        solutions("05"),
        solutions("05").replace("begin = place * length", "begin = length * place"),
    ):
        assert "is in my_muon.py now" in keep.keep(
            {"local_range": cell(text, tmp_path / "cell.py")["local_range"]}, tmp_path
        )
        path = tmp_path / keep.FILE
        path.write_text(path.read_text(encoding="utf-8") + "\n# mine\n", encoding="utf-8")
        linecache.clearcache()
    written = (tmp_path / keep.FILE).read_text(encoding="utf-8")
    assert written.count("def local_range") == 1
    assert "length * place" in written
    assert written.count("# mine") == 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("local_range", "local_range = lambda r, place, length: (0, 0)\n", "write it as"),
        ("groups", "def groups(dp, tp):\n    return lesson.groups(dp, tp)\n", "the lesson's own tools"),
        ("groups", "def groups(a, b):\n    return [[dp]], [[tp]]\n", "'dp' of the notebook"),
        ("groups", WRONG_GROUPS, "the whole optimizer of the course fails on four ranks"),
        ("bill", "def bill(*args):\n    return {}\n", "bytes, and the bill says nothing of it"),
        (
            "newton_schulz",
            "def newton_schulz(G, steps=5):\n    X = G / G.norm()\n    for _ in range(steps):\n"
            "        A = X @ X.T\n        X = 3.4445 * X + (2.0315 * A @ A - 4.775 * A) @ X\n    return X\n",
            "newton_schulz rounds elsewhere. Write both sums of its step with torch.addmm, in G's dtype.",
        ),
        (
            "ring_all_gather",
            "def ring_all_gather(mine, rank, ranks):\n    return [mine] * ranks\n",
            "takes 3 positional arguments but 4 were given",
        ),
        (
            "ring_all_gather",
            "def ring_all_gather(mine, rank, ranks, group=None):\n    return [mine] * ranks\n",
            "ring_all_gather never uses `group`. Pass it on in each call",
        ),
    ],
)
def test_what_would_not_run_in_the_optimizer_is_not_kept_and_says_why(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    answer = cell(text, tmp_path / "cell.py", lesson=object(), dp=2, tp=2)[name]
    said = keep.keep({name: answer}, tmp_path)
    assert said.startswith(f"{name} is not in my_muon.py yet: ")
    assert says in said
    assert not (tmp_path / keep.FILE).exists()


def test_helpers_constants_and_imports_go_along(tmp_path: Path) -> None:
    text = (
        "import itertools as it\nFIRST = 0\n\ndef every(start, end, step):\n"
        "    return list(it.islice(it.count(start, step), (end - start + step - 1) // step))\n\n"
        "def groups(dp, tp):\n    return (\n        [every(FIRST + t, dp * tp, tp) for t in range(tp)],\n"
        "        [every(d * tp, d * tp + tp, 1) for d in range(dp)],\n    )\n"
    )
    answer = cell(text, tmp_path / "cell.py")["groups"]
    assert keep.keep({"groups": answer}, tmp_path) == "groups is in my_muon.py now."
    source = keep.read_mine(tmp_path).blocks["groups"].source
    for part in ("import itertools as it\n", "FIRST = 0\n", "def every(", "def groups("):
        assert part in source


def test_a_pair_of_answers_is_tried_together(tmp_path: Path) -> None:
    text = (
        "def save(manager, step, model, optimizer, scheduler):\n"
        "    manager.save(step, model, optimizer, extra=scheduler.state_dict())\n\n"
        "def load(manager, model, optimizer, scheduler):\n    if manager.latest_step() is None:\n"
        "        return 0\n    scheduler.load_state_dict(manager.load(model, optimizer))\n"
        "    return manager.latest_step()\n"
    )
    answers = cell(text, tmp_path / "cell.py")
    pair = {name: answers[name] for name in ("save", "load")}
    assert keep.keep(pair, tmp_path) == "save and load are in my_muon.py now."


def test_functions_that_no_reader_wrote_are_not_kept(tmp_path: Path) -> None:
    assert keep.keep({"groups": import_module("muon_tutorial.learn.the_grid").groups}, tmp_path) == ""
    assert not (tmp_path / keep.FILE).exists()


def test_it_trains_a_gpt_with_the_bits_of_one_process_and_the_bytes_of_its_bill(
    built: Path, capsys: pytest.CaptureFixture
) -> None:
    end = finale.train_it(2, 0, built)
    said = capsys.readouterr().out
    assert "18 of its 18 functions are yours" in said
    assert "failed" not in said
    assert finale.say_bits(end).count("the bits of torch.optim.Muon") == 3
    for run in end.runs:
        assert run.losses[-1] < run.losses[0]
        assert {on_ranks.PHASES[phase]: sent for phase, sent in run.sent.items() if sent} == {
            name: due for name, due in run.expected.items() if due
        }
    worked = [run.worked for run in end.runs]
    assert worked == sorted(worked)
    assert worked[-1] == 12  # with dp = 1, every matrix
    assert finale.best_grids(end) == {"least": (1, 4), "most_work": (1, 4)}
    assert "AdamW's loss at the end, text of 4 × 1" in finale.scorecard(end)
    assert "loss at the beginning" in finale.scorecard(end)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder, in which the notebook runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


BEFORE: Any = SimpleNamespace(grid=(2, 2), sent={1: 98_304, 2: 49_152, 3: 49_152, 7: 98_304})


@pytest.fixture
def fewer(reader: Path) -> Exercise:
    return finale.check_fewer(finale.Finale(blocks.REFERENCE, (BEFORE,), ()), 2, 0)


def test_the_solution_of_the_open_exercise_sends_196608_bytes_and_compressed_about_half_of_the_first(
    fewer: Exercise, tmp_path: Path
) -> None:
    solution = cell(solutions("16"), tmp_path / "cell.py")["fewer_bytes"]
    said = fewer.check(solution).message
    assert "Yours takes 196608 bytes; par is 196608." in said
    assert row_of("fewer_bytes", scores.say_scores())[2] == "196,608"
    assert "dp gather 49,152 → 0; tp gather 49,152 → 49,152; parameter all_gather 98,304 → 49,152." in said
    said = fewer.check(lambda course: fewer_bytes.compressed(course, solution(course))).message
    [took] = map(int, re.findall(r"Yours takes (\d+) bytes; par is 196608. You are below it!", said))
    assert 0.98 * 149_967 < took < 1.02 * 149_967
    assert fewer.check(lambda course: ...).passed is None


@pytest.mark.parametrize(("change", "says"), fewer_bytes.WRONG)
def test_other_bits_uncounted_bytes_and_as_many_as_before_do_not_pass(
    fewer: Exercise, change: Any, says: str
) -> None:
    verdict = fewer.check(change)
    assert verdict.passed is False
    assert says in verdict.message


def test_the_life_of_a_killed_run_is_read_from_its_diary(tmp_path: Path) -> None:
    def train(victim: int | None) -> training.RunRecord:
        asked = (str(blocks.REFERENCE), (2, 2), 8, 0, str(tmp_path), victim)
        return launch(training.train, 4, args=asked, output="quiet", timeout=30.0)[0]

    with pytest.raises(RankFailedError):
        train(3)
    record = train(None)
    first, last = read(tmp_path, RunJob(8)).attempts
    assert (first.begin, first.end, first.saved, first.killed) == (0, training.KILLED_AFTER, (4,), (3, 6))
    assert (last.begin, last.saved, last.killed) == (4, (8,), None)
    assert tuple(last.losses.values()) == record.losses
    assert all(last.losses[step] == first.losses[step] for step in (4, 5))


def test_what_a_class_prints_is_shown_and_each_phase_that_it_sends_in_is_named(
    fewer: Exercise, capsys: pytest.CaptureFixture
) -> None:
    said = fewer.check(fewer_bytes.prints_and_sends_twice).message
    assert "gradient reduce_scatter 98,304 → 98,304; dp gather" in said
    assert "tp gather 49,152 → 49,152; phase 6 0 → 4; parameter" in said
    assert capsys.readouterr().out.count("[rank 3] entries: 128\n") == 2


@pytest.mark.exhaustive  # 20 s; the text of lesson 16 quotes these losses
@pytest.mark.parametrize("seed", [0, 1])
def test_the_finales_adamw_is_near_the_best_of_five_rates(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {}
    for rate in (0.003, 0.006, training.ADAMW_LR, 0.024, 0.048):
        monkeypatch.setattr(training, "ADAMW_LR", rate)
        ends[rate] = training.losses_of_adamw(12, 4, seed)[-1]
    assert ends[0.012] <= 1.025 * min(ends.values())
    assert ends[0.003] > 1.15 * ends[0.012]
    assert seed or (ends[0.003], ends[0.012]) == pytest.approx((4.04, 3.40), abs=0.02)


def test_the_program_says_in_which_folder_it_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    command = finale.command(2, 0)
    monkeypatch.setattr(sys, "argv", command[command.index("-m") + 1 :])
    with pytest.raises(
        SystemExit, match=r"There is no my_muon_complete\.py in .* the folder of your my_muon\.py"
    ):
        training.main()


def test_a_file_that_fails_as_it_trains_is_said_and_the_reference_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = blocks.with_block("", KeptBlock("06", "groups", WRONG_GROUPS))
    (tmp_path / keep.FILE).write_text(text, encoding="utf-8")
    end = finale.train_it(2, 0, tmp_path)
    assert end.file == blocks.REFERENCE
    assert re.search("^my_muon.py failed: rank . of 4 ", capsys.readouterr().out, re.MULTILINE)
    assert finale.say_bits(end).count("the bits of torch.optim.Muon") == 3


def test_a_lesson_gets_the_readers_functions_and_a_line(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    mine = keep.so_far("06", without(built, ["newton_schulz"], tmp_path))
    assert capsys.readouterr().out == (
        f"With my_muon.py so far, {keep.SO_FAR['06']}\n"
        "my_muon.py: 4 of its 5 functions are yours (37 of the file's 412 lines); "
        "from the reference: newton_schulz.\n"
    )
    keep.so_far("06", tmp_path / "empty")
    assert capsys.readouterr().out.endswith("\nmy_muon.py: all 5 functions are from the reference.\n")
    assert mine.groups(2, 2) == ([[0, 2], [1, 3]], [[0, 1], [2, 3]])


def test_every_lesson_that_shows_the_file_says_what_it_can_do_and_what_it_cannot_yet() -> None:
    texts = {path.stem[:2]: path.read_text(encoding="utf-8") for path in sources()}
    assert [number for number, text in texts.items() if f'my_muon.so_far("{number}")' in text] == [
        *keep.SO_FAR
    ]
    assert all(re.fullmatch(r"[a-z][^.]+\. But [^.]+\.", said) for said in keep.SO_FAR.values())


def scored(number: float, par: float, place: Path, name: str = "my_step") -> str:
    """What a checker says of a right answer, written in a cell, with that score."""
    answer = cell(f"def {name}():\n    return {number}\n", place)[name]
    return Exercise(lambda answer: None, par=Par("lines", par, lambda answer: answer())).check(answer).message


def row_of(name: str, table: str) -> list[str]:
    [row] = (line.split() for line in table.splitlines() if name in line.split())
    return row


def test_the_best_score_is_kept_in_the_file_and_another_grids_is_measured_by_its_own_par(
    reader: Path,
) -> None:
    place = reader / "cell.py"
    assert row_of("my_step", scores.say_scores())[2:5] == ["no", "score", "yet"]
    for number, par, best in ((18, 12, 18), (13, 12, 13), (14, 12, 13), (27, 24, 13), (25, 24, 25)):
        assert scored(number, par, place) == f"Yours takes {number} lines; par is {par}."
        assert row_of("my_step", scores.say_scores())[2] == str(best)
    scored(30_000, 196_608, place, "fewer_bytes")
    scored(0, 0, place, "surviving_update")  # on one rank, nothing has to be sent
    scored(1, 2, place, "a_helper")
    lines = (reader / keep.FILE).read_text(encoding="utf-8").splitlines()
    assert lines[:2] == [
        "# score in lesson 09: my_step 25, par 24",
        "# score in lesson 16: fewer_bytes 30000, par 196608",
    ]
    assert "\n".join(lines[2:]) + "\n" == blocks.HEAD
    assert row_of("fewer_bytes", scores.say_scores())[2:4] == ["30,000", "196,608"]


def test_scores_stand_above_the_answers_and_neither_disturbs_the_other(reader: Path) -> None:
    answer = cell(solutions("05"), reader / "cell.py")["local_range"]
    keep.keep({"local_range": answer})
    before = (reader / keep.FILE).read_text(encoding="utf-8")
    scored(12, 12, reader / "other.py")
    after = (reader / keep.FILE).read_text(encoding="utf-8")
    assert after == f"# score in lesson 09: my_step 12, par 12\n{before}"
    keep.keep({"local_range": answer})
    assert (reader / keep.FILE).read_text(encoding="utf-8") == after
    assert list(keep.read_mine().blocks) == ["local_range"]
    compile(after, keep.FILE, "exec")


def test_a_file_that_an_editor_saved_with_a_mark_or_without_its_last_newline(reader: Path) -> None:
    path = reader / keep.FILE
    path.write_text("# mine", encoding="utf-8-sig")
    scored(13, 12, reader / "cell.py")
    assert path.read_text(encoding="utf-8") == "# score in lesson 09: my_step 13, par 12\n# mine"
    path.write_text("# score in lesson 09: my_step 13, par 12", encoding="utf-8")
    scored(12, 12, reader / "cell.py")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "score" in line] == ["# score in lesson 09: my_step 12, par 12"]
    assert "no score. Delete" not in scores.say_scores()


def test_a_damaged_score_and_a_file_that_is_no_text_are_said_and_left_alone(reader: Path) -> None:
    path = reader / keep.FILE
    damaged = "# score in lesson 04: gathered_share few, par 36864\n# mine\n"
    path.write_text(damaged, encoding="utf-8")
    scored(12, 12, reader / "cell.py")
    assert path.read_text(encoding="utf-8").endswith(damaged)
    said = scores.say_scores()
    assert row_of("my_step", said)[2] == "12"
    assert (
        said.count("a line that is no score. Delete it, or correct it: # score in lesson 04: gathered") == 1
    )
    path.write_bytes(b"\xff\xfe\x00")
    problem = "my_muon.py is not a text in UTF-8; move it away."
    assert scored(12, 12, reader / "cell.py").endswith(f"This score is not in my_muon.py: {problem}")
    assert problem.removeprefix("my_muon.py is") in scores.say_scores()
    assert scores.say_scores().count("no score yet") == len(scores.PARS)
    assert path.read_bytes() == b"\xff\xfe\x00"


def test_the_table_of_scores_has_every_par_of_the_course_and_the_checkers_number() -> None:
    lesson: Any = {no: import_module(f"muon_tutorial.learn.{series.lesson(no).package}") for no in EXERCISES}
    exercises = {
        "step": lesson["02"].write_step(),
        "ring_reduce_scatter": lesson["03"].check_reduce_scatter(4),
        "gathered_share": lesson["04"].check_gather(4),
        "shard_qkv": lesson["07"].qkv_exercise(),
        "surviving_update": lesson["08"].check_survival(2, 4),
        "my_step": lesson["09"].step_exercise(2, 2, 0),
        "redistribute": lesson["11"].all_exercises(2, 2, 0, "gloo")[-1],
        "assign_by_work": lesson["11"].check_shared_work(lesson["11"].mixed_model(2, 2)),
        "fewer_bytes": finale.check_fewer(finale.Finale(blocks.REFERENCE, (BEFORE,), ()), 2, 0),
    }
    pars = [(name, each.par.number, each.par.unit) for name, each in exercises.items()]
    assert pars == [(name, par, unit) for name, (_, par, unit) in scores.PARS.items()]
    headers = [
        (path.stem[:2], float(number))
        for path in sources()
        for number in re.findall(r"^# \*.* · par (\d+) ", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert headers == [(number, round(par)) for number, par, _ in scores.PARS.values()]
