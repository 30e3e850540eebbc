"""What a parameter group says of Newton–Schulz: a name, or ``"auto"`` with what was chosen for each shape.

A choice is text, so that it is compared across ranks, saved and loaded as any other hyperparameter is.
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
"""What it chooses among."""

Shape = tuple[int, int]
"""The smaller side of a matrix, and the larger one."""


def shape_of(rows: int, columns: int) -> Shape:
    """Return the shape that a matrix and its transpose share."""
    return min(rows, columns), max(rows, columns)


def is_auto(orthogonalize: Any) -> bool:
    """Whether this is ``"auto"``, alone or with choices."""
    return isinstance(orthogonalize, str) and orthogonalize.split(" ")[0] == AUTO


def write_choices(choices: Mapping[Shape, str]) -> str:
    """Write choices as the text that a parameter group holds, and a checkpoint with it.

    >>> write_choices({(768, 3072): "gram", (128, 128): "stock"})
    'auto 128x128=stock 768x3072=gram'
    """
    return " ".join([AUTO, *(f"{n}x{length}={choices[n, length]}" for n, length in sorted(choices))])


@cache
def read_choices(text: str) -> Mapping[Shape, str]:
    """Read what ``write_choices`` wrote.

    Raises:
        UsageError: it is none of its texts, or names what is no candidate.

    >>> read_choices("auto 128x128=stock")
    {(128, 128): 'stock'}
    """
    choices: dict[Shape, str] = {}
    for word in text.split()[1:]:
        sides, _, name = word.partition("=")
        n, _, length = sides.partition("x")
        if name not in CANDIDATES or not (n.isdecimal() and length.isdecimal()):
            raise UsageError(
                f"orthogonalize={text!r} must say shapes, and which of {', '.join(CANDIDATES)} each takes"
            )
        choices[shape_of(int(n), int(length))] = name
    return choices


@cache
def name_for(orthogonalize: str, rows: int, columns: int) -> str:
    """Return the name that a group's ``orthogonalize`` gives a matrix.

    Raises:
        UsageError: ``"auto"`` has not chosen for its shape.
    """
    if not is_auto(orthogonalize):
        return orthogonalize
    chosen = read_choices(orthogonalize).get(shape_of(rows, columns))
    if chosen is None:
        raise UsageError(
            f"orthogonalize={orthogonalize!r} has chosen nothing for a matrix of shape {(rows, columns)}"
        )
    return chosen


def check_orthogonalize(group: Mapping[str, Any]) -> None:
    """Refuse a name that is unknown, and coefficients or steps beside a recipe that brings its own.

    Raises:
        UsageError: saying which.
    """
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
