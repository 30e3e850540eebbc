"""The public surface is exactly this list, so each change of the surface also changes this file."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import muon_tutorial

PUBLIC = """
    KELLER_JORDAN STRATEGIES Box Bucket CheckpointManager Coordinate DistMeta DistributedConfig Grid Hop
    LaunchError Ledger LiveWorld LocalWorld Matrix Muon MuonWithAdamW Owned Partial Plan Replicate Route
    Shard TutorialError UsageError build_mesh create_devicemesh_config create_dtensor_config
    create_processgroup_config gram launch layerwise load_checkpoint owner owner_per_replica replicated
    round_robin save_checkpoint split_parameters zero1 zeropower_via_newtonschulz
"""


def test_the_public_names_are_pinned_and_found_and_no_other() -> None:
    assert sorted(muon_tutorial.__all__) == sorted(PUBLIC.split())
    assert set(muon_tutorial.__all__) <= set(dir(muon_tutorial))
    with pytest.raises(AttributeError, match="no attribute 'Moun'"):
        getattr(muon_tutorial, "Moun")  # noqa: B009, a name that mypy would refuse


BIT_BY_BIT = """
import sys
import muon_tutorial
print("torch" in sys.modules, "numpy" in sys.modules)
from muon_tutorial import Muon
print(*(f"{name}={getattr(module, '__file__', '')}" for name, module in sys.modules.items()), sep="|")
from muon_tutorial.cli import main
main(["plan", "gpt2", "--grid", "dp=2,tp=2", "--json"])
print("torch._dynamo" in sys.modules)
"""


def test_the_package_imports_nothing_the_optimizer_few_rooms_and_a_plan_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", BIT_BY_BIT], capture_output=True, text=True, check=True)
    by_the_package, by_the_optimizer, *_, is_compiler_there = done.stdout.splitlines()
    assert by_the_package == "False False"
    files = dict(each.split("=") for each in by_the_optimizer.split("|"))
    ours = {name: Path(file) for name, file in files.items() if name.split(".")[0] == "muon_tutorial"}
    rooms = {name.split(".")[1] for name in ours if "." in name}
    assert "optimizer" in rooms
    assert not rooms & {"checkpoint", "evidence", "learn", "timing", "training", "cli"}
    assert "matplotlib" not in files
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in ours.values()) <= 10_700
    assert is_compiler_there == "False"


def test_every_public_function_and_class_says_what_it_does() -> None:
    values = {name: getattr(muon_tutorial, name) for name in muon_tutorial.__all__}
    silent = [name for name, value in values.items() if callable(value) and not inspect.getdoc(value)]
    assert silent == []
