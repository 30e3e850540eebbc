"""One published figure, and what the planner says of the same: a record, and how the two are compared.

Knows numbers and words; every claim brings a function that computes its figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...errors import UsageError

Side = Literal["above", "below"]
Given = Literal["all", "some"]
Unit = Literal["×", "%", "ms", "MB", ""]

TOLERANCE = 0.25
_SCALES = {"%": 100.0}


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure that somebody published.

    ``published`` is the number, a part of one where ``unit`` is "%"; None where words alone were published,
    which ``said`` then holds. The statement would turn round at ``turns``; it lies on that ``side`` of it.
    ``given`` says whether everything that decides the figure was published (shapes; for seconds the hardware
    too), so that numbers can be compared, or only ``some`` of it. ``assumed`` is what was filled in, and
    ``ours`` computes our side from the planner. ``why`` says where a difference comes from.

    Raises:
        UsageError: the published number does not lie on the side that the claim names.
    """

    what: str
    published: float | None
    unit: Unit
    source: str
    link: str
    turns: float
    side: Side
    given: Given
    assumed: str
    ours: Callable[[], float]
    why: str = ""
    said: str = ""

    def __post_init__(self) -> None:
        if self.published is not None and not lies(self.published, self.turns, self.side):
            raise UsageError(f"{self.what}: {self.published} does not lie {self.side} {self.turns}")

    @property
    def as_published(self) -> str:
        """The figure in a few characters."""
        return self.said or shown(self.published, self.unit)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A claim with our side computed. ``ratio`` is ours over the published, None where there is none."""

    claim: Claim
    ours: float

    @property
    def ratio(self) -> float | None:
        """Ours over the published figure."""
        published = self.claim.published
        return self.ours / published if published else None

    @property
    def same_sign(self) -> bool:
        """Whether the planner says the same, were it only in direction."""
        return lies(self.ours, self.claim.turns, self.claim.side)

    @property
    def within(self) -> bool | None:
        """Whether both agree within a quarter; None where not all that decides the figure was published."""
        published = self.claim.published
        if published is None or self.claim.given != "all":
            return None
        return abs(self.ours - published) <= TOLERANCE * published

    @property
    def agrees(self) -> bool:
        """Whether nothing speaks against it: the same sign, and within a quarter where that can be asked."""
        return self.same_sign and self.within is not False


def lies(number: float, turns: float, side: Side) -> bool:
    """Whether a number lies on a side of another.

    >>> lies(1.2, 1.0, "above"), lies(1.0, 1.0, "above")
    (True, False)
    """
    return number > turns if side == "above" else number < turns


def shown(number: float | None, unit: Unit) -> str:
    """A number with its unit, in three digits.

    >>> shown(0.0214, "%"), shown(1.2468, "×"), shown(1.00005, "×"), shown(642.0, "MB"), shown(None, "")
    ('2.14 %', '1.25×', '1.00005×', '642 MB', '–')
    """
    if number is None:
        return "–"
    scaled = number * _SCALES.get(unit, 1.0)
    if unit == "×" and 0 < abs(scaled - 1) < 0.005:
        return f"{scaled:.5f}×"
    digits = f"{scaled:,.0f}" if abs(scaled) >= 1000 and math.isfinite(scaled) else f"{scaled:.3g}"
    return f"{digits}{unit}" if unit in ("×", "") else f"{digits} {unit}"
