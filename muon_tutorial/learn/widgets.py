"""Thin shells: core controls over one picture. In a kernel they move; without one they are the picture.

Knows ipywidgets 7.7 and 8. Refuses to know what is drawn: a shell is given a pure function from the controls'
values to a ``Picture``.
"""

from __future__ import annotations

import html
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets

from .guards import ERROR_MARK
from .picture import Picture

_VIEW = "application/vnd.jupyter.widget-view+json"


class Shell:
    """Controls, and a picture that is drawn anew when one of them moves.

    A drawing that raises shows its error in place of the picture, where a reader and the guards see it.
    ``still`` is what a notebook without a kernel shows: one picture that says what the moving one would.

    >>> from muon_tutorial.learn.picture import blank, finish
    >>> def draw(size):
    ...     return finish(blank(size, 10)[0], "line", f"a card of {size}")
    >>> shell = Shell(draw, size=ipywidgets.IntSlider(20, 10, 30))
    >>> shell.controls["size"].value = 30
    >>> shell.picture.alt, "a card of 30" in shell.canvas.value
    ('a card of 30', True)
    """

    def __init__(self, draw: Callable[..., Picture], still: Picture | None = None, **controls: Any) -> None:
        self.controls: Mapping[str, Any] = controls
        self.still = still
        self.canvas = ipywidgets.HTML()
        self.picture: Picture | None = None
        self.box = ipywidgets.VBox([*controls.values(), self.canvas])
        self._draw = draw
        for control in controls.values():
            control.observe(self._redraw, names="value")
        self._redraw()

    def _redraw(self, change: object = None) -> None:
        try:
            self.picture = self._draw(**{name: control.value for name, control in self.controls.items()})
            self.canvas.value = self.picture.html
        except Exception:
            self.canvas.value = _error_card(traceback.format_exc())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        still = self.still or self.picture
        page = still.html if still else self.canvas.value
        return {"text/plain": repr(still), "text/html": page, _VIEW: view}


def _error_card(text: str) -> str:
    return f'<pre title="{ERROR_MARK}">This picture could not be drawn.\n{html.escape(text)}</pre>'


def show(draw: Callable[..., Picture], still: Picture, live: bool = True, **controls: Any) -> Shell | Picture:
    """The picture under its controls; where no kernel runs, or with ``live=False``, the ``still``."""
    return Shell(draw, still, **controls) if live else still


def slider(label: str, last: int, first: int = 0, start: int | None = None) -> Any:
    """A slider over whole numbers that reports while it moves."""
    return ipywidgets.IntSlider(
        value=first if start is None else start,
        min=first,
        max=last,
        description=label,
        continuous_update=True,
        layout=ipywidgets.Layout(width="420px"),
        style={"description_width": "90px"},
    )


def choice(label: str, options: Mapping[str, Any]) -> Any:
    """One button for each option, one of them pressed."""
    return ipywidgets.ToggleButtons(
        options=list(options.items()),
        description=label,
        style={"button_width": "76px", "description_width": "90px"},
    )
