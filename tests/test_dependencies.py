"""Every dependency has a minimum version and no maximum, and the tested versions are above the minimum.

``bash scripts/lowest.sh`` runs the tests with the minimum versions, which shows that they work.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest installs it on Python 3.10

ROOT = Path(__file__).resolve().parent.parent
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LISTS = [
    CONFIG["build-system"]["requires"],
    CONFIG["project"]["dependencies"],
    *CONFIG["project"]["optional-dependencies"].values(),
]
LINES = sorted({line for lines in LISTS for line in lines})


def pinned_versions() -> dict[str, list[str]]:
    """The versions in constraints.txt by name; several if they differ by Python or system."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions: dict[str, list[str]] = {}
    for pin in [Requirement(line) for line in lines if not line.startswith("#")]:
        [specifier] = pin.specifier
        assert specifier.operator == "==", pin
        versions.setdefault(canonicalize_name(pin.name), []).append(specifier.version)
    return versions


@pytest.mark.parametrize("line", LINES)
def test_a_dependency_has_one_floor_which_the_tested_versions_satisfy(line: str) -> None:
    requirement = Requirement(line)
    assert [each.operator for each in requirement.specifier] == [">="]
    versions = pinned_versions()[canonicalize_name(requirement.name)]
    assert [version for version in versions if version not in requirement.specifier] == []


def test_the_page_on_installing_names_todays_floors() -> None:
    floors = dict(line.split(">=") for line in LINES)
    python = CONFIG["project"]["requires-python"].removeprefix(">=")
    page = " ".join((ROOT / "docs" / "install.md").read_text(encoding="utf-8").split())
    said = re.search(r"floors in `pyproject.toml`: Python (\S+), torch (\S+), ipywidgets (\S+)\. ", page)
    assert said is not None
    assert said.groups() == (python, floors["torch"], floors["ipywidgets"])
