"""Thin shells: core controls over one picture. In a kernel they move; without one they are the picture.

Works with ipywidgets 7.7 and 8. A shell is given a pure function from the controls'
values to a ``Picture``.
"""

from __future__ import annotations

import html
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets

from ..pictures.picture import Picture

ERROR_MARK = "muon-tutorial-widget-error"
VIEW = "application/vnd.jupyter.widget-view+json"


class Shell:
    """Controls, and a picture that is drawn anew when one of them moves.

    A drawing that raises shows its error in place of the picture, where a reader and the guards see it.
    ``still`` is what a notebook without a kernel shows: one picture that says what the moving one would.

    >>> from muon_tutorial.learn.pictures.picture import blank, finish
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

    def at(self, **values: Any) -> Picture:
        """The picture at these values of the controls. None of them moves; an error is raised, not shown."""
        return self._draw(**values)

    def _redraw(self, change: object = None) -> None:
        show_in(self.canvas, self._page)

    def _page(self) -> str:
        self.picture = self._draw(**{name: control.value for name, control in self.controls.items()})
        return self.picture.html

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        still = self.still or self.picture
        return mime_bundle(self.box, repr(still), still.html if still else self.canvas.value)


def show_in(canvas: ipywidgets.HTML, page: Callable[[], str]) -> None:
    """Show a page; where making it raises, in its place an error that the guards know."""
    try:
        canvas.value = page()
    except Exception:
        said = f"This picture could not be drawn.\n{html.escape(traceback.format_exc())}"
        canvas.value = f'<pre title="{ERROR_MARK}">{said}</pre>'


def mime_bundle(box: ipywidgets.Box, text: str, page: str) -> dict[str, Any]:
    """What a notebook shows of controls: themselves in a kernel, a page or a text without one."""
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    return {"text/plain": text, "text/html": page, VIEW: view}


def show(draw: Callable[..., Picture], still: Picture, live: bool = True, **controls: Any) -> Shell | Picture:
    """The picture under its controls; where no kernel runs, or with ``live=False``, the ``still``."""
    return Shell(draw, still, **controls) if live else still


def stops(control: Any) -> dict[str, Any]:
    """Every value that a control can take, by the words on it.

    >>> stops(slider("row", last=2)), stops(choice("rank", {"rank 0": 0, "rank 1": 1}))
    ({'0': 0, '1': 1, '2': 2}, {'rank 0': 0, 'rank 1': 1})

    Raises:
        TypeError: for a control that is not a slider over whole numbers, a switch, a choice, or a box of
            buttons whose value is the number of the pressed one.
    """
    if hasattr(control, "options"):
        pairs = [option if isinstance(option, tuple) else (option, option) for option in control.options]
        return {str(label): value for label, value in pairs}
    if isinstance(control.value, bool):
        return {"off": False, "on": True}
    if isinstance(control, ipywidgets.Box):
        return {button.description: number for number, button in enumerate(control.children)}
    if isinstance(control.value, int) and hasattr(control, "max"):
        values = range(control.min, control.max + 1, getattr(control, "step", 1))
        return {str(value): value for value in values}
    raise TypeError(f"the values of a {type(control).__name__} cannot be counted")


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
        layout=ipywidgets.Layout(display="flex"),  # the label beside the buttons, not above them
        style={"button_width": "76px", "description_width": "90px"},
    )
