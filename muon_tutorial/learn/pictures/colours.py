"""One meaning for each colour in the whole course. No other file of the lessons names a colour.

A saturated fill stands for a rank, a hatch or a label for a place along tp, an outline for a group of ranks,
and a line's colour for an optimizer. Words say what is right or wrong; an edge, mark or pale fill repeats it.
"""

from __future__ import annotations

CARD = "#ffffff"
"""The background of every picture, and the fill of things that belong to no particular rank."""
INK = "#1b1b1b"
QUIET = "#595959"
"""Less important words and lines."""
EMPTY = "#ececec"
"""Things not held by this rank, zeros, and padding."""
FAINT = "#e3e3e3"
"""Lines of a grid behind a plot."""

RANKS = ("#8cc9f0", "#f4b95f", "#7fcfb4", "#dda6c6", "#f0e68c", "#f0936a", "#b9d36c", "#a9b8f4")
"""The fill of each rank."""
TP_HATCHES = ("", "///", "...", "\\\\\\", "xx", "|||", "ooo", "--")
"""The hatch of each place along tp, in pictures that show places."""

WRONG = "#b00020"
RIGHT = "#00795a"
WRONG_FILL, RIGHT_FILL = "#fae3e3", "#e3f1ea"
"""Backgrounds of the words that say right or wrong."""
MARKED = "#dfe3ea"
"""The thing that the text is about: a changed line, a chosen button."""
DP_GROUP = "#0072b2"
"""The outline of ranks that differ only along dp."""
TP_GROUP = "#c04e00"
"""The outline of ranks that differ only along tp."""

SGD, ADAMW, MUON, OTHER = "#c04e00", "#0072b2", "#00795a", "#8f3f71"
"""Lines of plots: the three optimizers, and anything else compared with them."""


def rank_colour(rank: int) -> str:
    """The fill that stands for a rank. Colours repeat after eight, so a label always says the rank, too."""
    return RANKS[rank % len(RANKS)]
