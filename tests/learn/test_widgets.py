"""Shells move in a kernel, are a picture without one, and show the error of a drawing that raises."""

from __future__ import annotations

import pytest

from muon_tutorial.learn.pictures.picture import Picture
from muon_tutorial.learn.widgets.shell import ERROR_MARK, Shell, choice, show, slider


def draw(number: int) -> Picture:
    if number == 3:
        raise ValueError("three cannot be drawn")
    return Picture("<svg/>", f"picture {number}", 10)


STILL = Picture("<svg/>", "all pictures", 10)


def test_moving_a_control_draws_anew_and_a_drawing_that_raises_shows_its_error_and_recovers() -> None:
    shell = Shell(draw, number=slider("number", last=5))
    shell.controls["number"].value = 2
    assert 'alt="picture 2"' in shell.canvas.value
    shell.controls["number"].value = 3
    assert ERROR_MARK in shell.canvas.value
    assert "three cannot be drawn" in shell.canvas.value
    shell.controls["number"].value = 4
    assert 'alt="picture 4"' in shell.canvas.value


@pytest.mark.parametrize(("still", "alt"), [(STILL, "all pictures"), (None, "picture 0")])
def test_what_is_displayed_carries_a_picture_for_readers_without_a_kernel(
    still: Picture | None, alt: str
) -> None:
    bundle = Shell(draw, still, number=slider("number", last=5))._repr_mimebundle_()
    assert f'<img alt="{alt}"' in bundle["text/html"]
    assert bundle["text/plain"] == alt
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"]


def test_without_widgets_the_still_is_shown_and_a_choice_is_one_button_an_option() -> None:
    assert show(draw, STILL, live=False, number=slider("number", last=5)) is STILL
    ranks = choice("rank", {"rank 0": 0, "rank 1": 1})
    assert [value for _, value in ranks.options] == [0, 1]
    assert ranks.value == 0
