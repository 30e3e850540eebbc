"""Lesson 16 under torchrun: the reader's functions as a script, and a run of it whose rank is killed.

``main`` is what the script calls. The same ``train`` runs under ``launch()``; here torchrun starts the ranks,
and starts them again after the kill.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ...launching.start_torchrun import start_torchrun, torchrun_words
from ...launching.torchrun import join_torchrun, leave_torchrun, restarted_by_torchrun
from . import lives
from .lives import RunLife
from .port import Job, Port, train

SCRIPT = "my_port.py"
PAIR = (2, 1)
"""The grid of the run under torchrun, small so that it is quick: each rank is a fresh Python."""
_HEAD = '''\
"""My port, for torchrun."""
import torch
import torch.distributed as dist
from muon_tutorial import CheckpointManager, Muon, MuonWithAdamW, split_parameters
from muon_tutorial.learn.my_loop.on_torchrun import main

'''
_TAIL = """

if __name__ == "__main__":
    main({names})
"""
_REFERENCE_HEAD = "from muon_tutorial.learn.my_loop.port import ADAMW_LR, LR, MAX_NORM, WEIGHT_DECAY\n\n"
_LIMIT = 280.0


def main(prepare: Callable, update: Callable, save: Callable, load: Callable) -> None:
    """What every rank of the script does. Torchrun must have started it."""
    options = _parser().parse_args()
    joined = join_torchrun(options.backend)
    victim = None if restarted_by_torchrun() else options.victim
    job = Job(options.steps, options.seed, victim)
    options.folder.mkdir(parents=True, exist_ok=True)
    port, grid = Port(prepare, update, save, load), (options.dp, options.tp)
    train(joined.rank, grid, options.folder, job, port, device=joined.device)
    leave_torchrun()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name in ("dp", "tp", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--victim", type=int)
    return parser


def script_of(port: Port) -> str:
    """The source of a script with these functions in it.

    Raises:
        UsageError: a function's source cannot be found.
    """
    functions = (port.prepare, port.update, port.save, port.load)
    sources = [_source(function) for function in functions]
    if any(function.__module__ == Port.__module__ for function in functions):
        sources.insert(0, _REFERENCE_HEAD.rstrip())
        sources = [_without_types(source) for source in sources]
    names = ", ".join(function.__name__ for function in functions)
    return _HEAD + "\n\n".join(sources) + _TAIL.format(names=names)


def _source(function: Callable) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip() + "\n"
    except (OSError, TypeError):
        raise UsageError(f"the source of {function!r} cannot be found; define it in a cell") from None


def _without_types(source: str) -> str:
    """A function without its annotations, which name what a script does not import."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
    return ast.unparse(tree) + "\n"


@dataclass(frozen=True, slots=True)
class TorchrunOutcome:
    """A run under torchrun of which a rank was killed, and the same under ``launch()``, undisturbed."""

    killed: RunLife
    undisturbed: RunLife

    @property
    def is_same(self) -> bool:
        """Whether both end with the same bits."""
        return lives.same_bits(lives.final(self.killed), lives.final(self.undisturbed))


def command_of(job: Job) -> list[str]:
    """The command line for a pair of ranks, as one would type it; the second is the victim."""
    dp, tp = PAIR
    numbers = {"dp": dp, "tp": tp, "steps": job.steps, "seed": job.seed, "victim": dp * tp - 1}
    arguments = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    return torchrun_words(SCRIPT, dp * tp, restarts=1, arguments=arguments)


def show_command(job: Job) -> None:
    """Print the command line."""
    words = command_of(job)
    cut = words.index(SCRIPT)
    print(" ".join(words[:cut]), "\\\n   ", " ".join(words[cut:]))


def run_torchrun(job: Job, port: Port, backend: str = "gloo") -> TorchrunOutcome:
    """Write the script, run it under torchrun with a kill, and run the same functions under ``launch()``.

    Raises:
        LaunchError: torchrun failed, or did not end; says the end of what it printed.
    """
    folder, other = lives.new_folder(), lives.new_folder()
    (folder / SCRIPT).write_text(script_of(port), encoding="utf-8")
    (folder / "run").mkdir()
    start_torchrun(command_of(job), folder, _LIMIT)
    lives.start(other, PAIR, job, port, backend=backend)
    return TorchrunOutcome(lives.read(folder / "run", job), lives.read(other, job))


def say_torchrun(outcome: TorchrunOutcome | None) -> str:
    """What became of a run under torchrun, beside the undisturbed one under ``launch()``."""
    if outcome is None:
        return "Not run: torchrun = False. The command stands above."
    first, last = outcome.killed.attempts[0], outcome.killed.last
    victim, step = first.killed or (None, None)
    return (
        f"rank {victim} was killed after {step} steps; torchrun started all {last.ranks} ranks again\n"
        f"they went on from the checkpoint of step {last.begin}, and came to step {last.end}\n"
        f"the same bits as undisturbed under launch(): {outcome.is_same}"
    )
