"""The recipes: how to start, watch and compare each, and checks of its optimizer's inputs and final state.

Several ranks sum in another order than one process. Newton–Schulz rounds its input to bf16, so the last bit
of a gradient can become a bf16 step of the update. That effect is measured, not guessed: the control is the
plain loop with twice as many micro-batches of half the size, in which only the order of the sums changes.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ..launching.launch_traces import free_port

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "scripts" / "recipes"
WATCH = Path(__file__).parent / "watch"

EPOCHS, STEPS = 2, 3
"""The defaults of ``tiny.arguments``."""

MAX_NORM = 0.1

BIN = Path(sys.executable).parent
PYTHON = (sys.executable,)
TORCHRUN_2 = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TORCHRUN_4 = (*TORCHRUN_2[:-1], "4")
ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch"),
    *("--num_processes", "2", "--main_process_port", "{port}"),
)
FABRIC = (
    *(str(BIN / "fabric"), "run", "--accelerator", "cpu", "--strategy", "ddp"),
    *("--devices", "2", "--main-port", "{port}"),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One file of ``scripts/recipes``: its launcher, its number of ranks, and the package it needs.

    A launcher with a fixed port, which two simultaneous runs would share, gets a free one instead.
    ``alone`` is the recipe that does the same work in one process.
    ``sharded`` says that parameters must be DTensors.
    """

    launcher: tuple[str, ...]
    ranks: int
    needs: str = "torch"
    alone: str = "plain"
    sharded: bool = False


ALL = {
    "plain": Recipe(PYTHON, 1),
    "ddp": Recipe(TORCHRUN_2, 2),
    "zero1": Recipe(TORCHRUN_2, 2),
    "fsdp2": Recipe(TORCHRUN_2, 2, sharded=True),
    "fsdp2_tp": Recipe(TORCHRUN_4, 4, sharded=True),
    "hsdp": Recipe(TORCHRUN_4, 4, sharded=True),
    "accelerate_ddp": Recipe((*ACCELERATE, "--multi_gpu"), 2, needs="accelerate"),
    "accelerate_fsdp2": Recipe(
        (*ACCELERATE, "--use_fsdp", "--fsdp_version", "2"), 2, needs="accelerate", sharded=True
    ),
    "trainer": Recipe(TORCHRUN_2, 2, needs="transformers"),
    "fabric_ddp": Recipe(FABRIC, 2, needs="lightning"),
    "fabric_fsdp2": Recipe(PYTHON, 2, needs="lightning", sharded=True),
    "lightning_trainer": Recipe(PYTHON, 2, needs="lightning"),
    "nanogpt": Recipe(TORCHRUN_2, 2, alone="nanogpt"),
    "titan": Recipe(TORCHRUN_2, 2, sharded=True),
    "compiled": Recipe(TORCHRUN_2, 2),
    "lora": Recipe(TORCHRUN_2, 2, needs="peft", alone="lora"),
    "sft": Recipe(TORCHRUN_2, 2, needs="trl", alone="sft"),
}
"""All recipes share ``tiny.py`` and ``tiny_tp.py``; some import the loop of another recipe."""


@dataclass(frozen=True, slots=True)
class Notes:
    """One rank's optimizer: the parameters before the first step, each step's inputs, and the last state."""

    optimizer: str
    ranks: int
    start: dict[str, Tensor]
    steps: list[dict[str, Any]]
    parameters: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    placements: dict[str, str]

    def series(self, key: str) -> list[Any]:
        """The values of one noted quantity, step by step."""
        return [step[key] for step in self.steps]


def skip_unless_installed(name: str) -> None:
    """Skip the test, with a reason, if the recipe cannot run."""
    needs = ALL[name].needs
    if importlib.util.find_spec(needs) is None:
        extra = needs if needs in ("peft", "trl") else "-e '.[hosts]' -c constraints.txt"
        pytest.skip(f"{needs} is not installed: pip install {extra}")
    if name == "compiled" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("torch.compile needs a C++ compiler")


KILLED = re.compile(r"terminate called without an active exception|exitcode: -(6|11)\b|Signal (6|11) ")
"""A launcher's output if a signal, and not an error in Python, has ended a process."""


