"""The command line: parses the arguments, calls one function and prints the result.

An error is printed in one line. The exit code is 0 if the command succeeded or the run reached its time
limit, 1 if a run or its check failed, and 2 if the input was bad. If signal N ended the run, the code is
128 + N (130 after Ctrl-C, 143 after SIGTERM), even if the run has saved.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

from rich.console import Console

from .errors import (
    CheckpointError,
    GridError,
    LaunchError,
    RankFailedError,
    TrainingError,
    TutorialError,
    UsageError,
)
from .launching.interrupts import BAD_INPUT, FAILED, INTERRUPTED, raise_on_interrupt, said_of
from .launching.join_torchrun import (
    TorchrunEnvironment,
    agent_name,
    is_of_this_job,
    join_torchrun,
    joined_by_torchrun,
    leave_torchrun,
    names_of_job,
    restarted_by_torchrun,
)
from .launching.signals import exit_by
from .launching.standard_streams import fill_standard_descriptors, say
from .launching.start_torchrun import run_agent
from .plan.strategies import STRATEGIES
from .timing.commands import add_calibrate, add_plan
from .timing.recipe_command import add_recipes
from .training import job
from .training.checkpoints import RUN, TIME, Saving, StoppedRun
from .training.records import RunResult
from .training.report import describe_verdict, summary_table, traffic_table
from .training.resume import (
    JOB,
    NEWEST,
    RUNS,
    SAVE_EVERY,
    find_restarted,
    find_run,
    resumed_settings,
    saving_of,
)
from .training.run_folder import RESULT, RunFolder, in_use, unused
from .training.settings import Backend, TrainSettings, check_numbers
from .training.stopping import (
    DEFAULT_ACTS,
    GRACE,
    REPEAT,
    EndedBySignal,
    acts_by,
    ending_on_signals,
    exit_code,
    heeding_signals,
)
from .worlds.live import gather_objects

STOPPING = "saving and stopping after this step; the same signal again ends the run at once"
NOT_FOUND_AGAIN = (
    "starting from the beginning: restarted ranks find their run only by torchrun's --rdzv-id, or by --out"
)
DEFAULTS = asdict(TrainSettings())
METAVARS = {int: "N", float: "X", str: "NAME", type(None): "FILE"}
SETTINGS = {
    "the grid and the strategy": {
        "dp": "data-parallel ranks ({}; under torchrun, processes / tp)",
        "tp": "tensor-parallel ranks; must divide the heads ({})",
        "strategy": f"how Muon is distributed: {', '.join(sorted(STRATEGIES))} ({{}})",
        "backend": "gloo (CPU) or nccl (one GPU for each process) ({})",
        "timeout": "seconds a rank waits for the others before it gives up ({})",
    },
    "training": {
        "steps": "optimizer steps ({})",
        "batch": "sequences in the global batch, split over dp ({})",
        "context": "bytes in a sequence ({})",
        "lr": "peak learning rate of Muon and AdamW ({})",
        "seed": "seed of the initial weights and of the batches ({})",
        "text": "train on this UTF-8 file (default: the Python standard library's sources)",
    },
    "the model": {
        "layers": "transformer blocks ({})",
        "width": "width of the residual stream ({})",
        "heads": "attention heads ({})",
    },
}
"""The help text for each field of ``TrainSettings``, by group; ``{}`` stands for the default."""

EPILOG = """\
examples:
  python -m muon_tutorial train                          4 processes: dp=2 × tp=2
  python -m muon_tutorial train --dp 4 --tp 2            8 processes
  python -m muon_tutorial train --dp 1 --tp 1            one process, the same global batches
  python -m muon_tutorial train --text book.txt --compare
  python -m muon_tutorial train --save-every 10          save after every tenth step
  python -m muon_tutorial train --resume                 go on with the newest run that has saved
  torchrun --standalone --nproc-per-node 8 scripts/distributed_muon.py --tp 2 --backend nccl
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UsageError`` with one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class CompleteRunError(Exception):
    """Raised when ranks that torchrun restarted find that their run is already complete."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    try:
        raise_on_interrupt()
        has_output = sys.stdout is not None
        fill_standard_descriptors()
        _print_on_any_terminal()
        words = sys.argv[1:] if arguments is None else arguments
        if words[:1] == ["torchrun"]:
            return run_agent(words[1:])
        options = build_parser().parse_args(words)
        if options.json and not has_output:
            raise UsageError("--json prints to standard output, which is closed")
        if options.command != "train":
            return int(options.run(options))
        options.given, options.agents = _given(words), []
        check_numbers(options)
        options.acts = acts_by(options.on_signal)
        if options.text is not None:  # absolute, because the run may be resumed in another working folder
            options.text = os.path.abspath(options.text)
        with ExitStack() as held:
            options.hold = held.enter_context
            return train_under_torchrun(options) if joined_by_torchrun() else train(options)
    except TutorialError as error:
        return _complain(str(error), _exit_code(error))
    except KeyboardInterrupt:
        return say("interrupted", INTERRUPTED)
    except EndedBySignal as ended:
        return say(said_of(signal.Signals(ended.number).name), 128 + ended.number)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return _complain(f"{error.strerror}: raise the limit with ulimit -n 1024", FAILED)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drop output that is still buffered
        if isinstance(error, BrokenPipeError):
            return _complain("standard output was closed before the result was written", FAILED)
        return _complain(
            f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", FAILED
        )


def train(options: argparse.Namespace) -> int:
    """Run ``train`` in processes that this command starts."""
    settings, folder, saving = _place_run(options, options.dp or DEFAULTS["dp"])
    console = Console(stderr=True, soft_wrap=True)
    with ending_on_signals(options.acts) as end:
        try:
            with heeding_signals(saving, STOPPING, options.grace, end):
                result = job.run_launched(settings, folder, console, saving)
            if isinstance(result, StoppedRun):
                return _say_stopped(result, folder)
            _keep_result(folder, result, None)
            beside = job.run_beside(result, folder, console) if options.compare else None
            if beside is not None:
                _keep_result(folder, result, beside)
            return _show_result(options, folder, result, beside)
        except LaunchError as error:
            return _explain_failure(error, folder)
        except (KeyboardInterrupt, EndedBySignal) as ended:
            name = signal.Signals(ended.number).name if isinstance(ended, EndedBySignal) else "SIGINT"
            return say(f"{said_of(name)}; the steps so far are in {folder.path}", exit_code(name))


def _place_run(options: argparse.Namespace, dp: int) -> tuple[TrainSettings, RunFolder, Saving]:
    """Return the requested run: a new one in a new folder, or one that resumes from its checkpoint."""
    if options.resume is None:
        settings = TrainSettings(**{**{name: getattr(options, name) for name in DEFAULTS}, "dp": dp})
        job.check_inputs(settings)
        run = uuid.uuid4().hex
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.strategy}-dp{settings.dp}-tp{settings.tp}"
        beside = {SAVE_EVERY: options.save_every, RUN: run, JOB: names_of_job(options.agents)}
        folder = RunFolder.create(options.out or unused(RUNS / name), {**asdict(settings), **beside})
        options.hold(folder.held())
        return settings, folder, _asked_of(Saving(folder.path, options.save_every, run=run), options)
    if options.out is not None:
        raise UsageError("--resume goes on in the run's own folder: leave out --out")
    folder, said = RunFolder.reopen(find_run(options.resume))
    settings = resumed_settings(said, vars(options), options.given)
    job.check_inputs(settings)
    saving = _going_on(folder, said, options)
    if saving.begin is None:
        raise UsageError(f"{folder.path} holds no complete checkpoint: start a new run")
    if saving.begin >= settings.steps:
        raise UsageError(f"the run in {folder.path} has taken all of its {settings.steps} steps")
    print(f"going on after step {saving.begin} of {settings.steps}, in {folder.path}", file=sys.stderr)
    return settings, folder, saving


def _going_on(folder: RunFolder, said: dict[str, Any], options: argparse.Namespace) -> Saving:
    """Lock a run's folder for this job, note torchrun's agents there, and return where the run resumes."""
    options.hold(folder.held())
    if options.agents:
        known = said.get(JOB)
        names = names_of_job([*options.agents, *(known if isinstance(known, list) else ())])
        folder.write("settings.json", {**said, JOB: names})
    return _asked_of(
        saving_of(folder, said, options.save_every, lambda line: print(line, file=sys.stderr)), options
    )


def _asked_of(saving: Saving, options: argparse.Namespace) -> Saving:
    """Add the options for signals and the time limit."""
    until = None if options.max_seconds is None else time.monotonic() + options.max_seconds
    return replace(saving, acts=options.acts, until=until)


def train_under_torchrun(options: argparse.Namespace) -> int:
    """Run ``train`` in one of torchrun's processes. Only rank 0 prints."""
    if options.compare:
        raise UsageError("--compare starts processes of its own: leave out torchrun, or --compare")
    seat = join_torchrun(options.backend, options.timeout)
    try:
        settings, folder, saving = _agree_on_run(options, seat)
        with heeding_signals(saving, STOPPING if seat.rank == 0 else None, options.grace, exit_by, REPEAT):
            result = job.run_joined(seat.rank, settings, folder, saving, Console(stderr=True, soft_wrap=True))
        if isinstance(result, StoppedRun):
            return _say_stopped(result, folder) if folder is not None else exit_code(result.reason)
        if folder is None:
            return 0
        _keep_result(folder, result, None)
        return _show_result(options, folder, result, None)
    except CompleteRunError as done:
        return say(str(done), 0) if seat.rank == 0 else 0
    except (UsageError, TrainingError, CheckpointError) as error:  # every rank raised it
        return _complain(str(error), _exit_code(error)) if seat.rank == 0 else _exit_code(error)
    except TutorialError as error:  # perhaps only this rank raised the error
        return _complain(f"rank {seat.rank}: {error}", _exit_code(error))
    except RuntimeError as error:
        if not seat.report_lost_rank(error):
            raise
        return FAILED
    finally:
        leave_torchrun()


