"""Lesson 16: its exercises tell right from wrong, its runs survive, and its pictures show the runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_tutorial import CheckpointManager, launch
from muon_tutorial.learn import my_loop as lesson
from muon_tutorial.learn.exercises.judge import Diagnosis, Exercise
from muon_tutorial.learn.my_loop import exercises, lives, port, tiny_job
from muon_tutorial.learn.my_loop.port import Port, RunJob
from muon_tutorial.learn.my_loop.trials import PortReport

from . import ports
from .answers import assert_wrong, message_of_wrong

JOB = RunJob(6)
LOSSES = {step: 3.9 - step / 10 for step in range(6)}


def some(first: int, last: int) -> dict[int, float]:
    return {step: LOSSES[step] for step in range(first, last)}


def test_the_traps_are_what_torch_does() -> None:
    assert lesson.found_traps() == {"decays_more": "Muon", "stops": "checkpoint keys"}
    assert "by default 0.1 in torch.optim.Muon, 0.01 in AdamW" in lesson.say_traps(0)
    model = tiny_job.TinyModel()
    compiled: Any = torch.compile(model)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(compiled.state_dict())
    torch.optim.Muon([each for each in model.parameters() if each.ndim == 2])  # says nothing


def test_the_lines_that_change_are_known() -> None:
    assert lesson.check_lines().check([2], [11, 4])
    wrong: list[tuple[Any, Any, str]] = [
        ([2, 7], [4, 11], "line 7 stays. On DTensors, clip_grad_norm_ takes the norm of the whole"),
        ([1, 2], [4, 11], "line 1 stays. fully_shard"),
        ([2, 8], [4, 11], "line 8 stays. One optimizer, one step"),
        ([], [4, 11], "for_muon: 0 found, and another line has to change. Hint: Which lines depend"),
        (
            [2],
            [4],
            "to_survive: 1 found, and another line has to change. Hint: Which facts does a new process",
        ),
        ([2], [2, 4, 11], "to_survive: line 2 stays."),
        ([2], [3, 4, 11], "to_survive: line 3 stays. The scheduler's count has"),
        ([2, 3], [4, 11], "for_muon: line 3 stays. MuonWithAdamW is a torch Optimizer"),
        ([2, 12], [4, 11], "line numbers from 1 to 11"),
        ("2", [4, 11], "line numbers"),
        ([2], 4, "line numbers"),
        ([2.0], [4, 11], "line numbers"),
    ]
    for case in wrong:
        assert_wrong(lesson.check_lines(), *case)
    for missing, says in (([4], "Under FSDP2, rank 0 has only a part"), ([11], "After a restart")):
        exercise = lesson.check_lines()
        message_of_wrong(exercise, [2], missing)
        assert_wrong(exercise, [2], missing, says)
    for number in range(1, 12):
        assert ("stays" in lesson.check_lines().check([2, number], [4, 11]).message) == (number != 2)


def said_of(report: PortReport) -> str:
    """The message about a port, including hints; empty if it is right."""
    found = exercises.explain_port(report)
    assert found is None or found.hints
    return " ".join((found.what, *found.hints)) if found else ""


def test_each_wrong_port_is_told_what_is_wrong_with_it() -> None:
    pairs = [(port.prepare, port.update), (ports.stub, port.update), (port.prepare, ports.stub)]
    pairs += [(prepare, port.update) for prepare, _ in ports.PREPARED]
    pairs += [(port.prepare, update) for update, _ in ports.UPDATED]
    right, *rest = launch(ports.try_all, 4, args=((2, 2), pairs), output="quiet")[0]
    assert said_of(right) == ""
    assert [report.is_open for report in rest[:2]] == [True, True]
    for report, (_, says) in zip(rest[2:], [*ports.PREPARED, *ports.UPDATED], strict=True):
        assert says in said_of(report)


def test_the_port_is_checked_on_real_ranks_and_a_stub_is_open() -> None:
    assert lesson.check_port(2, 1, 0).check(port.prepare, port.update)
    assert_wrong(lesson.check_port(2, 1, 0), 5, port.update, "prepare must be a function")
    exercise = lesson.check_port(2, 1, 0)
    first = message_of_wrong(exercise, ports.made_too_early, port.update)
    assert first.endswith("Hint: Which of your two lines comes first?")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, one of which has been killed."""
    folder = tmp_path_factory.mktemp("killed")
    assert lives.start(folder, (2, 1), replace(JOB, victim=1), Port(), False, "gloo", lives.PATIENCE)
    lives.keep_copy(folder)
    return folder


