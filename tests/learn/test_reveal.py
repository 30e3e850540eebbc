"""A typed prediction beside a run's result: when it is right, and that it is folded until one is typed."""

from __future__ import annotations

import re

import pytest

from muon_tutorial.learn.pictures.picture import Picture, blank, finish
from muon_tutorial.learn.widgets.reveal import compare, is_same


@pytest.fixture
def card() -> Picture:
    return finish(blank(20, 10)[0], "card", "two dots")


@pytest.mark.parametrize(
    ("mine", "found", "same"),
    [
        (["Gaussian", "rows"], ("gaussian", "rows"), True),
        ("muon", "Muon", True),
        ((0, 3), [0, 3], True),
        (0.7, 0.701, True),
        (0.7, 0.72, False),
        (24_600, 24_576, False),
        (3.0, 3, True),
        ([0, 3], [0, 3, 4], False),
        ("1", 1, False),
        ({1: 7}, {1: 7}, True),
        (True, 1.0, True),
    ],
)
def test_a_prediction_is_right_however_it_is_written(mine: object, found: object, same: bool) -> None:
    assert is_same(mine, found) is same


def test_what_was_typed_stands_beside_what_the_run_gave_and_is_folded_until_then(card: Picture) -> None:
    found = {"messages": 4, "<who>": "all"}
    unread = compare({"messages": ...}, found, card)._repr_html_()
    assert re.fullmatch(
        r"<details><summary>You have not predicted yet.*<td>4</td>.*<img .*</details>", unread
    )
    page = compare({"messages": 3, "<who>": "all"}, found, card)._repr_html_()
    assert "<details>" not in page
    assert "<td>messages</td><td>3</td><td>4</td><td>not as you said</td>" in page
    assert "<td>&lt;who&gt;</td><td>all</td><td>all</td><td>as you said</td>" in page
    assert repr(compare({"messages": 3}, found, card)).splitlines() == [
        "messages: you said 3, the run gave 4. not as you said",
        "<who>: you said –, the run gave all.",
        "two dots",
    ]
