"""Only one file of the lessons names colours, and a saturated fill stands for a rank. Reads the sources."""

from __future__ import annotations

import ast
import colorsys
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib.colors
import pytest

from muon_tutorial.learn.pictures import colours

LEARN = Path(colours.__file__).resolve().parents[1]
PALETTE = Path(colours.__file__).relative_to(LEARN).as_posix()
FILES = sorted(path.relative_to(LEARN).as_posix() for path in LEARN.rglob("*.py"))
HEX = re.compile(r"#[0-9a-fA-F]{3,8}\b")
NAMED = {
    *matplotlib.colors.CSS4_COLORS,
    *matplotlib.colors.TABLEAU_COLORS,
    *(f"C{number}" for number in range(10)),
}
SHORT = set(matplotlib.colors.BASE_COLORS)
COLOUR_WORDS = {
    "c",
    "color",
    "colour",
    "ec",
    "edgecolor",
    "edgecolors",
    "fc",
    "facecolor",
    "facecolors",
    "fill",
}
FILL_WORDS = {"fc", "facecolor", "facecolors", "fill"}
SATURATED = 0.2
"""HSV saturation. Paler fills may mean anything; fills at least this saturated stand for ranks."""


def tree(file: str) -> ast.Module:
    return ast.parse((LEARN / file).read_text(encoding="utf-8"))


def docstrings(module: ast.Module) -> set[int]:
    """The ids of strings that are statements: docstrings, and descriptions below constants."""
    alone = (node.value for node in ast.walk(module) if isinstance(node, ast.Expr))
    return {id(value) for value in alone if isinstance(value, ast.Constant)}


def named_colours(module: ast.Module) -> Iterator[str]:
    """The colours that a module names: in hex, by name, or by a letter or grey level as a colour argument."""
    apart = docstrings(module)
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield from HEX.findall(node.value)
            if node.value in NAMED:
                yield node.value
        if (
            isinstance(node, ast.keyword)
            and node.arg in COLOUR_WORDS
            and isinstance(node.value, ast.Constant)
        ):
            value = node.value.value
            if isinstance(value, str) and (value in SHORT or re.fullmatch(r"[\d.]+", value)):
                yield value


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


def saturated_names() -> set[str]:
    """The palette's single colours that are too saturated for any fill except a rank's."""
    return {
        name
        for name, value in vars(colours).items()
        if isinstance(value, str) and HEX.fullmatch(value) and saturation(value) >= SATURATED
    }


def test_no_other_file_names_a_colour_and_a_saturated_fill_is_a_ranks() -> None:
    saturated = saturated_names()
    for file in FILES:
        module = tree(file)
        found = sorted(set(named_colours(module))) if file != PALETTE else []
        assert not found, f"{file}, {found}: take names from learn/pictures/colours.py"
        found = sorted(set(fills(module)) & saturated)
        assert not found, f"{file}, {found}: say it by an edge, a mark or a pale fill"


def test_ranks_are_saturated_and_pale_fills_are_not() -> None:
    assert min(map(saturation, colours.RANKS)) >= SATURATED
    pale = (
        colours.CARD,
        colours.EMPTY,
        colours.FAINT,
        colours.MARKED,
        colours.WRONG_FILL,
        colours.RIGHT_FILL,
    )
    assert max(map(saturation, pale)) < SATURATED
    assert {"WRONG", "RIGHT", "SGD", "ADAMW", "MUON"} <= saturated_names()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('"""#ffffff, red"""', []),
        ('FILL = "#F0e68c"', ["#F0e68c"]),
        ('style = f"color:#123;width:{w}px"', ["#123"]),
        ('axes.plot(x, color="red")', ["red"]),
        ('axes.plot(x, c="k")', ["k"]),
        ('axes.plot(x, color="0.5")', ["0.5"]),
        ('axes.plot(x, color="C1")', ["C1"]),
        ('write("red alert", marker="k", to="#1", color=INK)', []),
    ],
)
def test_planted_colours_are_found(line: str, found: list[str]) -> None:
    assert list(named_colours(ast.parse(line))) == found


def test_planted_fills_are_found() -> None:
    planted = "rectangle(axes, 0, 0, 1, 1, WRONG if bad else CARD)\naxes.bar(x, y, facecolor=colours.MUON)"
    assert list(fills(ast.parse(planted))) == ["WRONG", "CARD", "MUON"]
    assert list(fills(ast.parse("axes.plot(x, y, color=MUON)"))) == []
