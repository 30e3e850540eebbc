"""A film: a slider with a play button beside it, over pictures that are drawn once each.

Knows ipywidgets 7.7 and 8. Button and slider are linked in the browser; each stop of the slider asks the
kernel for one picture, and what has been drawn before is not drawn again. Without a kernel there is a still
picture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ipywidgets
import traitlets

from ..pictures.picture import Picture
from .shell import Shell, show, slider


class Player(ipywidgets.HBox):
    """A play button and a slider over whole numbers. A ``Shell`` takes it as a control, for its ``value``.

    >>> player = Player("moment", last=3)
    >>> player.slider.value = 2
    >>> player.value, player.options[-1]
    (2, ('3', 3))
    """

    value = traitlets.Int(0)

    def __init__(self, label: str, last: int, interval: int = 700, first: int = 0) -> None:
        self.slider = slider(label, last, first)
        self.button = ipywidgets.Play(value=first, min=first, max=last, step=1, interval=interval)
        self.link = ipywidgets.jslink((self.button, "value"), (self.slider, "value"))
        super().__init__([self.button, self.slider])
        self.description = label
        self.value = first
        ipywidgets.link((self.slider, "value"), (self, "value"))

    @property
    def options(self) -> list[tuple[str, int]]:
        """Every stop, by the words on it."""
        return [(str(stop), stop) for stop in range(self.slider.min, self.slider.max + 1)]


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
    """A film of ``draw(moment=first … last, …)`` under its controls; the ``still`` where no kernel runs.

    ``draw`` is given the moment by the name of ``label``, beside the other controls' values, and is called
    once for each of their combinations. ``interval`` is milliseconds from a picture to the next: leave it
    longer than a picture takes, which should be 0.1 s at most.
    """
    # the film comes first: a page that has room for few pictures keeps the first control
    others = {name: control for name, control in controls.items() if name != label}
    return show(functools.cache(draw), still, live, **{label: Player(label, last, interval, first)}, **others)
