"""Shells and films move in a kernel, are a picture without one, and show a drawing's error."""

from __future__ import annotations

import pytest

from muon_tutorial.learn.pictures.picture import Picture
from muon_tutorial.learn.widgets.shell import ERROR_MARK, Player, Shell, choice, play, show, slider, stops


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


def test_each_frame_is_drawn_once_however_often_it_is_played() -> None:
    drawn = []

    def draw(moment: int, rank: int) -> Picture:
        drawn.append((moment, rank))
        return Picture("<svg/>", f"moment {moment} of rank {rank}", 10)

    film = play(draw, 2, STILL, rank=choice("rank", {"rank 0": 0, "rank 1": 1}))
    assert isinstance(film, Shell)
    for _ in range(3):
        for rank in (0, 1):
            film.controls["rank"].value = rank
            for moment in (0, 1, 2):
                film.controls["moment"].slider.value = moment
                assert f"moment {moment} of rank {rank}" in film.canvas.value
    assert sorted(drawn) == sorted(set(drawn))


def test_button_and_slider_are_linked_in_the_browser_and_share_their_range() -> None:
    player = Player("tp", last=6, first=1, interval=250)
    assert player.link.source == (player.button, "value")
    assert player.link.target == (player.slider, "value")
    assert (player.button.min, player.button.max, player.button.interval) == (1, 6, 250)
    assert (player.value, player.slider.value, player.button.value) == (1, 1, 1)
    assert stops(player) == {str(stop): stop for stop in range(1, 7)}
    player.value = 3
    assert player.slider.value == 3


def test_without_widgets_and_in_a_saved_notebook_the_still_is_shown() -> None:
    assert play(lambda moment: STILL, 3, STILL, live=False) is STILL
    film = play(lambda moment: STILL, 3, STILL)
    assert isinstance(film, Shell)
    assert 'alt="all pictures"' in film._repr_mimebundle_()["text/html"]
