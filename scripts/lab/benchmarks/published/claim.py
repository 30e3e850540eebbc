"""The record of one published figure, and its comparison with this package's figure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from muon_tutorial.errors import UsageError

Kind = Literal["counted", "computed", "seconds"]
"""Our figure comes from exact arithmetic, from random matrices, or (seconds) from a machine's file."""
Given = Literal["all", "some"]
Unit = Literal["×", "%", "ms", "MB", "GiB", ""]

TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure that somebody published.

    ``published`` is the number, as a fraction if ``unit`` is "%". If only words were published, ``published``
    is None and ``said`` holds the words. ``given`` is "all" if everything that decides the figure was
    published (shapes; for seconds also the hardware), otherwise "some"; ``assumed`` says what we filled in.
    ``ours`` computes our figure. ``why`` explains a difference; it is a function if the explanation contains
    figures. If a direction was claimed, figures must lie ``above`` or ``below`` that number.

    Raises:
        UsageError: the published number does not lie on the side that the claim names.
    """

    kind: Kind
    what: str
    published: float | None
    unit: Unit
    source: str
    link: str
    given: Given
    assumed: str
    ours: Callable[[], float]
    why: str | Callable[[], str] = ""
    said: str = ""
    above: float | None = None
    below: float | None = None

    def __post_init__(self) -> None:
        if self.published is not None and self.holds_for(self.published) is False:
            side = f"below {self.below}" if self.above is None else f"above {self.above}"
            raise UsageError(f"{self.what}: {self.published} does not lie {side}")

    def holds_for(self, number: float) -> bool | None:
        """Whether the claimed direction holds for a number; None if the claim has no direction."""
        if self.above is None:
            return None if self.below is None else number < self.below
        return number > self.above

    @property
    def as_published(self) -> str:
        return self.said or shown(self.published, self.unit)

    @property
    def reason(self) -> str:
        return self.why if isinstance(self.why, str) else self.why()


def read_claims() -> tuple[Claim, ...]:
    """The claims of ``claims.json``, in its order.

    There, a list such as ``["module.function", arguments …]`` is a call of a function in this folder.
    ``from`` tells a reader how a published number was computed.
    """
    held = json.loads(Path(__file__).with_name("claims.json").read_text(encoding="utf-8"))
    claims = []
    for row in held["claims"]:
        given: dict[str, Any] = {
            name: _called(it) if isinstance(it, list) else it for name, it in row.items() if name != "from"
        }
        for name in ("published", "assumed"):
            given[name] = given[name]() if callable(given[name]) else given[name]
        claims.append(Claim(**given, link=held["sources"][row["source"]]))
    return tuple(claims)


def _called(call: list[Any]) -> Callable[[], Any]:
    module, name = call[0].split(".")
    return partial(getattr(import_module(f".{module}", __package__), name), *call[1:])


@dataclass(frozen=True, slots=True)
class Comparison:
    """A claim and our figure. ``ratio`` is our number over the published one; None if there is none."""

    claim: Claim
    ours: float

    @property
    def ratio(self) -> float | None:
        published = self.claim.published
        return self.ours / published if published else None

    @property
    def same_sign(self) -> bool | None:
        """Whether our figure has the claimed direction; None if the claim has no direction."""
        return self.claim.holds_for(self.ours)

    @property
    def within(self) -> bool | None:
        """Whether both figures agree within a quarter; None if no number was published."""
        published = self.claim.published
        return None if published is None else abs(self.ours - published) <= TOLERANCE * published


def shown(number: float | None, unit: Unit) -> str:
    """A number with its unit, to three digits.

    >>> shown(0.0214, "%"), shown(1.2468, "×"), shown(1.00005, "×"), shown(642.0, "MB"), shown(None, "")
    ('2.14 %', '1.25×', '1.00005×', '642 MB', '–')
    """
    if number is None:
        return "–"
    scaled = 100 * number if unit == "%" else number
    if unit == "×" and 0 < abs(scaled - 1) < 0.005:
        return f"{scaled:.5f}×"
    digits = f"{scaled:,.0f}" if abs(scaled) >= 1000 and math.isfinite(scaled) else f"{scaled:.3g}"
    return f"{digits}{unit}" if unit in ("×", "") else f"{digits} {unit}"
