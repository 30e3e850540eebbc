"""The wheel has the right contents, works, and is typed, without the rest of this project."""

from __future__ import annotations

import io
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import pack

from .notebooks import bare

PACKAGE = bare.ROOT / "muon_tutorial"
INFO = {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE"}

STEP_ON_RANKS = """
import torch
import muon_tutorial
from muon_tutorial import Muon, build_mesh, launch

def step(rank, size):
    torch.manual_seed(0)
    weight, gradient = torch.nn.Parameter(torch.randn(8, 6)), torch.randn(8, 6)
    weight.grad = gradient.clone()
    plan = {"strategy": "zero1", "mesh": build_mesh({"dp": 2})} if size > 1 else {}
    Muon([("weight", weight)], **plan).step()
    return muon_tutorial.__file__, weight.detach()

if __name__ == "__main__":
    place, alone = step(0, 1)
    print(place)
    for its_place, weight in launch(step, 2, args=(2,)):
        print(its_place == place and torch.equal(weight, alone))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = zipfile.ZipFile(io.BytesIO(content := pack.wheel()))
    [info] = {name.split("/")[0] for name in archive.namelist() if name.endswith("/METADATA")}
    path = tmp_path_factory.mktemp("wheel") / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a venv with only the wheel and its requirements: no checkout, no tools, no tests."""
    needed = [Requirement(line) for line in described(wheel).requires or ()]
    required = [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    folder = tmp_path_factory.mktemp("elsewhere")
    python = bare.linked_venv(folder / "venv", required)
    target = ["--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    bare.run([sys.executable, "-m", "pip", *target], check=True, cwd=folder)
    return python


def described(wheel: Path) -> PathDistribution:
    [info] = [path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")]
    return PathDistribution(info)


def installed_in(python: Path) -> Path:
    [place] = python.parents[1].glob("lib/python*/site-packages/muon_tutorial")
    return place


def test_it_holds_the_package_and_its_licence_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
    assert PACKAGE / "py.typed" in files
    assert names == {str(path.relative_to(bare.ROOT)) for path in files} | {f"{info}/{each}" for each in INFO}
    assert [name for name in names if "test" in Path(name).stem] == []


def test_ranks_step_from_it_with_no_compiler_and_no_checkout_in_reach(python: Path, tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = bare.run([python, "-I", "-c", STEP_ON_RANKS], cwd=tmp_path, env=env)
    place, *same = done.stdout.splitlines()
    assert done.stderr == ""
    assert Path(place) == installed_in(python) / "__init__.py"
    assert same == ["True"] * 2
