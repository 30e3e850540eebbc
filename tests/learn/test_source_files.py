"""Lessons' source files: colours are in one place, names that notebooks use exist, and ranks never draw."""

from __future__ import annotations

import ast
import colorsys
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.colors
import pytest

from muon_tutorial import learn
from muon_tutorial.learn import collectives
from muon_tutorial.learn.course import series
from muon_tutorial.learn.pictures import colours
from scripts.notebooks import sources

LEARN = Path(colours.__file__).resolve().parents[1]
PALETTE = Path(colours.__file__)
HEX = re.compile(r"#[0-9a-fA-F]{3,8}\b")
NAMED = "|".join([*matplotlib.colors.CSS4_COLORS, *matplotlib.colors.TABLEAU_COLORS, r"C\d"])
SHORT = "|".join([*matplotlib.colors.BASE_COLORS, r"[\d.]+"])
COLOUR_WORDS = "c|colou?r|ec|edgecolors?|fc|facecolors?|fill"
FILL_WORDS = {"fc", "facecolor", "facecolors", "fill"}
COLOUR = re.compile(rf"{HEX.pattern}|'(?:{NAMED})'|\b(?:{COLOUR_WORDS})='(?:{SHORT})'")
"""Finds colours in the output of ``ast.unparse``: hex codes, names, and arguments that are a letter or a grey
level."""
SATURATED = 0.2
"""HSV saturation. A fill of this saturation or more must stand for a rank; a paler fill may mean anything."""


def code_of(text: str) -> ast.Module:
    """A module without docstrings, and without the descriptions below constants."""
    module = ast.parse(text)
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            kept = [each for each in node.body if not is_words(each)]
            node.body = kept or [ast.Pass()]
    return module


def is_words(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def named_colours(module: ast.Module) -> list[str]:
    return COLOUR.findall(ast.unparse(module))


def fills(module: ast.Module) -> Iterator[str]:
    """The names of colours that are passed as a fill."""
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg in FILL_WORDS:
            yield from names_in(node.value)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "rectangle" and len(node.args) > 5:
            yield from names_in(node.args[5])


def names_in(value: ast.expr) -> Iterator[str]:
    """The names that an expression may evaluate to: both branches of a choice, but not its condition."""
    match value:
        case ast.Name(name) | ast.Attribute(attr=name):
            yield name
        case ast.IfExp(_, body, other):
            yield from names_in(body)
            yield from names_in(other)


def saturation(colour: str) -> float:
    return colorsys.rgb_to_hsv(*matplotlib.colors.to_rgb(colour))[1]


def test_no_other_file_names_a_colour_and_a_saturated_fill_is_a_ranks() -> None:
    single = {name: value for name, value in vars(colours).items() if re.fullmatch(HEX, str(value))}
    saturated = {name for name, value in single.items() if saturation(value) >= SATURATED}
    assert {"WRONG", "RIGHT", "SGD", "ADAMW", "MUON"} <= saturated
    assert not {"CARD", "EMPTY", "FAINT", "MARKED", "WRONG_FILL", "RIGHT_FILL"} & saturated
    assert min(map(saturation, colours.RANKS)) >= SATURATED
    for path in LEARN.rglob("*.py"):
        module = code_of(path.read_text(encoding="utf-8"))
        found = named_colours(module) if path != PALETTE else []
        assert not found, f"{path}, {found}: take names from learn/pictures/colours.py"
        found = sorted(set(fills(module)) & saturated)
        assert not found, f"{path}, {found}: say it by an edge, a mark or a pale fill"


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem[:2])
def test_a_lesson_has_every_name_that_its_notebook_uses(source: Path) -> None:
    lesson = importlib.import_module(f"muon_tutorial.learn.{series.lesson(source.stem[:2]).package}")
    used = set(re.findall(r"\blesson\.([a-z_A-Z]\w*)", source.read_text(encoding="utf-8")))
    assert used
    assert [name for name in used if not hasattr(lesson, name)] == []


def test_names_are_listed_and_a_wrong_one_is_refused() -> None:
    assert {"ring_all_gather", "run_sum", "check_ring", "explore_sum"} <= set(dir(collectives))
    with pytest.raises(AttributeError, match="collectives' has no attribute 'fasted'"):
        collectives.fasted


def test_files_that_ranks_run_import_nothing_that_draws() -> None:
    folder = Path(learn.__file__).parent
    packages = [it.package for it in series.LESSONS if (folder / it.package / "on_ranks.py").exists()]
    assert len(packages) > 7
    code = (
        "import sys, muon_tutorial.learn as learn, importlib\n"
        f"for name in {packages}:\n"
        "    importlib.import_module(f'muon_tutorial.learn.{name}').on_ranks\n"
        "print(sorted({'matplotlib', 'ipywidgets'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
