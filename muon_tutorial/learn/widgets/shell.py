"""Controls over a picture. Without a kernel, only the picture is shown. For ipywidgets 7.7 and 8."""

from __future__ import annotations

import functools
import html
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import ipywidgets
import traitlets

from ...plan.grid import Grid
from ..pictures.colours import DP_GROUP, EMPTY, TP_GROUP, rank_colour
from ..pictures.picture import Picture

ERROR_MARK = "muon-tutorial-widget-error"
VIEW = "application/vnd.jupyter.widget-view+json"


class Shell:
    """Controls, and a picture that is redrawn when one of them changes.

    An error in drawing is shown in place of the picture, so that readers and checks see it. ``still`` is the
    one picture that a notebook shows without a kernel, in place of the changing one.

    >>> from muon_tutorial.learn.pictures.picture import blank, finish
    >>> shell = Shell(lambda s: finish(blank(s, 10)[0], "line", f"a card of {s}"), s=slider("", 30, 10))
    >>> shell.controls["s"].value = 20
    >>> shell.picture.alt, "a card of 20" in shell.canvas.value
    ('a card of 20', True)
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
        """The picture at these values. The controls do not move, and errors are raised instead of shown."""
        return self._draw(**values)

    def _redraw(self, change: object = None) -> None:
        try:
            self.picture = self._draw(**{name: control.value for name, control in self.controls.items()})
            self.canvas.value = self.picture.html
        except Exception:
            said = f"This picture could not be drawn.\n{html.escape(traceback.format_exc())}"
            self.canvas.value = f'<pre title="{ERROR_MARK}">{said}</pre>'  # marked, so that checks find it

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """With a kernel, a notebook displays the controls; without one, a picture or its alt text."""
        still = self.still or self.picture
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        page = still.html if still else self.canvas.value
        return {"text/plain": repr(still), "text/html": page, VIEW: view}


def show(draw: Callable[..., Picture], still: Picture, live: bool = True, **controls: Any) -> Shell | Picture:
    """The picture under its controls; without a kernel, or with ``live=False``, only ``still``."""
    return Shell(draw, still, **controls) if live else still


def stops(control: Any) -> dict[str, Any]:
    """Every value that a control can take, by its label.

    Raises TypeError if the control is no slider over whole numbers, no choice and no box of buttons.
    """
    if hasattr(control, "options"):
        pairs = [option if isinstance(option, tuple) else (option, option) for option in control.options]
        return {str(label): value for label, value in pairs}
    if isinstance(control.value, int) and hasattr(control, "max"):
        values = range(control.min, control.max + 1, getattr(control, "step", 1))
        return {str(value): value for value in values}
    if isinstance(control, ipywidgets.Box):
        return {button.description: number for number, button in enumerate(control.children)}
    raise TypeError(f"the values of a {type(control).__name__} cannot be counted")


def slider(label: str, last: int, first: int = 0, start: int | None = None) -> Any:
    """A slider over whole numbers that reports while it moves."""
    begin, layout = first if start is None else start, ipywidgets.Layout(width="420px")
    look: Any = {"layout": layout, "style": {"description_width": "90px"}}
    return ipywidgets.IntSlider(begin, first, last, description=label, **look)


def choice(label: str, options: Mapping[str, Any] | Iterable[Any], width: int = 76) -> Any:
    """One button per option, ``width`` pixels wide; if ``options`` is no mapping, they are the labels."""
    named = options if isinstance(options, Mapping) else {str(option): option for option in options}
    return ipywidgets.ToggleButtons(
        options=list(named.items()),
        description=label,
        layout=ipywidgets.Layout(display="flex"),  # puts the label next to the buttons, not above them
        style={"button_width": f"{width}px", "description_width": "90px"},
    )


EDGES = {"tp": f"3px solid {TP_GROUP}", "dp": f"3px dashed {DP_GROUP}"}
"""The edges of buttons in the pressed rank's tp group (its row) and in its dp group (its column)."""
_NO_EDGE = f"3px solid {EMPTY}"


class RankButtons(ipywidgets.GridBox):
    """The ranks of a grid as buttons, one row per dp coordinate.

    >>> buttons = RankButtons(dp=2, tp=3)
    >>> buttons.children[4].click()
    >>> buttons.value, [button.layout.border_top == EDGES["tp"] for button in buttons.children]
    (4, [False, False, False, True, False, True])
    """

    value = traitlets.Int(0)

    def __init__(self, dp: int, tp: int) -> None:
        self.places = Grid.of(dp=dp, tp=tp)
        buttons = []
        for rank in self.places.ranks:
            size = ipywidgets.Layout(width="76px", height="36px")
            buttons.append(ipywidgets.Button(description=f"rank {rank}", layout=size))
            buttons[-1].on_click(partial(self._press, rank))
        layout = ipywidgets.Layout(grid_template_columns=f"repeat({tp}, 80px)", margin="4px 0 4px 94px")
        super().__init__(buttons, layout=layout)
        self._light()
        self.observe(self._light, names="value")

    def _press(self, rank: int, button: object) -> None:
        self.value = rank

    def _light(self, change: object = None) -> None:
        pressed = self.places.at(self.value)
        for rank, button in enumerate(self.children):
            is_pressed = rank == pressed.rank
            button.style.button_color = rank_colour(rank) if is_pressed else EMPTY
            button.style.font_weight = "bold" if is_pressed else "normal"
            shared = [axis for axis in EDGES if rank in pressed.group(axis) and not is_pressed]
            button.layout.border = EDGES[shared[0]] if shared else _NO_EDGE


class Player(ipywidgets.HBox):
    """A play button and a slider over whole numbers. A ``Shell`` takes it as a control with a ``value``."""

    value = traitlets.Int(0)

    def __init__(self, label: str, last: int, interval: int = 700, first: int = 0) -> None:
        self.slider = slider(label, last, first)
        self.button = ipywidgets.Play(value=first, min=first, max=last, step=1, interval=interval)
        self.link = ipywidgets.jslink((self.button, "value"), (self.slider, "value"))
        super().__init__([self.button, self.slider])
        self.description, self.min, self.max = label, first, last
        self.value = first
        ipywidgets.link((self.slider, "value"), (self, "value"))


def play(
    draw: Callable[..., Picture],
    last: int,
    still: Picture,
    live: bool = True,
    *,
    label: str = "moment",
    interval: int = 700,
    first: int = 0,
    **controls: Any,
) -> Shell | Picture:
    """A film of ``draw(moment=first … last, …)`` under its controls; without a kernel, only ``still``.

    ``draw`` is called once per combination of values. ``label`` is the name of the keyword argument that
    tells ``draw`` the moment. ``interval``, milliseconds per picture, must be longer than drawing takes,
    which should be at most 100.
    """
    # the film comes first, because a page with room for few pictures keeps only the first control
    others = {name: control for name, control in controls.items() if name != label}
    return show(functools.cache(draw), still, live, **{label: Player(label, last, interval, first)}, **others)