def test_each_wrong_way_of_going_on_is_told_what_is_wrong_with_it(killed: Path, tmp_path: Path) -> None:
    loads = [port.load, *(load for load, _ in ports.LOADED)]
    folders = [tmp_path / str(number) for number in range(len(loads))]
    for folder in folders:
        shutil.copytree(killed, folder)
    launch(ports.resume_all, 2, args=((1, 2), folders, JOB, loads), output="quiet")
    right, *wrong = [exercises.explain_life(lives.read(folder, JOB)) for folder in folders]
    assert right is None
    for found, (_, says) in zip(wrong, ports.LOADED, strict=True):
        assert isinstance(found, Diagnosis)
        assert says in found.what
        assert found.hints


def test_ranks_that_do_not_save_together_are_told_so() -> None:
    exercise = lesson.check_survival(2, 1, JOB, lesson.check_port(2, 1, 0), timeout=4.0)
    assert_wrong(exercise, ports.on_rank_0_only, port.load, "some of them never called it")
    assert_wrong(exercise, ports.saves_the_scheduler_itself, port.load, "LambdaLR, which could run code when")
    assert_wrong(exercise, ports.torch_save, port.load, "there was no checkpoint of step 2")
    assert_wrong(exercise, port.save, ports.nothing_asked, "Hint: Then manager.latest_step()")
    assert_wrong(exercise, port.save, ports.no_step_returned, "load returned None; the loop needs the next")


def test_a_life_can_be_read_from_what_a_killed_run_left(killed: Path) -> None:
    life = lives.read(killed, JOB)
    [attempt] = life.attempts
    assert (attempt.grid, attempt.begin, attempt.end) == ((2, 1), 0, 3)
    assert (attempt.saved, attempt.killed) == ((2,), (1, 3))
    assert len(list(life.checkpoints.glob("*/*.distcp"))) == 2
    assert CheckpointManager(life.checkpoints).latest_step() == 2


def test_what_is_the_same_to_the_bit_is_what_the_lesson_says() -> None:
    grid = 3, 1
    life, others = lives.life_of(*grid, JOB, Port())
    assert life.last.grid == port.other_grid(*grid) != grid
    assert lives.ends_alike(others)
    assert others.same_grid.last.begin == 2
    bits = lives.compare_bits(life, others)
    assert bits.same == ["load", "step"]
    assert bits.rows[-1].furthest < 1e-2
    ends = [life.last.losses[5], others.undisturbed.last.losses[5]]
    assert ends[0] == pytest.approx(ends[1], abs=1e-2)
    assert "run, the end of the run: the same bits in" in lesson.draw_bits(bits).alt


def test_one_process_runs_the_same_four_functions_without_any_rank(tmp_path: Path) -> None:
    ends = []
    for stops in ([4], [2, 4]):
        manager = CheckpointManager(tmp_path / str(stops))
        for stop in stops:
            model = tiny_job.build(0)
            optimizer = port.prepare(model, lambda model: None)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(port.factor_of, steps=4))
            for step in range(port.load(manager, model, optimizer, schedule), stop):
                symbols, following = tiny_job.batch_of(step, 0)
                torch.nn.functional.cross_entropy(model(symbols), following).backward()
                port.update(model, optimizer, schedule)
            port.save(manager, stop, model, optimizer, schedule)
        ends.append(lives.opened(manager.folder, 4))
    assert lives.same_bits(*ends)


def test_a_batch_is_the_same_however_many_places_share_it() -> None:
    whole = tiny_job.batch_of(3, 0)
    for places in (2, 3, 4, 6):
        parts = [tiny_job.batch_of(3, 0, place, places) for place in range(places)]
        for number, tensor in enumerate(whole):
            assert torch.equal(torch.cat([part[number] for part in parts]), tensor)
            assert len({len(part[number]) for part in parts}) == 1
    assert not torch.equal(whole[0], tiny_job.batch_of(4, 0)[0])
    assert not torch.equal(whole[0], tiny_job.batch_of(3, 1)[0])


@pytest.mark.parametrize("steps", [1, 6, 7, 12, 30])
def test_a_kill_comes_between_two_checkpoints(steps: int) -> None:
    job = RunJob(steps)
    assert job.every < job.fatal < 2 * job.every <= job.steps


def mine(model: Any, shard: Any) -> Any:
    """Mine."""
    return port.prepare(model, shard)


def test_what_has_not_passed_is_taken_from_the_reference_and_said(capsys: pytest.CaptureFixture) -> None:
    ported, survived = Exercise(lambda *_: None), Exercise(lambda *_: None)
    assert exercises.finished_port(ported, survived) == Port()
    assert "prepare and update or for save and load" in capsys.readouterr().out
    ported.check(mine, port.update)
    assert exercises.finished_port(ported, survived).prepare is mine
    assert "for save and load" in capsys.readouterr().out
    survived.check(port.save, ports.nothing_loaded)
    assert exercises.finished_port(ported, survived).load is ports.nothing_loaded
    assert capsys.readouterr().out == ""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(100))

    def new_folder() -> Path:
        folder = tmp_path / f"run-{next(numbers)}"
        folder.mkdir()
        return folder

    monkeypatch.setattr(lives, "new_folder", new_folder)
