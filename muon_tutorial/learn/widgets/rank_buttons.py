"""A grid of buttons, one a rank: the pressed one has its colour, its row and its column an edge.

Knows ipywidgets 7.7 and 8. A ``Shell`` takes it as a control, for its ``value`` is the rank that is pressed.
"""

from __future__ import annotations

from functools import partial

import ipywidgets
import traitlets

from ...plan.grid import Grid
from ..pictures.colours import DP_GROUP, EMPTY, TP_GROUP, rank_colour

EDGES = {"tp": f"3px solid {TP_GROUP}", "dp": f"3px dashed {DP_GROUP}"}
"""The edge of a button in the pressed rank's tp group, its row, and in its dp group, its column."""
_NO_EDGE = f"3px solid {EMPTY}"


class RankButtons(ipywidgets.GridBox):
    """The ranks of a grid as buttons, a row for each dp coordinate.

    >>> buttons = RankButtons(dp=2, tp=3)
    >>> buttons.children[4].click()
    >>> buttons.value, [button.layout.border_top == EDGES["tp"] for button in buttons.children]
    (4, [False, False, False, True, False, True])
    """

    value = traitlets.Int(0)

    def __init__(self, dp: int, tp: int) -> None:
        self.places = Grid.of(dp=dp, tp=tp)
        buttons = [_button(rank) for rank in self.places.ranks]
        for rank, button in enumerate(buttons):
            button.on_click(partial(self._press, rank))
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


def _button(rank: int) -> ipywidgets.Button:
    size = ipywidgets.Layout(width="76px", height="36px")
    return ipywidgets.Button(description=f"rank {rank}", layout=size)