def _agree_on_run(
    options: argparse.Namespace, seat: TorchrunEnvironment
) -> tuple[TrainSettings, RunFolder | None, Saving]:
    """Let rank 0 find the run that the options name, and tell the other ranks. Only rank 0 gets the folder.

    Raises:
        TutorialError: rank 0 found an error. All ranks raise it.
        CompleteRunError: the run was complete before torchrun restarted these ranks.
    """
    mine: Any = None
    options.agents = gather_objects(agent_name())
    if seat.rank == 0:
        try:
            mine = _place_run_under_torchrun(options, seat.world_size)
        except (TutorialError, CompleteRunError) as error:
            mine = error
    found = gather_objects(mine)[0]
    if isinstance(found, Exception):
        raise found
    settings, folder, saving = found
    return settings, folder if seat.rank == 0 else None, saving


def _place_run_under_torchrun(
    options: argparse.Namespace, started: int
) -> tuple[TrainSettings, RunFolder, Saving]:
    """Like ``_place_run``, but ranks that torchrun has restarted resume their run if it has a checkpoint."""
    is_ours = partial(is_of_this_job, agents=options.agents)
    if options.resume == NEWEST:  # after a restart, another run may have the newest checkpoint
        options.resume = find_restarted(is_ours) or NEWEST
    if options.resume is None:
        folder = options.out or find_restarted(is_ours)
        if folder is None and restarted_by_torchrun() and not names_of_job(options.agents):
            print(NOT_FOUND_AGAIN, file=sys.stderr)
        if folder is not None and (folder / "settings.json").exists():
            known, said = RunFolder.reopen(folder)
            if not is_ours(said.get(JOB)):
                raise in_use(folder)
            _fit_grid(options, said, started)
            settings = resumed_settings(said, vars(options), {*options.given} - {"out"})
            saving = _going_on(known, said, options)
            if (saving.begin or 0) >= settings.steps and (folder / RESULT).exists():
                raise CompleteRunError(f"the run in {folder} is complete: nothing is left to do")
            return settings, known, saving
    if options.resume is not None:
        _, said = RunFolder.reopen(find_run(options.resume))
        _fit_grid(options, said, started)
    else:
        options.dp = _dp_under_torchrun(options.dp, options.tp, started)
    return _place_run(options, options.dp)


