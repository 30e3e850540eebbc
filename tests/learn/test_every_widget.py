"""Every widget that a lesson displays shows at every position a picture with alt text, and no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from muon_tutorial.learn.pictures.picture import blank, finish
from muon_tutorial.learn.widgets.shell import Shell
from scripts.notebooks import read_text, sources
from scripts.shells import displayed, widget_cells

from ..exhaustive import left_out
from .drive_widget import FEW, MOST, alt_of_sound_picture, drive_shell

SLOW = {"11-a-grid-you-have-not-seen"}
"""Widgets that plan another grid at each position. A usual run leaves them to ``test_many_ranks.py``."""


@pytest.mark.live
@pytest.mark.parametrize(
    ("most", "parameters"),
    [
        pytest.param(FEW, {"steps": 1}, id="few"),
        left_out(MOST, {"steps": 1}, id="all"),
        left_out(FEW, {"steps": 1, "dp": 3}, id="another grid"),
    ],
)
@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem[:2])
def test_every_position_is_a_picture_with_words_of_its_own(
    source: Path, most: int, parameters: dict[str, int]
) -> None:
    notebook = read_text(source.read_text(encoding="utf-8"))
    cells = [cell for cell in widget_cells(notebook) if most == MOST or cell.id not in SLOW]
    for cell, shown in zip(cells, displayed(notebook, cells, parameters), strict=True):
        assert isinstance(shown, Shell), cell.id
        drive_shell(shown, most=most)


@pytest.mark.parametrize(
    "change", [("data:", "http://elsewhere/"), ("<img", "<script><img"), ("alt=", "title=")]
)
def test_a_picture_that_needs_more_than_itself_is_refused(change: tuple[str, str]) -> None:
    page = finish(blank(20, 10)[0], "a", "row 0 of rank 1").html
    assert alt_of_sound_picture(page) == "row 0 of rank 1"
    with pytest.raises((AssertionError, ValueError, KeyError)):
        alt_of_sound_picture(page.replace(*change))