def run(name: str, folder: Path, *arguments: str, forks: int = 0) -> list[Notes]:
    """Run a recipe as its host's users would, and return the notes of every rank.

    If ``forks`` is not 0, it is the number of ranks, which are forked from a process that has imported the
    packages. They have the environment that torchrun would give them. Checkpoints are in ``folder /
    "saved"``. Gloo's threads may outlive Python and end a process by a signal at its exit (issue 190489 of
    pytorch/pytorch). A run that ended so is repeated, with a warning.
    """
    notes = folder / "notes"
    words = [str(RECIPES / f"{name}.py"), "--save", str(folder / "saved"), *arguments]
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        notes.mkdir(parents=True)
        code = _fork(words, folder, forks) if forks else _launch([*ALL[name].launcher, *words], folder)
        said = f"exit status {code}: {words}\n{(folder / 'said').read_text()[-6000:]}"
        if code == 0 or (code > 0 and not KILLED.search(said)):
            break
        warnings.warn(f"{name}: exit status {code}; running it again", stacklevel=2)
    assert code == 0, said
    ranks = forks or ALL[name].ranks
    assert len(list(notes.iterdir())) == ranks, said
    return [Notes(**torch.load(notes / f"rank-{rank}.pt")) for rank in range(ranks)]


def _launch(words: list[str], folder: Path) -> int:
    command = [word.replace("{port}", str(free_port())) for word in words]
    with open(folder / "said", "w") as said:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
        environment = _environment(folder)
        return subprocess.run(command, cwd=folder, env=environment, timeout=900, **streams).returncode


