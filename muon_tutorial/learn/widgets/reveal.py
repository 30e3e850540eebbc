"""A reader's prediction beside a run's result, both folded until the reader predicts. Nothing is scored."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..exercises.judge import is_text
from ..pictures.picture import Picture

NOT_PREDICTED = "You have not predicted yet."


@dataclass(frozen=True, slots=True)
class ComparedPrediction:
    """Predictions and a run's results, with an optional picture; folded until a prediction is typed."""

    predicted: Mapping[str, Any]
    found: Mapping[str, Any]
    picture: Picture | None = None

    @property
    def is_open(self) -> bool:
        return all(self.predicted.get(name, ...) is ... for name in self.found)

    def _repr_html_(self) -> str:
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._rows())
        rows = "".join(f"<tr>{row}</tr>" for row in cells)
        table = f"<table><tr><th></th><th>you said</th><th>the run gave</th><th></th></tr>{rows}</table>"
        shown = table + (self.picture.html if self.picture else "")
        if not self.is_open:
            return shown
        return f"<details><summary>{NOT_PREDICTED} Show what the run gave</summary>{shown}</details>"

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """For each thing: name, prediction ("" if the lesson asks for none), result, verdict."""
        for name, found in self.found.items():
            mine = self.predicted.get(name, ...)
            said = "–" if name in self.predicted else ""
            verdict = "as you said" if is_same(mine, found) else "not as you said"
            verdict = "a number is asked for, not a text" if is_text(mine, found) else verdict
            yield name, *((said, str(found), "") if mine is ... else (str(mine), str(found), verdict))

    def __repr__(self) -> str:
        rows = []
        for name, mine, found, verdict in self._rows():
            asked = mine or name in self.predicted
            said = f"you said {mine}, the run gave {found}. {verdict}".strip() if asked else found
            rows.append(f"{name}: {said}")
        drawn = [textwrap.fill(self.picture.alt, 100)] if self.picture else []
        return "\n".join([*rows, *drawn])


def is_same(mine: Any, found: Any) -> bool:
    """Whether a prediction is right. Case does not count; a tuple equals a list; a float may be off by 1%."""
    if isinstance(mine, str) and isinstance(found, str):
        return mine.strip().casefold() == found.casefold()
    if isinstance(mine, list | tuple) and isinstance(found, list | tuple):
        return len(mine) == len(found) and all(is_same(a, b) for a, b in zip(mine, found, strict=True))
    if isinstance(found, float) and isinstance(mine, int | float):
        return math.isclose(mine, found, rel_tol=0.01)
    return bool(mine == found)


compare = ComparedPrediction
"""Predictions by name (``...`` if there is none), shown next to a run's results."""
