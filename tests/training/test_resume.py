"""A run that saved can be resumed on any grid; on its own grid, it ends with the same bits."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from muon_tutorial import cli
from muon_tutorial.errors import RankFailedError, RunFolderError, UsageError
from muon_tutorial.launching.launch import launch
from muon_tutorial.training import resume, stopping
from muon_tutorial.training.checkpoints import Saving, StoppedRun
from muon_tutorial.training.job import _earlier_records
from muon_tutorial.training.loop import train_rank
from muon_tutorial.training.records import RunResult, StepRecord
from muon_tutorial.training.run_folder import RunFolder
from muon_tutorial.training.settings import TrainSettings

SETTINGS = TrainSettings(dp=2, tp=1, layers=1, width=16, heads=2, context=16, batch=4, steps=5)

TINY = ("layers", "width", "heads", "context", "batch", "steps")


def run(settings: TrainSettings, saving: Saving) -> list[RunResult | StoppedRun]:
    return launch(train_rank, settings.world_size, args=(settings, lambda record: None, saving))


def losses(result: RunResult | StoppedRun) -> list[float]:
    assert isinstance(result, RunResult)
    return [*(record.loss for record in result.records), result.loss_before, result.loss_after]


def test_a_run_goes_on_from_where_it_saved(tmp_path: Path) -> None:
    unchecked = replace(SETTINGS, check=False)
    whole = losses(run(unchecked, Saving(tmp_path, every=3, run="one"))[0])
    assert Saving(tmp_path).whole_step(print) == 5
    again = run(SETTINGS, Saving(tmp_path, begin=3))[0]
    assert losses(again) == whole[3:]
    assert isinstance(again, RunResult)
    assert again.check is not None
    assert again.check.passed
    elsewhere = replace(unchecked, dp=1, tp=2, strategy="owner")
    moved = losses(run(elsewhere, Saving(tmp_path, begin=3))[0])
    assert moved == pytest.approx(whole[3:], abs=1e-3)  # sums are in another order
    own, alone = tmp_path / "a.txt", replace(SETTINGS, dp=1)
    own.write_text("another text " * 100)
    with pytest.raises(RankFailedError, match="is not the text that the run began with"):
        run(replace(alone, text=str(own)), Saving(tmp_path, begin=3))
    with pytest.raises(RankFailedError, match="another run saved the checkpoint of step 3"):
        run(alone, Saving(tmp_path, begin=3, run="two"))


def test_a_run_that_is_asked_to_stop_saves_after_the_step_it_is_in(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.stop_file.touch()
    assert run(SETTINGS, saving) == [StoppedRun(1, saving.checkpoints, "SIGINT")] * 2
    assert saving.whole_step(print) == 1


def test_the_newest_run_with_a_checkpoint_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match="no run under runs/ has a checkpoint"):
        resume.find_run(resume.NEWEST)
    for name in ("b", "a"):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "runs" / name / "checkpoints" / "latest").touch()
    (tmp_path / "runs" / "c").mkdir()
    assert resume.find_run(resume.NEWEST) == Path("runs/a")
    assert resume.find_run(Path("runs/c")) == Path("runs/c")


def test_a_restarted_run_is_found_by_its_jobs_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, names in (("a", ["one"]), ("b", ["two"]), ("c", None)):
        RunFolder.create(Path("runs") / name, {**asdict(SETTINGS), resume.JOB: names})
    (Path("runs") / "c" / "settings.json").write_text("no JSON")
    assert resume.find_restarted(lambda names: names == ["one"]) == Path("runs/a")
    assert resume.find_restarted(lambda names: names == ["three"]) is None


def test_a_run_goes_on_with_its_own_settings_but_for_the_grid() -> None:
    said = {**asdict(replace(SETTINGS, lr=0.5)), resume.SAVE_EVERY: 7}
    options = {**asdict(TrainSettings()), "dp": 1, "lr": 0.1}
    own = resume.resumed_settings(said, options, {"dp"})
    assert own == replace(SETTINGS, lr=0.5, dp=1)


def test_records_of_steps_that_will_be_taken_again_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    records = [StepRecord(step, 5.0 - step, 0.1, 1.0, 0.5) for step in range(4)]
    for record in records:
        folder.append("metrics.jsonl", asdict(record))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # cut off by a kill
    said = Console(record=True, width=200)
    assert _earlier_records(folder, Saving(folder.path, begin=3), "metrics.jsonl", said) == records[:3]
    left = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in left] == [0, 1, 2]
    assert _earlier_records(folder, Saving(folder.path), "metrics.jsonl", said) == []
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""
    assert said.export_text() == ""


@pytest.mark.parametrize("damage", ["", "\0\0\0\n", '{"step": 1, "lo\n', "[1]\n", "7\n", '{"step": "x"}\n'])
def test_records_that_a_dead_machine_lost_are_said_and_the_run_goes_on(tmp_path: Path, damage: str) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    records = [StepRecord(step, 5.0 - step, 0.1, 1.0, 0.5) for step in (0, 2)]
    folder.append("metrics.jsonl", asdict(records[0]))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(damage)
    folder.append("metrics.jsonl", asdict(records[1]))
    said = Console(record=True, width=200)
    assert _earlier_records(folder, Saving(folder.path, begin=4), "metrics.jsonl", said) == records
    assert said.export_text() == (
        "metrics.jsonl has the records of only 2 of the 4 steps before the checkpoint; "
        "the others are lost, so the picture lacks them\n"
    )
    assert folder.records("metrics.jsonl") == [asdict(record) for record in records]
    assert not stopping._has_begun(Saving(folder.path, begin=4))
    folder.append("metrics.jsonl", {"step": 4})
    assert stopping._has_begun(Saving(folder.path, begin=4))


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", "8"), ("lr", None), ("dp", 2.0), ("check", 1), ("layers", True), ("text", 3)],
)
def test_a_setting_of_another_type_is_one_clear_line(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"settings.json is damaged: {name} is "):
        resume.resumed_settings({**asdict(SETTINGS), name: value}, {}, ())
    assert resume.resumed_settings({**asdict(SETTINGS), "timeout": 5}, {}, ()).timeout == 5


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> argparse.Namespace:
    """The options of ranks that torchrun has restarted on two machines, with a run folder given."""
    logs = "/tmp/torchelastic_1/none_own/attempt_1/0/error.json"
    for name, value in {"RUN_ID": "7", "RESTART_COUNT": "1", "ERROR_FILE": logs}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    own = {"out": tmp_path / "run", "given": set(), "agents": ["7_a", "7_b"], "acts": {}}
    unset = dict.fromkeys(("resume", "save_every", "max_seconds"))
    return argparse.Namespace(**asdict(SETTINGS), **own, **unset, hold=lambda held: None)


@pytest.mark.parametrize("names", [None, "7_a", [], ["none", "7_c"], [["7_a"], 7]])
def test_ranks_leave_another_jobs_folder_alone(restarted: argparse.Namespace, names: object) -> None:
    RunFolder.create(restarted.out, {**asdict(SETTINGS), resume.JOB: names})
    with pytest.raises(RunFolderError, match="already in use"):
        cli._place_run_under_torchrun(restarted, 2)


def test_a_new_job_leaves_the_old_run(restarted: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only restarted ranks, whose agents may all be new, may recognize their run by the job's id alone."""
    own = RunFolder.create(restarted.out, {**asdict(SETTINGS), resume.JOB: ["7", "7_c"]})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(RunFolderError, match="already in use"):
        cli._place_run_under_torchrun(restarted, 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert cli._place_run_under_torchrun(restarted, 2)[1] == own


def test_one_kept_agent_names_the_job(restarted: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has one node, then two, then only the second one, then two. No agent has counted a restart."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    own = RunFolder.create(restarted.out, {**asdict(SETTINGS), resume.JOB: ["none_a"]})
    for restarted.agents in (["none_a", "none_b"], ["none_b"], ["none_c", "none_b"]):
        restarted.dp, ranks = None, len(restarted.agents)
        settings, folder, _ = cli._place_run_under_torchrun(restarted, ranks)
        assert (settings.dp, folder) == (ranks, own)
    assert RunFolder.reopen(own.path)[1][resume.JOB] == ["none_a", "none_b", "none_c"]
    restarted.agents = ["none_d"]
    with pytest.raises(RunFolderError, match="already in use"):
        cli._place_run_under_torchrun(restarted, 1)


def test_restarted_ranks_end_the_run(restarted: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RunFolder.create(restarted.out, {**asdict(SETTINGS), resume.JOB: ["7_a"]})
    monkeypatch.setattr(Saving, "whole_step", lambda saving, say: SETTINGS.steps)
    assert cli._place_run_under_torchrun(restarted, 2) == (SETTINGS, own, Saving(own.path, begin=5))
    own.write("result.json", {})
    with pytest.raises(cli.CompleteRunError, match="is complete"):
        cli._place_run_under_torchrun(restarted, 2)


def test_restarted_ranks_stay_with_the_run_that_they_resumed(
    restarted: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--resume`` without a folder takes the newest run, but another one may have saved before a restart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Saving, "whole_step", lambda saving, say: 3)
    restarted.out = None
    for name, when in (("a", 2), ("b", 1)):
        latest = RunFolder.create(Path("runs") / name, asdict(SETTINGS)).path / "checkpoints" / "latest"
        latest.parent.mkdir()
        latest.touch()
        os.utime(latest, (when, when))
    for attempt in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        restarted.resume, restarted.given = resume.NEWEST, set()
        assert cli._place_run_under_torchrun(restarted, 2)[1].path == Path("runs/a")
        (tmp_path / "runs" / "b" / "checkpoints" / "latest").touch()


def test_ranks_that_torchrun_cannot_name_begin_anew_and_say_so(
    restarted: argparse.Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    restarted.out, restarted.agents = None, ["none", "none"]
    _, folder, saving = cli._place_run_under_torchrun(restarted, 2)
    assert (saving.begin, folder.path.parent) == (None, Path("runs"))
    assert capsys.readouterr().err.splitlines() == [cli.NOT_FOUND_AGAIN]


def test_only_ranks_here_need_a_gpu(restarted: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """``join_torchrun`` has found the GPU of this rank."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    restarted.backend = "nccl"
    assert cli._place_run_under_torchrun(restarted, 2)[0].backend == "nccl"


@pytest.mark.parametrize("every", ["x", 0, -3, 2.0, True])
def test_a_damaged_number_of_steps_to_save_after_is_one_clear_line(tmp_path: Path, every: object) -> None:
    with pytest.raises(UsageError, match=r"settings\.json is damaged: save_every is "):
        resume.saving_of(RunFolder(tmp_path), {resume.SAVE_EVERY: every}, None, print)
    assert resume.saving_of(RunFolder(tmp_path), {}, None, print) == Saving(tmp_path)


def test_the_given_text_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = asdict(replace(SETTINGS, text="a.txt"))
    options = {**asdict(SETTINGS), "text": str(tmp_path / "a.txt")}
    assert resume.resumed_settings(said, options, {"text"}).text == "a.txt"
    with pytest.raises(UsageError, match="differs from the run's"):
        resume.resumed_settings(said, {**options, "text": str(tmp_path / "b.txt")}, {"text"})


def test_an_earlier_request_to_stop_is_forgotten(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.stop_file.touch()
    with stopping.heeding_signals(saving, None, 1.0, stopping.unwind):
        assert not saving.stop_file.exists()


def test_ranks_of_one_number_on_two_machines_ask_to_stop_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers, ranks on several machines often have the same process id."""
    saving, real = Saving(tmp_path), os.replace

    def slowly(draft: Path, target: Path) -> None:
        monkeypatch.undo()
        stopping._ask_to_stop(saving, signal.SIGTERM)  # the other rank
        real(draft, target)

    monkeypatch.setattr("os.replace", slowly)
    stopping._ask_to_stop(saving, signal.SIGTERM)
    assert os.listdir(tmp_path) == ["stop"]


def test_a_run_goes_on_from_an_older_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = [f"--{name}={value}" for name, value in asdict(SETTINGS).items() if name in TINY]
    folder = tmp_path / "run"
    assert cli.main(["train", *options, "--dp=1", "--tp=1", "--save-every=2", f"--out={folder}"]) == 0
    newest = next((folder / "checkpoints" / "step-00000005").glob("*.distcp"))
    newest.write_bytes(newest.read_bytes()[::-1])
    capsys.readouterr()
    assert cli.main(["train", f"--resume={folder}"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert re.search(r"step-00000005/.* is damaged: .*; renamed to damaged-step-00000005-\w+$", said[0])
    assert said[1] == f"going on after step 4 of 5, in {folder}"
    assert Saving(folder).whole_step(print) == 5


def test_a_run_is_one_jobs_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = RunFolder.create(tmp_path / "run", asdict(SETTINGS))
    with folder.held():
        assert cli.main(["train", f"--resume={folder.path}"]) == cli.BAD_INPUT
        says = rf"error: process {os.getpid()} on .* is training in {folder.path}\n"
        assert re.fullmatch(says, capsys.readouterr().err)
    assert os.listdir(tmp_path) == ["run"]
