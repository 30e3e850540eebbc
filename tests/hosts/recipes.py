"""The recipes, and how to start, watch and compare each."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
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
    ``sharded`` says that parameters must be DTensors. A usual run tries only the ``daily`` one, DDP under the
    Trainer of transformers. The others can break only with their host's version; ``tests/optimizer`` and
    ``tests/configs`` check the optimizer's contract, which all recipes share, and FSDP2's checkpoints.
    """

    launcher: tuple[str, ...]
    ranks: int
    needs: str = "torch"
    alone: str = "plain"
    daily: bool = False
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
    "trainer": Recipe(TORCHRUN_2, 2, needs="transformers", daily=True),
    "fabric_ddp": Recipe(FABRIC, 2, needs="lightning"),
    "fabric_fsdp2": Recipe(PYTHON, 2, needs="lightning", sharded=True),
    "lightning_trainer": Recipe(PYTHON, 2, needs="lightning"),
    "nanogpt": Recipe(TORCHRUN_2, 2, alone="nanogpt"),
    "titan": Recipe(TORCHRUN_2, 2, sharded=True),
    "compiled": Recipe(TORCHRUN_2, 2),
    "lora": Recipe(TORCHRUN_2, 2, needs="peft", alone="lora"),
    "sft": Recipe(TORCHRUN_2, 2, needs="trl", alone="sft"),
}
"""All recipes share ``tiny.py`` and ``tiny_tp.py``; some import the loop of another one."""


@dataclass(frozen=True, slots=True)
class Notes:
    """One rank's optimizer: its parameters before, its inputs at every step, its state after the last."""

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
"""Output about a process that was ended by a signal, not by an error in Python."""


def run(
    name: str, folder: Path, *arguments: str, launcher: tuple[str, ...] = (), ranks: int = 0
) -> list[Notes]:
    """Run a recipe as its host's users would, and return the notes of every rank.

    Its checkpoints are in ``folder / "saved"``. Gloo's threads may outlive Python and end a process by a
    signal at its exit (issue 190489 of pytorch/pytorch): such a run is repeated, with a warning.
    """
    recipe = ALL[name]
    notes, saved = folder / "notes", folder / "saved"
    words = [*(launcher or recipe.launcher), str(RECIPES / f"{name}.py"), "--save", str(saved), *arguments]
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        notes.mkdir(parents=True)
        command = [word.replace("{port}", str(free_port())) for word in words]
        process = subprocess.run(
            command,
            cwd=folder,
            env=_environment(notes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        if process.returncode == 0 or (process.returncode > 0 and not KILLED.search(process.stdout)):
            break
        warnings.warn(f"{name}: exit status {process.returncode}; running it again", stacklevel=2)
    said = f"exit status {process.returncode}: {' '.join(command)}\n{process.stdout[-6000:]}"
    assert process.returncode == 0, said
    ranks = ranks or recipe.ranks
    assert len(list(notes.iterdir())) == ranks, said
    return [Notes(**torch.load(notes / f"rank-{rank}.pt")) for rank in range(ranks)]


def _environment(notes: Path) -> dict[str, str]:
    """This process's environment, without launchers' variables, and with the watch."""
    dropped = ("TORCH_DISTRIBUTED_DEBUG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept | {
        "PYTHONPATH": f"{WATCH}:{ROOT}",
        "WATCH_FOLDER": str(notes),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "HF_HUB_OFFLINE": "1",
    }


def checkpoint(folder: Path) -> Path:
    """The checkpoint of the run in ``folder`` after its first epoch; both Trainers name it by steps."""
    names = ("epoch-1", f"checkpoint-{STEPS}", f"checkpoint-{STEPS}.ckpt")
    found = [folder / "saved" / name for name in names if (folder / "saved" / name).exists()]
    assert len(found) == 1, list((folder / "saved").iterdir())
    return found[0]


def alone(name: str, folder: Path, *arguments: str) -> Notes:
    """Run one process on the global batches of a recipe."""
    launcher = PYTHON if ALL[name].alone == "plain" else (*TORCHRUN_2[:-1], "1")
    return run(ALL[name].alone, folder, *arguments, launcher=launcher, ranks=1)[0]


def distance(notes: Notes, reference: Notes, *, of_muon: bool) -> float:
    """A parameter's distance from the reference's, over how far the reference's moved: the largest ratio."""
    return max(
        (
            float((notes.parameters[name] - there).norm() / (there - reference.start[name]).norm())
            for name, there in reference.parameters.items()
            if ("momentum_buffer" in reference.state[name]) == of_muon
        ),
        default=0.0,  # LoRA leaves nothing to AdamW
    )


def state_distance(notes: Notes, reference: Notes) -> float:
    """The same for momentum and moments, over the reference's norm; those noted in part are left out."""
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