def _fit_grid(options: argparse.Namespace, said: dict[str, Any], started: int) -> None:
    """Make a resumed run use as many ranks as torchrun has started, perhaps on fewer nodes."""
    options.tp = options.tp if "tp" in options.given else resumed_settings(said, {}, ()).tp
    options.dp = _dp_under_torchrun(options.dp, options.tp, started)
    options.given = {*options.given, "dp", "tp"}


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line. Each setting is parsed as the type of its default."""
    parser = Parser(prog="python -m muon_tutorial", description="Distributed Muon, on real processes.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    commands.add_parser(
        "torchrun", add_help=False, help="torch's torchrun, with ranks that can restart across machines"
    )
    add_plan(commands)
    add_calibrate(commands)
    add_recipes(commands)
    return parser


def _add_train(commands: Any) -> None:
    trainer = commands.add_parser(
        "train",
        help="train a small GPT with distributed Muon",
        description="Train a small byte-level GPT with distributed Muon, checked against torch.optim.Muon.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for title, options in SETTINGS.items():
        group = trainer.add_argument_group(title)
        for name, says in options.items():
            default, choices = DEFAULTS[name], get_args(Backend) if name == "backend" else None
            group.add_argument(
                f"--{name}",
                type=str if default is None else type(default),
                metavar=None if choices else METAVARS[type(default)],
                default=default,
                choices=choices,
                help=says.format(default),
            )
    trainer.set_defaults(dp=None)
    _add_output(trainer)
    _add_signals(trainer)


def _add_signals(trainer: argparse.ArgumentParser) -> None:
    acts = ", ".join(f"{name}={act}" for name, act in DEFAULT_ACTS.items())
    group = trainer.add_argument_group("preemption")
    group.add_argument(
        "--on-signal",
        action="append",
        default=[],
        metavar="NAME=ACT",
        help=f"what a signal does: save and go on, save and stop, or end at once (default: {acts})",
    )
    group.add_argument(
        "--grace",
        type=float,
        metavar="S",
        default=GRACE,
        help="seconds to finish the step and save after a signal; then the run ends (default: %(default)s)",
    )
    group.add_argument(
        "--max-seconds",
        type=float,
        metavar="S",
        help="save and stop after the step in which S seconds have passed, with exit code 0",
    )


def _add_output(trainer: argparse.ArgumentParser) -> None:
    group = trainer.add_argument_group("output")
    group.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="run folder, new or empty (default: runs/TIME-STRATEGY-GRID)",
    )
    group.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="save after every N steps, and at the end, into the run folder (default: only when asked to)",
    )
    group.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=NEWEST,
        metavar="FOLDER",
        help="go on with the run in FOLDER, on any grid (without FOLDER: the newest run that has saved)",
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object to standard output, nothing else"
    )
    group.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the last step with torch.optim.Muon and AdamW, bit by bit (default: yes)",
    )
    group.add_argument(
        "--compare", action="store_true", help="then run the same job on one process and draw both curves"
    )


def _given(arguments: Sequence[str]) -> set[str]:
    """Return the names of the settings that are given on the command line."""
    typed = {argument.partition("=")[0].replace("--no-", "--") for argument in arguments}
    return {name for name in DEFAULTS if f"--{name}" in typed}


def _dp_under_torchrun(dp: int | None, tp: int, started: int) -> int:
    """Return the requested dp or, if dp is None, the dp that uses all of torchrun's processes."""
    if dp is None and started % tp:
        raise GridError(f"--tp {tp} does not divide the {started} processes that torchrun started")
    dp = dp or started // tp
    if dp * tp != started:
        raise GridError(f"--dp {dp} × --tp {tp} needs {dp * tp} processes; torchrun started {started}")
    return dp


