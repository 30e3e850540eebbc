"""A grid of buttons, one a rank: the pressed one, its row and its column light up.

Knows ipywidgets 7.7 and 8. A ``Shell`` takes it as a control, for its ``value`` is the rank that is pressed.
"""

from __future__ import annotations

from functools import partial

import ipywidgets
import traitlets

from ...plan.grid import Grid

PRESSED, ROW, COLUMN, OTHER = "#f0e68c", "#cfe3f5", "#f7d9bf", "#eeeeee"


class RankButtons(ipywidgets.GridBox):
    """The ranks of a grid as buttons, a row for each dp position.

    >>> buttons = RankButtons(dp=2, tp=3)
    >>> buttons.children[4].click()
    >>> buttons.value, [button.style.button_color == ROW for button in buttons.children]
    (4, [False, False, False, True, False, True])
    """

    value = traitlets.Int(0)

    def __init__(self, dp: int, tp: int) -> None:
        self.places = Grid.of(dp=dp, tp=tp)
        size = ipywidgets.Layout(width="72px")
        buttons = [ipywidgets.Button(description=f"rank {rank}", layout=size) for rank in self.places.ranks]
        for rank, button in enumerate(buttons):
            button.on_click(partial(self._press, rank))
        layout = ipywidgets.Layout(grid_template_columns=f"repeat({tp}, 76px)", margin="4px 0 4px 94px")
        super().__init__(buttons, layout=layout)
        self._light()
        self.observe(self._light, names="value")

    def _press(self, rank: int, button: object) -> None:
        self.value = rank

    def _light(self, change: object = None) -> None:
        pressed = self.places.at(self.value)
        row, column = pressed.group("tp"), pressed.group("dp")
        for rank, button in enumerate(self.children):
            colour = ROW if rank in row else COLUMN if rank in column else OTHER
            button.style.button_color = PRESSED if rank == self.value else colour
            button.style.font_weight = "bold" if rank == self.value else "normal"
