"""The README's film is the recorded run, moves only if motion is wanted, and has a full alt text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from scripts import picture

from . import lab

MOTION = {"reduce": False, "no-preference": True}


def test_the_committed_film_and_its_words_in_the_readme_are_those_of_the_run() -> None:
    stale = [path.name for path, text in picture.wanted().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python scripts/picture.py"


def test_the_readme_opens_with_the_film_and_then_the_two_commands() -> None:
    readme = picture.README.read_text(encoding="utf-8")
    opening = readme[: readme.index("## Two commands")]
    [alt] = re.findall(r'<img src="docs/step.svg" width="\d+" alt="([^"]+)">', opening)
    assert len(alt) > 100
    assert "ranks 0, 2 hold the same bytes" in alt
    assert len(opening.split()) < 300


@pytest.mark.parametrize("path", [picture.TARGET, picture.SHEET], ids=lambda path: path.stem)
def test_each_is_one_small_file_that_asks_for_nothing_and_runs_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 300_000
    names = {element.tag.rpartition("}")[2] for element in ET.fromstring(text).iter()}
    hatching = {"defs", "pattern", "line"}
    assert names == {"svg", "title", "style", "rect", "g", "text", "circle", *hatching}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\((?!#)|@import|\bon\w+=", text)


# In a browser.


def visible(driver: Any, milliseconds: int) -> list[str]:
    """The titles on screen ``milliseconds`` after the film's beginning, or at once if it does not move."""
    return driver.execute_script(
        """document.getAnimations().forEach(each => { each.pause(); each.currentTime = arguments[0]; });
        return [...document.querySelectorAll('g.t')].filter(each => getComputedStyle(each).opacity > 0)
            .map(each => each.querySelector('text.b').textContent)""",
        milliseconds,
    )


@lab.needs_a_browser
@pytest.mark.parametrize(("wish", "moves"), MOTION.items())
def test_in_a_browser_it_moves_through_the_step_unless_motion_is_not_wanted(
    wish: str, moves: bool, browser: Any
) -> None:
    features = [{"name": "prefers-reduced-motion", "value": wish}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(picture.TARGET.as_uri())
    middles = [round(1000 * picture.SECONDS * (moment + 0.5)) for moment in range(len(picture.TITLES))]
    shown = [visible(browser, middle) for middle in middles]
    assert shown == [[title if moves else picture.TITLES[0]] for title in picture.TITLES]


@lab.needs_a_browser
def test_in_a_browser_it_is_drawn_in_an_image(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f'<img alt="film" src="{picture.TARGET.as_uri()}">')
    browser.get(page.as_uri())
    assert browser.execute_script(lab.PICTURES, "img") == [{"alt": "film", "drawn": True}]
