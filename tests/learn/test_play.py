"""A film plays in a kernel and draws each picture once; without a kernel it is a still picture."""

from __future__ import annotations

from muon_tutorial.learn.pictures.picture import Picture
from muon_tutorial.learn.widgets.shell import Player, Shell, choice, play, stops

STILL = Picture("<svg/>", "all moments", 10)


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
    player = Player("moment", last=4, interval=250)
    assert player.link.source == (player.button, "value")
    assert player.link.target == (player.slider, "value")
    assert (player.button.min, player.button.max, player.button.interval) == (0, 4, 250)
    assert stops(player) == {str(stop): stop for stop in range(5)}
    player.value = 3
    assert player.slider.value == 3


def test_a_film_may_begin_at_another_number() -> None:
    player = Player("tp", last=6, first=1)
    assert (player.value, player.slider.value, player.button.value) == (1, 1, 1)
    assert stops(player) == {str(stop): stop for stop in range(1, 7)}


def test_without_widgets_and_in_a_saved_notebook_the_still_is_shown() -> None:
    assert play(lambda moment: STILL, 3, STILL, live=False) is STILL
    film = play(lambda moment: STILL, 3, STILL)
    assert isinstance(film, Shell)
    assert 'alt="all moments"' in film._repr_mimebundle_()["text/html"]
