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
from scripts.files import POLICY
from scripts.notebooks import read_text
from scripts.pages import _export, committed, draw_frames, lean, main, write

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
        hidden = "setup" in cell.metadata.get("tags", [])  # the hero's set-up, too
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


HOSTILE = [
    "<script>document.title = 'owned'</script>",
    '<img src="https://example.org/a.png" alt="far">',
    '<img src="near.png" onerror="alert(1)" alt="near">',
    '<meta http-equiv="refresh" content="0;url=https://example.org">',
    '<style>@import "https://example.org/a.css"; body { display: none }</style>',
    '<p style="position: fixed; background: url(https://example.org/b)">cover</p>',
    '<iframe src="https://example.org"></iframe><object data="https://example.org/o"></object>',
    '<a href="javascript:alert(1)" onclick="alert(2)">go</a> <a href="JaVaScRiPt&#58;alert(1)">go</a>',
    '<a href="data:text/html,<script>alert(1)</script>">go</a>',
    '<form action="https://example.org"><input name="q"><button>send</button></form>',
    '<base href="https://example.org"><link rel="stylesheet" href="https://example.org/a.css">',
    '<svg onload="alert(1)"><image href="https://example.org/c.svg"/></svg>',
    '<math><mtext></form><form><mglyph><style></math><img src onerror="alert(1)">',
]


@pytest.fixture(params=["markdown", "output"])
def stranger(request: pytest.FixtureRequest) -> NotebookNode:
    """A notebook of somebody else's, with HTML that would run, ask for something or hide the page."""
    cells: list[NotebookNode] = [nbformat.v4.new_markdown_cell("# Hello")]
    for text in HOSTILE:
        output = nbformat.v4.new_output("display_data", {"text/html": text})
        in_code = nbformat.v4.new_code_cell("1", outputs=[output])
        cells.append(in_code if request.param == "output" else nbformat.v4.new_markdown_cell(text))
    return nbformat.v4.new_notebook(cells=cells)


def test_nothing_in_a_strangers_notebook_can_run_ask_or_cover_the_page(stranger: NotebookNode) -> None:
    tree: Any = BeautifulSoup(_export(stranger, []), "html.parser").main
    assert {"script", "style", "meta", "iframe", "object", "form", "input", "base", "link", "svg"} & {
        tag.name for tag in tree.find_all()
    } == set()
    kept = {(tag.name, name) for tag in tree.find_all() for name in tag.attrs}
    assert {name for _, name in kept} <= {"class", "id", "alt", "href"}
    assert [link["href"] for link in tree.find_all("a", href=True)] == []
    assert "cover" in tree.get_text()


def test_each_page_forbids_its_browser_to_run_or_fetch_anything(folder: Path) -> None:
    for page in sorted(folder.rglob("*.html")):
        metas = parsed(page).find_all("meta", attrs={"http-equiv": "Content-Security-Policy"})
        assert [meta["content"] for meta in metas] == [POLICY], page.name
        assert page.read_text(encoding="utf-8").index("Content-Security") < 500
    assert "default-src 'none'" in POLICY
    assert "script" not in POLICY


NEW_FORM = """
# %% [markdown]
# # A title?

# %% tags=["setup", "hero"] jupyter={"source_hidden": true}
"the set-up"

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2

# %% tags=["answer"]
reveal()
"""


def test_of_the_hero_only_the_picture_is_shown_hidden_sources_and_answers_are_folded() -> None:
    notebook = read_text(NEW_FORM)
    for place, page in ((1, draw(0, "left").html), (3, "<b>it is four</b>")):
        notebook.cells[place].outputs = [nbformat.v4.new_output("display_data", {"text/html": page})]
    main: Any = BeautifulSoup(_export(notebook, []), "html.parser").main
    assert "the set-up" not in main.get_text()
    assert main.select_one(".cell.hero img")["alt"] == 'row 0 of "left"'
    folds = {fold.summary.get_text(): fold for fold in main.find_all("details")}
    assert list(folds) == ["Parameters", "Show what the run gave (predict first)"]
    assert "dp: int = 2" in folds["Parameters"].get_text().replace("\n", "")
    assert main.get_text().count("it is four") == 1
    assert "it is four" in folds["Show what the run gave (predict first)"].get_text()
    assert not any(fold.has_attr("open") for fold in folds.values())


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


HERO_BOTTOM = """const box = document.querySelector('.hero img').getBoundingClientRect();
    return [box.bottom, box.right, box.width]"""


@needs_a_browser
@pytest.mark.parametrize(("width", "height"), [(1200, 900), (400, 800)])
def test_question_and_hero_are_seen_without_scrolling(
    width: int, height: int, browser: Any, folder: Path
) -> None:
    heroes = [path for path in LESSONS if parsed(folder / f"{path.stem}.html").select(".hero img")]
    assert heroes
    window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    try:
        for path in heroes:
            open_page(browser, folder / f"{path.stem}.html")
            bottom, right, wide = browser.execute_script(HERO_BOTTOM)
            assert bottom <= height
            assert right <= width
            assert wide > 300
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
    assert [alt[:14] for alt in browser.execute_script(SHOWN_FRAMES)] == ["1 · The weight"]
    browser.find_element("css selector", ".shell input").send_keys("\ue014")  # the arrow key to the right
    for _ in range(4):
        browser.switch_to.active_element.send_keys("\ue014")
    [alt] = browser.execute_script(SHOWN_FRAMES)
    assert alt.startswith("3 · The momentum: averaged over dp, and cut over dp. rank 0 holds rows 0 to 23")
    assert all(picture["drawn"] for picture in browser.execute_script(lab.PICTURES, "img"))
    assert page.stat().st_size < 2_000_000
    lab.photograph(browser, tmp_path, "page")
