"""Predict, then reveal: a question, a control to answer it with, and a button that shows the answer.

In a kernel the answer stays hidden until the button is pressed; after that, each prediction gets a reply.
Without a kernel the answer is folded behind a line to click on. ``compare`` shows a typed prediction next to
the result of a run, folded until something was typed. Nothing is scored: exercises do that.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ipywidgets

from ..pictures.picture import Picture
from .shell import mime_bundle, show_in

Reply = Callable[[Any], str]


class Reveal:
    """A question above a control; ``judge`` replies to a prediction in a sentence, ``answer`` is the picture.

    >>> from muon_tutorial.learn.pictures.picture import blank, finish
    >>> card = finish(blank(20, 10)[0], "card", "two dots")
    >>> judge = lambda n: "Yes." if n == 2 else "No."
    >>> asked = Reveal("How many?", ipywidgets.IntSlider(1, 0, 3), judge, card)
    >>> "two dots" in asked.canvas.value
    False
    >>> asked.button.click()
    >>> asked.controls["prediction"].value = 2
    >>> "Yes." in asked.canvas.value, "two dots" in asked.canvas.value
    (True, True)
    """

    def __init__(self, question: str, control: Any, judge: Reply, answer: Picture) -> None:
        self.question, self.answer, self.judge = question, answer, judge
        self.controls: Mapping[str, Any] = {"prediction": control}
        self.button = ipywidgets.Button(description="Reveal")
        self.canvas = ipywidgets.HTML()
        self.picture: Picture | None = None
        self.box = ipywidgets.VBox([ipywidgets.HTML(_paragraph(question)), control, self.button, self.canvas])
        self.button.on_click(self._reveal)
        control.observe(self._again, names="value")

    def _reveal(self, pressed: object = None) -> None:
        self.picture = self.answer
        self._again()

    def _again(self, change: object = None) -> None:
        if self.picture is not None:
            said = self.controls["prediction"]
            show_in(self.canvas, lambda: _paragraph(self.judge(said.value)) + self.answer.html)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        page = FoldedPicture("Reveal", self.answer, self.question)
        return mime_bundle(self.box, repr(self), page._repr_html_())

    def __repr__(self) -> str:
        return f"{self.question} (Predict first.) {self.answer!r}"


def predict(
    question: str, control: Any, judge: Reply, answer: Picture, live: bool = True
) -> Reveal | FoldedPicture:
    """The question with its control; with ``live=False``, the question with its answer folded."""
    return Reveal(question, control, judge, answer) if live else FoldedPicture("Reveal", answer, question)


class FoldedPicture:
    """A picture folded behind a line to click on, below an optional question; needs no kernel or script."""

    def __init__(self, title: str, picture: Picture, question: str = "") -> None:
        self.title, self.picture, self.question = title, picture, question

    def _repr_html_(self) -> str:
        asked = _paragraph(self.question) if self.question else ""
        return f"{asked}<details><summary>{self.title}</summary>{self.picture.html}</details>"

    def __repr__(self) -> str:
        return f"{self.question} {self.picture!r}".strip()


@dataclass(frozen=True, slots=True)
class ComparedPrediction:
    """Predictions and a run's results, with an optional picture; folded until a prediction is typed."""

    predicted: Mapping[str, Any]
    found: Mapping[str, Any]
    picture: Picture | None = None
    because: str = ""

    @property
    def is_open(self) -> bool:
        """Whether nothing has been predicted yet."""
        return all(self.predicted.get(name, ...) is ... for name in self.found)

    def _repr_html_(self) -> str:
        rows = "".join(self._row(name) for name in self.found)
        table = f"<table><tr><th></th><th>you said</th><th>the run gave</th><th></th></tr>{rows}</table>"
        shown = table + self._reason(_paragraph) + (self.picture.html if self.picture else "")
        if not self.is_open:
            return shown
        said = "You have not predicted yet. Show what the run gave"
        return f"<details><summary>{said}</summary>{shown}</details>"

    def _reason(self, written: Callable[[str], str] = str) -> str:
        """Why the result is what it is; empty if all of it was predicted."""
        right = all(is_same(self.predicted.get(name, ...), found) for name, found in self.found.items())
        return written(self.because) if self.because and not right else ""

    def _row(self, name: str) -> str:
        cells = (name, *self._sides(name))
        return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"

    def _sides(self, name: str) -> tuple[str, str, str]:
        mine, found = self.predicted.get(name, ...), self.found[name]
        if mine is ...:
            return "–", str(found), ""
        return str(mine), str(found), "as you said" if is_same(mine, found) else "not as you said"

    def __repr__(self) -> str:
        rows = [f"{name}: you said {mine}, the run gave {found}. {verdict}".strip()
                for name in self.found for mine, found, verdict in [self._sides(name)]]  # fmt: skip
        drawn = [textwrap.fill(self.picture.alt, 100)] if self.picture else []
        reason = [textwrap.fill(self._reason(), 100)] if self._reason() else []
        return "\n".join([*rows, *reason, *drawn])


def is_same(mine: Any, found: Any) -> bool:
    """Whether a prediction is right; case, list or tuple, and an error of 1% in a float do not matter.

    >>> is_same(["Gaussian", "rows"], ("gaussian", "rows")), is_same(0.7, 0.701), is_same(700, 701)
    (True, True, False)
    """
    if isinstance(mine, str) and isinstance(found, str):
        return mine.strip().casefold() == found.casefold()
    if isinstance(mine, list | tuple) and isinstance(found, list | tuple):
        return len(mine) == len(found) and all(is_same(a, b) for a, b in zip(mine, found, strict=True))
    if isinstance(found, float) and isinstance(mine, int | float):
        return math.isclose(mine, found, rel_tol=0.01)
    return bool(mine == found)


def compare(
    predicted: Mapping[str, Any], found: Mapping[str, Any], picture: Picture | None = None, because: str = ""
) -> ComparedPrediction:
    """Predictions by name (``...`` if there is none), shown next to a run's results.

    ``because`` gives the reason, and is shown if a prediction was wrong or missing.

    >>> compare({"messages": 3}, {"messages": 4})
    messages: you said 3, the run gave 4. not as you said
    >>> "<details>" in compare({"messages": ...}, {"messages": 4})._repr_html_()
    True
    """
    return ComparedPrediction(predicted, found, picture, because)


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