def _say_stopped(run: StoppedRun, folder: RunFolder) -> int:
    why = "the --max-seconds have passed" if run.reason == TIME else said_of(run.reason)
    where = f"saved after step {run.step} in {run.checkpoints}"
    return say(f"{why}; {where}; go on with: train --resume {folder.path}", exit_code(run.reason))


def _keep_result(folder: RunFolder, result: RunResult, beside: job.OneProcessRun | None) -> None:
    folder.write(RESULT, job.describe_result(result, beside))
    # Imported here, so that no other command waits for matplotlib.
    from .training.loss_picture import loss_figure

    folder.draw("loss.png", loss_figure(result, beside))


def _show_result(
    options: argparse.Namespace, folder: RunFolder, result: RunResult, beside: job.OneProcessRun | None
) -> int:
    if options.json:
        data = job.describe_result(result, beside)
        print(json.dumps({**data, "run_folder": str(folder.path)}), flush=True)
    else:
        console = Console(highlight=False)
        console.print(summary_table(result, beside))
        console.print(traffic_table(result))
        console.print(f"run folder: {folder.path}", soft_wrap=True, markup=False)
    if result.check is not None and not result.check.passed:
        return _complain(f"the check {describe_verdict(result.check, result.settings.dp)}", FAILED)
    return 0


def _explain_failure(error: LaunchError, folder: RunFolder) -> int:
    if isinstance(error, RankFailedError) and isinstance(error.original, TutorialError):
        return _complain(str(error.original), _exit_code(error.original))
    first, _, more = str(error).partition("\n")
    if more:
        folder.write("error.txt", str(error) + "\n")
        first += f" (the whole report is in {folder.path / 'error.txt'})"
    return _complain(first, FAILED)


def _print_on_any_terminal() -> None:
    """Print a question mark for characters that the terminal lacks, such as ×."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _exit_code(error: TutorialError) -> int:
    return BAD_INPUT if isinstance(error, UsageError) else FAILED


def _complain(line: str, code: int) -> int:
    return say(f"error: {line}", code)
