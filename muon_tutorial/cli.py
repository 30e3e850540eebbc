"""The command line. Parses, calls one function, shows; every error is one line and an exit code.

Exit codes: 0 done; 1 a run failed, or its check did; 2 bad input; 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from .errors import GridError, LaunchError, RankFailedError, TrainingError, TutorialError, UsageError
from .launching.torchrun import TorchrunEnvironment, join_torchrun, joined_by_torchrun, leave_torchrun
from .plan.strategies import STRATEGIES
from .training import job
from .training.folder import RunFolder, unused
from .training.records import RunResult
from .training.report import describe_verdict, loss_figure, summary_table, traffic_table
from .training.settings import TrainSettings

FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143
DEFAULT_DP = 2
_DEFAULTS = {field.name: field.default for field in fields(TrainSettings)}

EPILOG = """\
examples:
  python -m muon_tutorial train                          4 processes: dp=2 × tp=2
  python -m muon_tutorial train --dp 4 --tp 2            8 processes
  python -m muon_tutorial train --dp 1 --tp 1            one process, the same global batches
  python -m muon_tutorial train --text book.txt --compare
  torchrun --nproc-per-node 8 scripts/distributed_muon.py --tp 2 --backend nccl
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours: one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class Terminated(BaseException):
    """SIGTERM came. Unwinds like an interrupt, so that no process and no half-written file stays."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _print_on_any_terminal()
    try:
        options = build_parser().parse_args(arguments)
        return train_under_torchrun(options) if joined_by_torchrun() else train(options)
    except UsageError as error:
        return _complain(str(error), BAD_INPUT)
    except TutorialError as error:
        return _complain(str(error), FAILED)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _complain("standard output was closed before the result was written", FAILED)


def train(options: argparse.Namespace) -> int:
    """The ``train`` command, starting its own processes."""
    settings = _settings(options, dp=options.dp or DEFAULT_DP)
    job.check_inputs(settings, settings.world_size)
    folder = _make_folder(options, settings)
    console = Console(stderr=True, soft_wrap=True)
    with _terminable():
        try:
            result = job.run_launched(settings, folder, console)
            beside = job.run_beside(result, folder, console) if options.compare else None
            return _finish(options, folder, result, beside)
        except LaunchError as error:
            return _explain_failure(error, folder)
        except KeyboardInterrupt:
            return _say(f"interrupted; the steps so far are in {folder.path}", INTERRUPTED)
        except Terminated:
            return _say(f"terminated; the steps so far are in {folder.path}", TERMINATED)


def train_under_torchrun(options: argparse.Namespace) -> int:
    """The ``train`` command as one of torchrun's processes. Rank 0 speaks for all."""
    if options.compare:
        raise UsageError("--compare starts processes of its own: leave out torchrun, or --compare")
    seat = join_torchrun(options.backend, options.timeout)
    try:
        dp = options.dp or _dp_of(seat, options.tp)
        _check_world(dp, options.tp, seat)
        settings = _settings(options, dp)
        job.check_inputs(settings, processes_here=1)
        folder = _make_folder(options, settings) if seat.rank == 0 else None
        result = job.run_seated(seat.rank, settings, folder, Console(stderr=True, soft_wrap=True))
        return _finish(options, folder, result, None) if folder is not None else 0
    except UsageError as error:
        return _complain(str(error), BAD_INPUT) if seat.rank == 0 else BAD_INPUT
    except TrainingError as error:
        return _complain(str(error), FAILED) if seat.rank == 0 else FAILED
    finally:
        leave_torchrun()


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(prog="python -m muon_tutorial", description="Distributed Muon, on real processes.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    trainer = commands.add_parser(
        "train",
        help="train a small GPT with distributed Muon",
        description="Train a small byte-level GPT with distributed Muon, checked against torch.optim.Muon.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for add in (_add_grid, _add_training, _add_model, _add_output):
        add(trainer)
    return parser


def _add_grid(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the grid and the strategy")
    group.add_argument(
        "--dp", type=_count, metavar="N", help="data-parallel ranks (2; under torchrun, processes / tp)"
    )
    _option(group, "tp", _count, "tensor-parallel ranks; must divide the heads")
    _option(group, "strategy", str, f"how Muon is distributed: {', '.join(sorted(STRATEGIES))}")
    _option(group, "backend", str, "gloo (CPU) or nccl (one GPU for each process)", choices=("gloo", "nccl"))
    _option(group, "timeout", _positive, "seconds a rank waits for the others before it gives up")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _option(group, "steps", _count, "optimizer steps")
    _option(group, "batch", _count, "sequences in the global batch, split over dp")
    _option(group, "context", _count, "bytes in a sequence")
    _option(group, "lr", _positive, "peak learning rate, for Muon and AdamW alike")
    _option(group, "seed", int, "seed of the first weights and of the batches")
    group.add_argument(
        "--text",
        metavar="FILE",
        help="train on this UTF-8 file (default: the Python standard library's sources)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model")
    _option(group, "layers", _count, "transformer blocks")
    _option(group, "width", _count, "width of the residual stream")
    _option(group, "heads", _count, "attention heads")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="run folder, new or empty (default: runs/TIME-STRATEGY-GRID)",
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


def _option(
    group: argparse._ArgumentGroup, name: str, kind: Callable[[str], Any], says: str, **more: Any
) -> None:
    default = _DEFAULTS[name]
    metavar = (
        None if "choices" in more else "N" if kind in (_count, int) else "X" if kind is _positive else "NAME"
    )
    group.add_argument(
        f"--{name}", type=kind, default=default, metavar=metavar, help=f"{says} ({default})", **more
    )


def _count(text: str) -> int:
    value = int(text) if text.strip("+-").isdecimal() else None
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _settings(options: argparse.Namespace, dp: int) -> TrainSettings:
    chosen = {field.name: getattr(options, field.name) for field in fields(TrainSettings)}
    return TrainSettings(**{**chosen, "dp": dp})


def _dp_of(seat: TorchrunEnvironment, tp: int) -> int:
    if seat.world_size % tp:
        raise GridError(f"--tp {tp} does not divide the {seat.world_size} processes that torchrun started")
    return seat.world_size // tp


def _check_world(dp: int, tp: int, seat: TorchrunEnvironment) -> None:
    if dp * tp != seat.world_size:
        raise GridError(
            f"--dp {dp} × --tp {tp} needs {dp * tp} processes; torchrun started {seat.world_size}"
        )


def _make_folder(options: argparse.Namespace, settings: TrainSettings) -> RunFolder:
    if options.out is not None:
        return RunFolder.create(options.out, settings.as_dict())
    return RunFolder.create(unused(job.default_folder(settings)), settings.as_dict())


def _finish(
    options: argparse.Namespace, folder: RunFolder, result: RunResult, beside: job.Beside | None
) -> int:
    data = job.describe_result(result, beside)
    folder.write("result.json", data)
    folder.draw("loss.png", loss_figure(result, beside))
    if options.json:
        print(json.dumps({**data, "run_folder": str(folder.path)}), flush=True)
    else:
        _print_tables(folder, result, beside)
    if result.check is not None and not result.check.passed:
        return _complain(f"the check {describe_verdict(result.check, result.settings.dp)}", FAILED)
    return 0


def _print_tables(folder: RunFolder, result: RunResult, beside: job.Beside | None) -> None:
    console = Console(highlight=False)
    console.print(summary_table(result, beside))
    console.print(traffic_table(result))
    console.print(f"run folder: {folder.path}", soft_wrap=True, markup=False)


def _explain_failure(error: LaunchError, folder: RunFolder) -> int:
    if isinstance(error, RankFailedError) and isinstance(error.original, TutorialError):
        return _complain(str(error.original), BAD_INPUT if isinstance(error.original, UsageError) else FAILED)
    first, _, more = str(error).partition("\n")
    if more:
        folder.write_text("error.txt", str(error) + "\n")
        first += f" (the whole report is in {folder.path / 'error.txt'})"
    return _complain(first, FAILED)


def _print_on_any_terminal() -> None:
    """Let a terminal that lacks a sign, such as ×, show a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _complain(line: str, code: int) -> int:
    return _say(f"error: {line}", code)


def _say(line: str, code: int) -> int:
    print(line, file=sys.stderr, flush=True)
    return code


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack while the block runs."""
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
