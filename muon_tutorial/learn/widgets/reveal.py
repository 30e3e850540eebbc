"""Predict, then reveal: a question, a control to answer it with, and a button that shows how it is.

In a kernel the answer stays hidden until the button is pressed; from then on, each prediction gets a reply.
Without one, it is folded behind a line to click on. Nothing is scored: an exercise does that.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets

from ..pictures.picture import Picture
from .shell import mime_bundle, show_in

Reply = Callable[[Any], str]


class Reveal:
    """A question above a control; ``judge`` answers a prediction in a sentence, ``answer`` is the picture.

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
            show_in(self.canvas, self._reply)

    def _reply(self) -> str:
        return _paragraph(self.judge(self.controls["prediction"].value)) + self.answer.html

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        page = FoldedPicture("Reveal", self.answer, self.question)
        return mime_bundle(self.box, repr(self), page._repr_html_())

    def __repr__(self) -> str:
        return f"{self.question} (Predict first.) {self.answer!r}"


def predict(
    question: str, control: Any, judge: Reply, answer: Picture, live: bool = True
) -> Reveal | FoldedPicture:
    """The question with its control; with ``live=False``, with its answer folded."""
    return Reveal(question, control, judge, answer) if live else FoldedPicture("Reveal", answer, question)


class FoldedPicture:
    """A picture behind a line to click on, perhaps below a question; it needs no kernel and no script."""

    def __init__(self, title: str, picture: Picture, question: str = "") -> None:
        self.title, self.picture, self.question = title, picture, question

    def _repr_html_(self) -> str:
        asked = _paragraph(self.question) if self.question else ""
        return f"{asked}<details><summary>{self.title}</summary>{self.picture.html}</details>"

    def __repr__(self) -> str:
        return f"{self.question} {self.picture!r}".strip()


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