def _fork(words: list[str], folder: Path, ranks: int) -> int:
    """Run a recipe in forked processes, and return the first exit status that is not 0."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.trainer"])
    environment = _environment(folder) | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), f"{ranks}")
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    processes = [
        context.Process(target=_be_a_rank, args=(words, folder, environment, rank), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()  # if it has not ended
        process.join()
    return next((process.exitcode for process in processes if process.exitcode), 0)


def _be_a_rank(words: list[str], folder: Path, environment: dict[str, str], rank: int) -> None:
    with open(folder / "said", "a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv, sys.path[:0] = words, [str(RECIPES), str(WATCH)]
    importlib.import_module("watching").start(environment["WATCH_FOLDER"])
    runpy.run_path(words[0], run_name="__main__")


def _environment(folder: Path) -> dict[str, str]:
    """This process's environment without launchers' variables, and with the watch's variables."""
    dropped = ("TORCH_DISTRIBUTED_DEBUG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept | {
        "PYTHONPATH": f"{WATCH}:{ROOT}",
        "WATCH_FOLDER": str(folder / "notes"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "HF_HUB_OFFLINE": "1",
    }


def checkpoint(folder: Path) -> Path:
    """The checkpoint of the run in ``folder`` after its first epoch; its name has the number of steps."""
    names = ("epoch-1", f"checkpoint-{STEPS}", f"checkpoint-{STEPS}.ckpt")
    found = [folder / "saved" / name for name in names if (folder / "saved" / name).exists()]
    assert len(found) == 1, list((folder / "saved").iterdir())
    return found[0]


def distance(notes: Notes, reference: Notes, *, of_muon: bool) -> float:
    """The largest distance of a parameter from the reference, divided by how far the reference moved."""
    return max(
        (
            float((notes.parameters[name] - there).norm() / (there - reference.start[name]).norm())
            for name, there in reference.parameters.items()
            if ("momentum_buffer" in reference.state[name]) == of_muon
        ),
        default=0.0,  # LoRA leaves nothing to AdamW
    )


def state_distance(notes: Notes, reference: Notes) -> float:
    """The largest distance of momentum or moments, divided by the reference's norm.

    Tensors that were noted only in part do not count.
    """
    return max(
        float((notes.state[name][key] - there).norm() / there.norm())
        for name, entry in reference.state.items()
        for key, there in entry.items()
        if notes.state[name][key].shape == there.shape
    )


def differences(notes: Notes, reference: Notes) -> list[str]:
    """Names of parameters and states that differ in any bit, and the steps whose notes differ."""
    pairs = {
        f"{name}'s {key}": (notes.state[name].get(key), value)
        for name, entry in reference.state.items()
        for key, value in entry.items()
    }
    pairs |= {name: (notes.parameters[name], value) for name, value in reference.parameters.items()}
    wrong = [what for what, (got, there) in pairs.items() if got is None or not torch.equal(got, there)]
    seen = reference.steps[-len(notes.steps) :]
    return wrong + [f"step {number}" for number, step in enumerate(notes.steps) if step != seen[number]]


HALVES = ("--batch", "4", "--accumulate", "4")
MARGIN = 3
"""A host may be this many times as far off as the control, because the worst matrix varies."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One process's run, and its distance from the control, which adds the same numbers in another order."""

    notes: Notes
    muon: float
    adamw: float
    state: float


@cache
def run_alone(name: str, folder: Path) -> Reference:
    """Run a recipe and its control in one process; ``folder`` keeps the runs of all recipes."""
    [notes] = run(name, folder / name / "whole", forks=1)
    [control] = run(name, folder / name / "halves", *HALVES, forks=1)
    muon, adamw = (distance(control, notes, of_muon=of_muon) for of_muon in (True, False))
    return Reference(notes, muon, adamw, state_distance(control, notes))


def train(name: str, folder: Path, *arguments: str, forks: int = 0) -> tuple[list[Notes], list[Notes]]:
    """Run a recipe from the start, then once more, in new processes, from its first checkpoint."""
    straight = run(name, folder / "straight", *arguments, forks=forks)
    resume = ("--resume", str(checkpoint(folder / "straight")))
    return straight, run(name, folder / "resumed", *arguments, *resume, forks=forks)


def checks(
    name: str, straight: list[Notes], resumed: list[Notes], reference: Reference
) -> dict[str, Callable[[], None]]:
    """What both runs of a recipe must show, by the headings of the table of hosts."""
    return {
        "equal to one process": partial(check_equal, straight, reference),
        "clip": partial(check_clipped, straight, reference, inside=name == "zero1"),
        "accumulate": partial(check_accumulated, straight, reference),
        "schedule": partial(check_scheduled, straight, reference),
        "resume": partial(check_resumed, straight, resumed),
    }


def check_equal(straight: list[Notes], reference: Reference) -> None:
    """Assert that every rank ends like one process, within the noise that another order of sums causes."""
    for notes in straight:
        assert notes.parameters.keys() == reference.notes.parameters.keys()
        assert distance(notes, reference.notes, of_muon=True) <= MARGIN * reference.muon
        assert distance(notes, reference.notes, of_muon=False) <= MARGIN * reference.adamw
        assert state_distance(notes, reference.notes) <= MARGIN * reference.state


def check_placed(notes: list[Notes], sharded: bool) -> None:
    """Assert that every parameter is a cut DTensor if the host shards, and that otherwise none is cut.

    A host may silently fall back to DDP, for example, and then every other check would pass.
    """
    for one in notes:
        assert {"Shard" in placements for placements in one.placements.values()} == {sharded}


def check_accumulated(straight: list[Notes], reference: Reference) -> None:
    """Assert that the first gradient before clipping is the mean over all micro-batches and all ranks."""
    first = reference.notes.steps[0]["norm_before_clipping"]
    for notes in straight:
        assert len(notes.steps) == EPOCHS * STEPS
        assert notes.steps[0]["norm_before_clipping"] == pytest.approx(first, rel=1e-5)


def check_clipped(straight: list[Notes], reference: Reference, *, inside: bool = False) -> None:
    """Assert that clipping changed the gradients at every step, and that the optimizer got clipped gradients.

    If the optimizer averages gradients, it also clips them (``inside``); only ``check_equal`` can check this.
    """
    for notes in straight:
        before = notes.series("norm_before_clipping")
        assert min(before) > 2 * MAX_NORM
        assert before == pytest.approx(reference.notes.series("norm_before_clipping"), rel=1e-3)
        assert inside or notes.series("norm") == pytest.approx([MAX_NORM] * EPOCHS * STEPS, rel=1e-4)


def check_scheduled(straight: list[Notes], reference: Reference) -> None:
    """Assert that all groups used exactly the schedule's learning rates."""
    for notes in straight:
        assert notes.series("lrs") == reference.notes.series("lrs")
        assert len(set(map(tuple, notes.series("lrs")))) == EPOCHS * STEPS


def check_resumed(straight: list[Notes], resumed: list[Notes]) -> None:
    """Assert that the second half in new processes equals the first run's second half, bit by bit."""
    for notes, whole in zip(resumed, straight, strict=True):
        assert len(notes.steps) == STEPS
        assert differences(notes, whole) == []


def check_bf16(straight: list[Notes], reference: Reference) -> None:
    """Assert that the model was computed in bf16, and that the optimizer kept its fp32 parameters."""
    exact = reference.notes.steps[0]["norm_before_clipping"]
    for notes in straight:
        error = abs(notes.steps[0]["norm_before_clipping"] / exact - 1)
        assert 1e-5 < error < 0.05
        kept = [*notes.parameters.values(), *(t for entry in notes.state.values() for t in entry.values())]
        assert {tensor.dtype for tensor in kept} == {torch.float32}
        assert distance(notes, reference.notes, of_muon=True) < 0.5


def code_lines(name: str) -> list[str]:
    """A recipe's lines without its docstring."""
    return re.sub(r'""".*?"""', "", (RECIPES / f"{name}.py").read_text(), flags=re.DOTALL).splitlines()


def marked_lines(name: str) -> list[str]:
    return [line for line in code_lines(name) if line.endswith("  # Muon")]
