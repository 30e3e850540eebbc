"""Reads and writes a parameter group's ``orthogonalize``: a name, or ``"auto"`` with a choice per shape.

Choices are text, so they are compared across ranks, saved and loaded like any other hyperparameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ..errors import UsageError
from ..newton_schulz import Coefficients, coefficients_per_step
from .named import DROP_INS, KELLER_JORDAN_FIVE, STOCK, find_recipe

AUTO = "auto"
"""The name that leaves the choice to a calibration."""

CANDIDATES = (STOCK, *DROP_INS)
"""The recipes that ``"auto"`` chooses from."""

Shape = tuple[int, int]
"""The smaller and the larger side of a matrix."""


def shape_of(rows: int, columns: int) -> Shape:
    """Return the shape that a matrix and its transpose share."""
    return min(rows, columns), max(rows, columns)


def is_auto(orthogonalize: Any) -> bool:
    """Whether this is ``"auto"``, with or without choices."""
    return isinstance(orthogonalize, str) and orthogonalize.split(" ")[0] == AUTO


def write_choices(choices: Mapping[Shape, str]) -> str:
    """Write choices as text, the form in which parameter groups and checkpoints hold them.

    >>> write_choices({(768, 3072): "gram", (128, 128): "stock"})
    'auto 128x128=stock 768x3072=gram'
    """
    return " ".join([AUTO, *(f"{n}x{length}={choices[n, length]}" for n, length in sorted(choices))])


@cache
def read_choices(text: str) -> Mapping[Shape, str]:
    """Read what ``write_choices`` wrote.

    Raises:
        UsageError: ``text`` has another form, or names a recipe that is not among ``CANDIDATES``.

    >>> read_choices("auto 128x128=stock")
    {(128, 128): 'stock'}
    """
    choices: dict[Shape, str] = {}
    for word in text.split()[1:]:
        sides, _, name = word.partition("=")
        n, _, length = sides.partition("x")
        if name not in CANDIDATES or not (n.isdecimal() and length.isdecimal()):
            raise UsageError(
                f"orthogonalize={text!r} must give a recipe for each shape, as in 'auto 128x128=stock'; the "
                f"recipes are {', '.join(CANDIDATES)}"
            )
        choices[shape_of(int(n), int(length))] = name
    return choices


@cache
def name_for(orthogonalize: str, rows: int, columns: int) -> str:
    """Return the name of the recipe that a group's ``orthogonalize`` gives for a matrix. Raises
    ``UsageError`` if ``"auto"`` has chosen no recipe for its shape."""
    if not is_auto(orthogonalize):
        return orthogonalize
    choices, shape = read_choices(orthogonalize), shape_of(rows, columns)
    if shape not in choices:
        raise UsageError(
            f"orthogonalize={orthogonalize!r} has no choice for a matrix of shape {(rows, columns)}"
        )
    return choices[shape]


def check_orthogonalize(group: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` if the name is unknown, or the group also gives coefficients or steps."""
    name = group.get("orthogonalize", STOCK)
    if name == STOCK:
        return
    if is_auto(name):
        read_choices(name)
    else:
        find_recipe(name)
    given: Coefficients = group["ns_coefficients"]
    if coefficients_per_step(given, group["ns_steps"]) != KELLER_JORDAN_FIVE:
        raise UsageError(
            f"orthogonalize={name!r} brings its own coefficients and steps: leave ns_coefficients and "
            f"ns_steps as they are, or use orthogonalize={STOCK!r}"
        )
