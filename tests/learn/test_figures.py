"""Pictures: one <img> with alt text, the same bytes for the same data, unique ids, readable ink."""

from __future__ import annotations

import base64
import re
import xml.dom.minidom

import pytest

from muon_tutorial.learn.first_look.on_ranks import plan_of
from muon_tutorial.learn.first_look.pictures import draw_grid
from muon_tutorial.learn.pictures import colours, picture
from muon_tutorial.learn.pictures.holdings import RankBoxes, momentum_holdings, say_held
from muon_tutorial.plan.layout import Box

SHAPE = (12, 8)


def draw(name: str = "one", dp: int = 2, tp: int = 2) -> picture.Picture:
    plan = plan_of(dp, tp)
    return draw_grid(plan.grid, momentum_holdings(plan), "The momentum", "by holder", name)


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


def test_a_picture_is_one_img_that_brings_everything_in_the_same_bytes_for_the_same_data() -> None:
    assert draw().svg == draw().svg
    html = draw().html
    assert re.fullmatch(r'<img alt="[^"<>]{40,}" width="\d+" src="data:image/svg\+xml;base64,[^"]+">', html)
    svg = base64.b64decode(html.split("base64,")[1][:-2]).decode()
    xml.dom.minidom.parseString(svg)
    assert not re.search(r"@media|currentColor|var\(|<script|https?://(?!www\.w3\.org)", svg)
    assert picture.CARD in svg


def test_ids_are_prefixed_and_every_reference_has_its_id() -> None:
    svg = draw("mine").svg
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert ids
    assert all(name.startswith("mine-") for name in ids)
    assert set(re.findall(r'href="#([^"]+)"', svg)) | set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids


def test_alt_text_is_made_from_the_data_and_escaped() -> None:
    assert "holds rows 24 to 47, columns 32 to 63" in draw().alt
    assert draw().alt == repr(draw()).replace("\n", " ")
    odd = picture.Picture("<svg/>", 'a "b" <c>', 10)
    assert 'alt="a &quot;b&quot; &lt;c&gt;"' in odd.html


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 4), (3, 2), (5, 4)])
def test_every_grid_can_be_drawn_and_names_every_rank(dp: int, tp: int) -> None:
    drawn = draw("one", dp, tp)
    assert drawn.alt.count(" holds ") == dp * tp
    assert drawn.width <= 900


def test_what_is_held_is_said_without_rows_that_are_not_there() -> None:
    assert say_held(RankBoxes(0, (Box((0, 0), SHAPE),)), SHAPE) == "the whole matrix"
    past_the_end = Box((12, 0), (0, 8))
    assert say_held(RankBoxes(1, (past_the_end,), "L"), SHAPE) == "nothing"
    assert say_held(RankBoxes(1, (), "L"), SHAPE) == "nothing"
    one_row = RankBoxes(1, (Box((3, 0), (1, 8)), Box((4, 0), (1, 2)), past_the_end), "L")
    assert say_held(one_row, SHAPE) == "row 3, all columns and row 4, columns 0 to 1 (bytes L)"
