"""Predict, then reveal: the hidden picture, the reply to each prediction, and the form without a kernel."""

from __future__ import annotations

import re

import ipywidgets
import pytest

from muon_tutorial.learn.pictures.picture import Picture, blank, finish
from muon_tutorial.learn.widgets.reveal import FoldedPicture, Reveal, compare, is_same, predict
from muon_tutorial.learn.widgets.shell import ERROR_MARK


@pytest.fixture
def card() -> Picture:
    return finish(blank(20, 10)[0], "card", "two dots")


def asked(card: Picture, judge: object = None) -> Reveal:
    slider = ipywidgets.IntSlider(1, 0, 3)
    made = predict("How < many?", slider, judge or (lambda n: f"You said {n}."), card)  # type: ignore[arg-type]
    assert isinstance(made, Reveal)
    return made


def test_the_button_shows_the_picture_and_every_prediction_after_it_is_answered(card: Picture) -> None:
    widget = asked(card)
    widget.controls["prediction"].value = 3
    assert widget.canvas.value == ""
    assert widget.picture is None
    widget.button.click()
    assert "You said 3." in widget.canvas.value
    assert 'alt="two dots"' in widget.canvas.value
    for value in range(4):
        widget.controls["prediction"].value = value
        assert f"You said {value}." in widget.canvas.value


def test_a_judge_that_raises_is_seen_by_the_guards(card: Picture) -> None:
    def judge(value: int) -> str:
        raise ValueError("no such number")

    widget = asked(card, judge)
    widget.button.click()
    assert ERROR_MARK in widget.canvas.value
    assert "no such number" in widget.canvas.value


@pytest.mark.parametrize("live", [True, False])
def test_without_a_kernel_the_answer_is_folded_and_there(card: Picture, live: bool) -> None:
    made = predict("How < many?", ipywidgets.IntSlider(), str, card, live)
    page = made._repr_html_() if isinstance(made, FoldedPicture) else made._repr_mimebundle_()["text/html"]
    assert re.search(r"<p>How &lt; many\?</p><details>.*<img alt=\"two dots\".*</details>", page)


def test_a_fold_holds_its_picture_and_says_it_without_html() -> None:
    picture = Picture("<svg/>", "four curves", 10)
    fold = FoldedPicture("Open me", picture)
    assert fold._repr_html_() == f"<details><summary>Open me</summary>{picture.html}</details>"
    assert repr(fold) == "four curves"


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


def test_who_predicted_otherwise_hears_why() -> None:
    said = [compare({"n": mine}, {"n": 4}, because="Two and two.") for mine in (4, 5)]
    assert ["Two and two." in repr(each) for each in said] == [False, True]
    assert ["<p>Two and two.</p>" in each._repr_html_() for each in said] == [False, True]


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
