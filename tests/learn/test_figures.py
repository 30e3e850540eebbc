"""Pictures can be read, and say in words and letters what each rank holds."""

from __future__ import annotations

import torch

from muon_tutorial.learn.pictures import colours
from muon_tutorial.learn.pictures.holdings import name_contents, say_held
from muon_tutorial.plan.layout import Box

SHAPE = (12, 8)


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_ink_can_be_read_on_every_fill_and_fills_differ() -> None:
    fills = (
        colours.CARD,
        colours.EMPTY,
        colours.MARKED,
        colours.RIGHT_FILL,
        colours.WRONG_FILL,
        *colours.RANKS,
    )
    assert min(contrast(colours.INK, fill) for fill in fills) >= 4.5
    assert contrast(colours.QUIET, colours.CARD) >= 4.5
    assert len(set(colours.RANKS)) == len(colours.RANKS) == 8


def test_what_is_held_is_said_without_rows_that_are_not_there() -> None:
    assert say_held((Box((0, 0), SHAPE),), SHAPE) == "the whole matrix"
    past_the_end = Box((12, 0), (0, 8))
    assert say_held((past_the_end,), SHAPE) == say_held((), SHAPE) == "nothing"
    one_row = (Box((3, 0), (1, 8)), Box((4, 0), (1, 2)), past_the_end)
    assert say_held(one_row, SHAPE) == "row 3, all columns and row 4, columns 0 to 1"


def test_contents_are_named_by_their_bytes_and_letters_do_not_run_out() -> None:
    one, other = torch.zeros(4), torch.tensor([0.0, -0.0, 0.0, 0.0])
    assert name_contents([one, other, one.clone()]) == ["A", "B", "A"]
    assert name_contents([one.view(2, 2), one]) == ["A", "B"]
    names = name_contents([torch.tensor(number) for number in range(60)])
    assert len(set(names)) == 60
    assert names[26] == "A2"
