"""The command line: its output, the files it leaves, and its refusals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from muon_tutorial import cli
from muon_tutorial.checkpoint.verify_files import damage_of
from muon_tutorial.training.run_folder import RunFolder
from muon_tutorial.training.settings import TrainSettings
from muon_tutorial.training.stopping import REPEAT

from .exhaustive import left_out
from .launching.launch_traces import heed_interrupts, still_running

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "4"]
TINY, LONG = [*MODEL, "--steps", "3"], [*MODEL, "--steps", "100000"]
PATIENCE = 60.0
SAVED = r"; saved after step \d+ in {0}/checkpoints; go on with: train --resume {0}"


def train(*options: str) -> int:
    return cli.main(["train", *TINY, *options])


@pytest.mark.parametrize("grid", ["2 2", "1 1", left_out("4 1"), left_out("4 2")])
def test_training_lowers_the_loss_as_one_process_does_passes_its_check_and_fills_its_folder(
    grid: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (dp, tp), folder = grid.split(), tmp_path / "deep" / "run"
    assert train("--dp", dp, "--tp", tp, "--compare", "--json", "--out", str(folder)) == 0
    result = json.loads(capsys.readouterr().out)
    beside = result["beside_one_process"]
    assert beside["settings"]["dp"] == beside["settings"]["tp"] == 1
    assert beside["largest_gap"] < 0.01
    assert result["loss_after"] < result["loss_before"]
    assert result["check"]["passed"]
    assert result["check"]["differing"] == 0
    assert len(result["state_bytes"]) == int(dp) * int(tp)
    names = sorted(path.name for path in folder.iterdir())
    logs = ["metrics.jsonl", "metrics_one_process.jsonl"]
    assert names == ["loss.png", *logs, "result.json", "settings.json"]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert json.loads((folder / "settings.json").read_text())["strategy"] == "zero1"
    assert json.loads((folder / "result.json").read_text())["check"]["passed"]


def test_the_table_names_loss_state_bytes_and_verdict_with_the_signs_that_a_terminal_has(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert train("--dp", "2", "--tp", "1", "--out", str(tmp_path / "run")) == 0
    words = ["held-out loss", "step time", "optimizer state", "passed at step 3", "gradient reduce_scatter"]
    words += ["this is Muon: 6 of 6 parameters", "Newton?Schulz calls, as planned (rank 0: "]
    said = " ".join(shown.getvalue().decode("ascii").replace("|", " ").split())
    assert [word for word in words if word not in said] == []
    assert "step 3/3" in capsys.readouterr().err


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 10_000)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "settings.json").write_text("{}")
    (tmp_path / "file").touch()
    return tmp_path


without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--dp 3", "--dp 3 cuts --batch 4 unevenly"),
        ("--strategy telepathy", "unknown strategy 'telepathy'"),
        ("--text {}/missing.txt", "No such file"),
        ("--text {}/empty.txt", "is empty"),
        ("--text {}/binary.txt", "is not UTF-8 text"),
        ("--text {}/latin.txt", "is not UTF-8 text"),
        ("--text {}/short.txt", "has 9 bytes"),
        ("--text {}", "not a regular file"),
        ("--tp 8", "--tp 8 is larger than --heads 2"),
        ("--tp 3 --heads 4 --width 16", "--tp 3 cuts --heads 4 unevenly"),
        ("--heads 3", "--width 16 must split into --heads 3 of equal and even width; try --width 12"),
        ("--width 18", "--width 18 must split into --heads 2 of equal and even width; try --width 16"),
        ("--out {}/file", "there is a file with this name"),
        ("--out {}/file/run", "there is a file with this name"),
        ("--out {}/used", "already in use"),
        ("--out /proc/run", "cannot write the run folder /proc/run: "),  # no user can write there
        ("--steps 0", "at least 1"),
        ("--dp many", "'many'"),
        ("--lr nan", "positive"),
        ("--lr inf", "positive"),
        ("--timeout 0", "positive"),
        ("--timeout nan", "positive"),
        ("--timeout 1e12", "1,000,000,000 at most"),
        ("--seed -1", "--seed"),
        ("--backend smoke", "invalid choice"),
        ("--what", "unrecognized arguments"),
        ("--on-signal KILL=save", "--on-signal takes NAME=ACT"),
        ("--on-signal TERM=later", "--on-signal takes NAME=ACT"),
        ("--grace 0", "--grace is a positive number of seconds"),
        ("--max-seconds nan", "--max-seconds is a positive number of seconds"),
        pytest.param("--backend nccl", "needs one GPU for each process", marks=without_a_gpu),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: str, says: str, texts: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(texts)
    before = sorted(texts.rglob("*"))
    assert train(*options.format(texts).split()) == cli.BAD_INPUT
    assert_one_line(capsys, says)
    assert sorted(texts.rglob("*")) == before


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert train("--dp", "2", "--tp", "1", "--lr", "1e30", "--out", str(tmp_path / "run")) == cli.FAILED
    assert_one_line(capsys, "try a smaller --lr")


def test_a_grid_that_does_not_fit_torchruns_processes_is_refused_once(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = ["scripts/distributed_muon.py", *TINY, "--dp", "3", "--tp", "1", "--out", str(tmp_path / "run")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, *job], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines == ["error: --dp 3 × --tp 1 needs 3 processes; torchrun started 2"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sent", "whom", "code", "says"),
    [
        left_out(signal.SIGINT, "the run", cli.INTERRUPTED, "interrupted" + SAVED),
        (signal.SIGTERM, "the run", 143, "terminated" + SAVED),
        left_out(signal.SIGHUP, "the run", 129, "ended by SIGHUP" + SAVED),
        left_out(signal.SIGXCPU, "the run", 152, "ended by SIGXCPU" + SAVED),
        left_out(signal.SIGTERM, "its group", 143, "terminated" + SAVED),
        left_out(signal.SIGTERM, "every process", 143, "terminated" + SAVED),
        (signal.SIGTERM, "one rank", 143, "terminated" + SAVED),
        (signal.SIGKILL, "one rank", cli.FAILED, r"error: rank .*SIGKILL.*"),
    ],
)
def test_a_stopped_run_saves_says_so_in_one_line_and_leaves_no_process(
    sent: signal.Signals, whom: str, code: int, says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with running(folder) as (process, ranks):
        if whom == "its group":
            os.killpg(process.pid, sent)
        reached = {"the run": [process], "one rank": ranks[-1:], "every process": [process, *ranks]}
        for each in reached.get(whom, []):
            each.send_signal(sent)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (code, "")
        *before, line = spoken(err)
        assert before == ([cli.STOPPING] if whom != "one rank" else [])
        assert re.fullmatch(says.format(re.escape(str(folder))), line)
        if code == cli.FAILED:
            assert "SIGKILL" in (folder / "error.txt").read_text()
        else:
            newest = (folder / "checkpoints" / "latest").read_text().split()[0]
            assert int(newest.partition("-")[2]) == int(line.partition("after step ")[2].split()[0])
            assert damage_of(folder / "checkpoints" / newest) is None
        assert not still_running([rank.pid for rank in ranks], PATIENCE)


@pytest.mark.parametrize(
    ("sent", "options", "code", "says"),
    [
        (signal.SIGINT, [], cli.INTERRUPTED, "interrupted; the steps so far are in {}"),
        left_out(signal.SIGTERM, [], 143, "terminated; the steps so far are in {}"),
        (None, ["--grace", "0.5"], 143, "not saved within 0.5 s (--grace); older checkpoints are intact"),
        (signal.SIGUSR2, ["--on-signal", "USR2=end"], 140, "ended by SIGUSR2; the steps so far are in {}"),
    ],
)
def test_a_run_saves_and_goes_on_and_once_it_cannot_save_ends_when_asked_again_or_its_grace_is_over(
    sent: signal.Signals | None, options: list[str], code: int, says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with running(folder, *options) as (process, ranks):
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: (folder / "checkpoints" / "latest").exists())
        seen = len((folder / "metrics.jsonl").read_text())
        wait_until(lambda: len((folder / "metrics.jsonl").read_text()) > seen)
        assert not (folder / "save").exists()
        ranks[-1].suspend()  # no step can end while a rank is stopped
        process.send_signal(sent or signal.SIGTERM)
        wait_until(lambda: (folder / "stop").exists() or process.poll() is not None)
        if sent in (signal.SIGINT, signal.SIGTERM):
            time.sleep(1.2 * REPEAT)  # a SIGTERM that comes sooner counts as the same request
            process.send_signal(sent)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == code
        stopping = [] if sent == signal.SIGUSR2 else [cli.STOPPING]
        assert spoken(err) == [*stopping, says.format(folder)]
        assert (folder / "stop").exists() == (sent is None)  # if it stays, the next run removes it
        (older,) = (folder / "checkpoints").glob("step-*")
        assert damage_of(older) is None
        assert not still_running([rank.pid for rank in ranks], PATIENCE)


def test_a_run_stops_when_its_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["--dp", "1", "--tp", "1", "--max-seconds", "0.01", "--out", str(tmp_path / "run")]
    assert cli.main(["train", *LONG, *options]) == 0
    says = ("the --max-seconds have passed" + SAVED).format(re.escape(str(tmp_path / "run")))
    assert re.fullmatch(says, spoken(capsys.readouterr().err)[-1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--resume", "{0}/none"], "{0}/none is not a run folder"),
        (["--resume", "{0}/run"], "{0}/run holds no complete checkpoint"),
        (["--resume", "{0}/run", "--out", "{0}/other"], "leave out --out"),
        (["--resume", "{0}/run", "--lr", "0.5"], "--lr 0.5 differs from the run's 0.02"),
        (["--resume", "{0}/run", "--dp", "3"], "--dp 3 cuts --batch 4 unevenly"),
        (["--save-every", "0"], "--save-every must be at least 1"),
    ],
)
def test_a_run_that_cannot_go_on_is_refused(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    RunFolder.create(tmp_path / "run", asdict(TrainSettings(batch=4)))
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["train", *(option.format(tmp_path) for option in options)]) == cli.BAD_INPUT
    assert_one_line(capsys, says.format(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupted_comparison_keeps_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muon_tutorial.training.job.run_beside", Mock(side_effect=KeyboardInterrupt))
    assert train("--dp", "1", "--tp", "1", "--compare", "--out", str(tmp_path / "run")) == cli.INTERRUPTED
    assert json.loads((tmp_path / "run" / "result.json").read_text())["check"]["passed"]
    assert (tmp_path / "run" / "loss.png").exists()


LAST_MOMENT = """
import ctypes, sys
from muon_tutorial.launching.interrupts import ignore_interrupts_at_exit
libc = ctypes.CDLL(None)
libc.on_exit(getattr(libc, "raise"), None)  # when Python is gone: raise(its exit code), and 2 is SIGINT
if {ignore}:
    ignore_interrupts_at_exit()
