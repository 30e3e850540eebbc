"""The offline pages ask for nothing, and every picture is there with its words; as text, and in a browser."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat import NotebookNode

from muon_tutorial.learn.course.notebook_guards import WIDGET_STATE
from muon_tutorial.learn.pictures.picture import Picture, blank, finish
from muon_tutorial.learn.widgets.shell import VIEW, Shell, choice, slider
from scripts.pages import committed, draw_frames, lean, main, write

from . import lab

LESSONS = committed()
FIRST = LESSONS[0]
LINK = "{http://www.w3.org/1999/xlink}href"
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
SHOWN_FRAMES = (
    "return [...document.querySelectorAll('.shell img')].filter(i => i.offsetWidth).map(i => i.alt)"
)
CONTRAST = """
const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
const light = colour => {
    const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = numbers(colour).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
};
const behind = element => {
    if (!element) return 'rgb(255, 255, 255)';
    const own = getComputedStyle(element).backgroundColor;
    return numbers(own)[3] === 0 ? behind(element.parentElement) : own;
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let read = 0, faint = [];
while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
    const both = [light(getComputedStyle(element).color), light(behind(element))];
    const [low, high] = both.sort((a, b) => a - b);
    read += 1;
    if ((high + .05) / (low + .05) < 4.5) faint.push(texts.currentNode.data.slice(0, 40));
}
return [read, faint];
"""
SIDES = {"left": "left", "right": "right"}
FETCHED = {"src", "srcset", "poster", "data", "background", "action", "formaction", "ping", "manifest"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages as they are committed, and in ``framed/`` the first with frames for its widget."""
    target = tmp_path_factory.mktemp("pages")
    write(target, still=True)
    write(target / "framed", [FIRST.stem])
    return target


@pytest.fixture(params=LESSONS, ids=lambda path: path.stem[:2])
def lesson(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def soup(folder: Path, lesson: Path) -> Any:
    return parsed(folder / f"{lesson.stem}.html")


def parsed(page: Path) -> Any:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def test_no_page_asks_for_anything_or_keeps_the_state_of_a_widget(folder: Path) -> None:
    for page in sorted(folder.rglob("*.html")):
        tree = parsed(page)
        assert tree.find_all(["script", "iframe", "object", "embed", "base", "audio", "video"]) == []
        asked = [tag[name] for tag in tree.find_all() for name in FETCHED & tag.attrs.keys()]
        asked += [tag["href"] for tag in tree.find_all(["link", "image", "use"])]
        assert [url[:60] for url in asked if not url.startswith("data:")] == []
        styles = " ".join([tag.string for tag in tree.find_all("style")])
        styles += " ".join([tag["style"] for tag in tree.find_all(style=True)])
        assert re.findall(r"@import|url\((?![\"']?data:)[^)]*|@font-face", styles) == []
        text = page.read_text(encoding="utf-8")
        assert [mark for mark in (WIDGET_STATE, VIEW, "model_id", "ipywidgets.org") if mark in text] == []


@pytest.fixture
def cells(lesson: Path) -> list[NotebookNode]:
    return nbformat.read(lesson, as_version=4).cells


def test_every_picture_of_the_notebook_is_there_with_its_words(soup: Any, cells: list[NotebookNode]) -> None:
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    committed_html = " ".join([data.get("text/html", "") for data in outputs])
    shown, kept = (
        [(image["alt"], image["src"]) for image in tree.find_all("img")]
        for tree in (soup, BeautifulSoup(committed_html, "html.parser"))
    )
    assert shown == kept
    assert shown
    assert all(len(alt) > 40 for alt, _ in shown)


def test_prose_highlighted_code_results_and_folded_solutions_are_there(
    soup: Any, cells: list[NotebookNode]
) -> None:
    text = re.sub(r"\s", "", soup.main.get_text())
    for cell in cells:
        hidden = "setup" in cell.metadata.get("tags", [])
        if cell.cell_type == "code":
            assert (re.sub(r"\s", "", cell.source) in text) is not hidden
        for output in cell.get("outputs", []):
            assert re.sub(r"\s", "", output.get("text", "")) in text
    headings = [tag.get_text() for tag in soup.find_all(["h1", "h2"])]
    assert len(headings) == len(set(headings)) > 3
    solutions = [cell for cell in cells if "solution" in cell.metadata.get("tags", [])]
    folds = [fold for fold in soup.find_all("details") if fold.summary.get_text() == "Solution"]
    assert len(folds) == len(solutions) > 0
    assert all(fold.select(".highlight span") and not fold.has_attr("open") for fold in folds)
    assert soup.select(".input .highlight .k, .input .highlight .kn")


def test_it_says_its_title_and_language_and_holds_no_raw_formula(soup: Any, lesson: Path) -> None:
    assert soup.html["lang"] == "en"
    assert soup.title.string == soup.h1.get_text() != lesson.stem
    assert soup.find("meta", attrs={"name": "viewport"}) is not None
    for tag in soup.find_all(["style", "pre", "code", "img"]):
        tag.decompose()
    assert re.findall(r"\$|\\\(|\\\[", str(soup)) == []


def test_links_within_the_course_and_a_page_lead_somewhere(folder: Path) -> None:
    pages = [*folder.glob("*.html"), *(folder / "reference").rglob("*.html")]
    trees = {page: parsed(page) for page in pages}
    places = {page: {tag["id"] for tag in tree.find_all(id=True)} for page, tree in trees.items()}
    links = {(page, link["href"]) for page, tree in trees.items() for link in tree.find_all("a", href=True)}
    local = [(page, *link.partition("#")) for page, link in links if not re.match(r"https?://", link)]
    led_to = {
        (Path(os.path.normpath(page.parent / to)) if to else page, place) for page, to, _, place in local
    }
    assert [page for page, _ in led_to if page not in trees] == []
    assert [(page, place) for page, place in led_to if place and place not in places[page]] == []
    assert {page for page in pages if page.parent == folder} <= {page for page, _ in led_to}
    assert folder / "reference" / "index.html" in {page for page, _ in led_to}


def test_the_command_names_what_it_writes_and_leaves_a_readers_own_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebooks = tmp_path / "note books é"
    notebooks.mkdir()
    monkeypatch.setattr("scripts.pages.FOLDER", notebooks)
    for name in (FIRST.name, "Untitled.ipynb", f"{FIRST.stem}-Copy1.ipynb"):
        shutil.copy(FIRST, notebooks / name)
    (notebooks / "notes.md").write_text("without a heading")
    assert main(["--still", "--out", str(tmp_path / "out"), FIRST.stem]) == 0
    names = {f"{FIRST.stem}.html", "index.html", "notes.html"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert f"{FIRST.stem}.html" in capsys.readouterr().out


def draw(row: int, side: str) -> Picture:
    figure, axes = blank(60, 40)
    axes.text(5, 20, f"{row} {side}")
    return finish(figure, f"row{row}{side}", f'row {row} of "{side}"')


@pytest.mark.parametrize(
    ("pictures", "stops", "left_out"),
    [
        (18, [list("012345678"), ["left", "right"]], ()),
        (9, [list("012345678"), ["left"]], ("side",)),
        (6, [list("023468"), ["left"]], ("row", "side")),
        (3, [list("036"), ["left"]], ("row", "side")),
        (0, [["3"], ["left"]], ("row", "side")),
    ],
)
def test_frames_are_as_many_as_there_is_room_for(
    pictures: int, stops: list[list[str]], left_out: tuple[str, ...]
) -> None:
    one = max(len(lean(draw(row, side))) for row in range(9) for side in SIDES)
    shell = Shell(draw, row=slider("the row", last=8, start=3), side=choice("", SIDES))
    frames = draw_frames(shell, int((pictures + 0.5) * one))
    assert [list(knob.stops) for knob in frames.knobs] == stops
    assert [knob.legend for knob in frames.knobs] == ["the row", "side"]
    assert [knob.stops[knob.pressed] for knob in frames.knobs] == ["3", "left"]
    assert frames.left_out == left_out
    assert len(frames.pictures) == len(stops[0]) * len(stops[1])
    shown = frames.pictures[tuple(knob.pressed for knob in frames.knobs)]
    assert BeautifulSoup(shown, "html.parser").find("img", alt='row 3 of "left"')


def test_a_lean_picture_is_the_same_drawing_in_fewer_bytes() -> None:
    picture = draw(3, "left")
    image: Any = BeautifulSoup(lean(picture), "html.parser").img
    after = list(ET.fromstring(unquote(image["src"].removeprefix("data:image/svg+xml,"))).iter())
    before = list(ET.fromstring(picture.svg).iter())
    drawn, drawn_before = ([(n.tag, n.get("d"), n.get("style")) for n in nodes] for nodes in (after, before))
    links, links_before = ({n.get(LINK) for n in nodes} - {None} for nodes in (after, before))
    assert drawn == drawn_before
    assert links <= {f"#{node.get('id')}" for node in after}
    assert len(links) == len(links_before)
    assert len(lean(picture)) < 0.9 * len(picture.html)


# In a browser.


def needs_a_browser(test: Any) -> Any:
    for mark in lab.in_a_browser():
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with lab.browser(tmp_path_factory.mktemp("browser"), logged=True) as driver:
        yield driver


def open_page(driver: Any, page: Path) -> list[str]:
    """Open a page from disk; returns what was asked for beside the page itself."""
    lab.requested(driver)
    driver.get(page.as_uri())
    return [url for url in lab.requested(driver) if url != page.as_uri()]


@needs_a_browser
def test_in_a_browser_nothing_is_asked_for_every_picture_is_drawn_and_words_can_be_read_and_fit_a_phone(
    browser: Any, folder: Path, lesson: Path
) -> None:
    page = folder / f"{lesson.stem}.html"
    asked = open_page(browser, page)
    assert [url[:80] for url in asked if not url.startswith(("data:", "blob:"))] == []
    assert browser.get_log("browser") == []
    shown = browser.execute_script(lab.PICTURES, "img")
    assert len(shown) == len(parsed(page).find_all("img")) > 0
    assert all(picture["drawn"] and picture["alt"] for picture in shown)
    browser.execute_script("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
    read, faint = browser.execute_script(CONTRAST)
    assert read > 100
    assert faint == []
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        open_page(browser, page)
        assert browser.execute_script("return document.scrollingElement.scrollWidth") <= PHONE["width"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_a_browser
def test_a_fold_opens_with_the_keyboard(browser: Any, folder: Path) -> None:
    open_page(browser, folder / f"{FIRST.stem}.html")
    solution = browser.find_element("css selector", "details pre")
    assert not solution.is_displayed()
    browser.find_element("css selector", "summary").send_keys("\n")
    assert solution.is_displayed()


@needs_a_browser
def test_frames_take_the_place_of_a_widget_and_move_with_the_keyboard(
    browser: Any, folder: Path, tmp_path: Path
) -> None:
    page = folder / "framed" / f"{FIRST.stem}.html"
    asked = open_page(browser, page)
    assert [url[:80] for url in asked if not url.startswith("data:")] == []
    assert [alt[:28] for alt in browser.execute_script(SHOWN_FRAMES)] == ["1 · its weight, before the s"]
    [moment, _, _, _, _, _, rank, *_] = browser.find_elements("css selector", ".shell input")
    moment.send_keys("\ue014")  # the arrow key to the right
    moment.find_element("xpath", "//input[@name='1'][@class='k1s1']").send_keys("\ue014")
    rank.send_keys("\ue014")
    [alt] = browser.execute_script(SHOWN_FRAMES)
    assert alt.startswith("3 · its momentum, gradients averaged, shared out over dp: rank 1 holds")
    assert all(picture["drawn"] for picture in browser.execute_script(lab.PICTURES, "img"))
    assert page.stat().st_size < 2_000_000
    lab.photograph(browser, tmp_path, "page")