sys.exit(2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="on_exit is Linux'")
@pytest.mark.parametrize(("ignore", "code"), [(True, 2), (False, -signal.SIGINT)])
def test_an_interrupt_after_the_last_moment_changes_nothing(ignore: bool, code: int) -> None:
    command = [sys.executable, "-c", LAST_MOMENT.format(ignore=ignore)]
    ended = subprocess.run(command, cwd=ROOT, preexec_fn=heed_interrupts, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


@pytest.mark.parametrize("started", [["-m", "muon_tutorial", "train"], ["scripts/distributed_muon.py"]])
def test_an_interrupt_before_the_imports_are_done_is_one_line(started: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", *started]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=heed_interrupts, **pipes) as process:
        assert process.stderr is not None
        while " torch." not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, out, said) == (cli.INTERRUPTED, "", ["interrupted"])


@pytest.mark.parametrize(
    ("shell", "code", "says"),
    [
        (
            "exec {} train --json >&-",
            cli.BAD_INPUT,
            "error: --json prints to standard output, which is closed",
        ),
        ("mkdir gone; cd gone; rmdir ../gone; exec {} train", cli.BAD_INPUT, "error: the working directory"),
        # ``launching/test_launch.py`` has this error, too.
        left_out("ulimit -n 16; exec {} train --dp 2 --tp 1", cli.FAILED, "error: 2 ranks need more files"),
    ],
)
def test_a_place_that_cannot_run_is_one_line(shell: str, code: int, says: str, tmp_path: Path) -> None:
    done = in_shell(shell, tmp_path)
    assert done.returncode == code
    (line,) = spoken(done.stderr)
    assert line.startswith(says)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_result_that_cannot_be_printed_is_one_line_and_kept_unchecked(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        options = ["--dp", "1", "--tp", "1", "--no-check", "--json", "--out", str(tmp_path / "run")]
        assert train(*options) == cli.FAILED
    assert_one_line(capsys, "error: No space left on device")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["check"] is None


@pytest.mark.exhaustive  # above, a closed standard output is refused where it is needed
def test_a_run_needs_no_standard_output(tmp_path: Path) -> None:
    done = in_shell(f"exec {{}} train {' '.join(TINY)} --dp 2 --tp 1 --out run >&- <&-", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists()


def in_shell(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a shell command in a folder; braces stand for our command line."""
    return subprocess.run(
        ["bash", "-c", command.format(f"{sys.executable} -m muon_tutorial")],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen, list[psutil.Process]]]:
    """A long run on 2 ranks that has begun to step, and the processes it started."""
    command = [sys.executable, "-m", "muon_tutorial", "train", *LONG, "--dp", "2", "--tp", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command += ["--out", str(folder), *options]
    with subprocess.Popen(
        command, cwd=ROOT, preexec_fn=heed_interrupts, start_new_session=True, **pipes
    ) as process:
        try:
            wait_until(lambda: (folder / "metrics.jsonl").exists() or process.poll() is not None)
            assert process.poll() is None, process.communicate()[1]
            yield process, psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()


def assert_one_line(capsys: pytest.CaptureFixture, says: str) -> None:
    out, err = capsys.readouterr()
    (line,) = spoken(err)
    assert out == ""
    assert line.startswith("error: ")
    assert says in line


def spoken(err: str) -> list[str]:
    """The command's own messages, without progress and without the lines that torch begins with ``[rank``."""
    return [line for line in err.splitlines() if not line.startswith(("training", "[rank"))]


def wait_until(holds) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
