"""Offline pages hold whole lessons, with an alt text for every picture; some tests open them in a browser."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import nbformat
import pytest
from bs4 import BeautifulSoup
from matplotlib.image import imread
from nbformat import NotebookNode

from muon_tutorial.learn.course import series
from muon_tutorial.learn.exercises.judge import LOOKS, AnswerVerdict
from muon_tutorial.learn.pictures.picture import Picture, blank, finish
from muon_tutorial.learn.widgets.shell import Shell, choice, slider
from scripts import essay, first_screens, pages
from scripts.notebooks import read_text
from scripts.pages import _export, card, committed, draw_frames, first_picture, lean, main, page_of, write

from . import lab
from .reading import assert_keeps_to_itself, parsed

LESSONS = committed()
FIRST = LESSONS[0]
LINK = "{http://www.w3.org/1999/xlink}href"
OPEN = "document.querySelectorAll('details').forEach(fold => { fold.open = true })"
PHONE = (390, 844)
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
CLIPPED = """
const cut = [], barless = [];
for (const box of document.querySelectorAll('body *')) {
    const style = getComputedStyle(box);
    const inline = style.display === 'inline' || !box.clientWidth;
    if (inline || !box.checkVisibility() || box.scrollWidth <= box.clientWidth + 1) continue;
    const edges = parseFloat(style.borderTopWidth) + parseFloat(style.borderBottomWidth);
    const bar = box.offsetHeight - box.clientHeight - edges;
    const inside = box.closest('pre, .picture, table');
    const wide = box.querySelector('.picture.wide, .text:has(.lessons)');  // on purpose wider than the prose
    if (style.overflowX === 'visible' ? !inside && !wide : bar < 8) barless.push(box.outerHTML.slice(0, 90));
    const clipped = style.overflowX === 'hidden' || box.closest('.input, .text pre');
    if (clipped) cut.push(box.outerHTML.slice(0, 90));
}
return [cut, barless, document.scrollingElement.scrollWidth];
"""
SIDES = {"left": "left", "right": "right"}


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first page, with frames for its widget."""
    target = tmp_path_factory.mktemp("framed")
    write(target, [FIRST.stem])
    return target / f"{FIRST.stem}.html"


@pytest.fixture(params=LESSONS, ids=lambda path: path.stem[:2])
def lesson(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def soup(site: Path, lesson: Path) -> Any:
    return parsed(site / f"{lesson.stem}.html")


def test_with_frames_a_page_asks_for_nothing_either(framed: Path) -> None:
    assert_keeps_to_itself(framed, parsed(framed))


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
        hidden = "setup" in cell.metadata.get("tags", [])  # including the hero's set-up
        if cell.cell_type == "code":
            assert (re.sub(r"\s", "", cell.source) in text) is not hidden
        folded = cell.metadata.get("jupyter", {}).get("source_hidden")
        for output in [] if folded else cell.get("outputs", []):
            assert re.sub(r"\s", "", pages.without_notes(output.get("text", ""))) in text
    assert "right answer yet" not in soup.main.get_text()
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
    """A foreign notebook, with HTML that would run, load something or hide the page."""
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


NEW_FORM = """
# %% [markdown]
# # A title
#
# A question?

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


@pytest.mark.parametrize("passed", LOOKS)
def test_a_verdict_has_a_class_for_its_style_and_the_page_knows_its_colours(
    passed: bool | None,
) -> None:
    verdict = AnswerVerdict(passed, "So it is.")
    output = nbformat.v4.new_output("display_data", {"text/html": verdict._repr_html_()})
    cells = [nbformat.v4.new_markdown_cell("# Hello"), nbformat.v4.new_code_cell("check()", outputs=[output])]
    page: Any = BeautifulSoup(_export(nbformat.v4.new_notebook(cells=cells), []), "html.parser")
    look = LOOKS[passed]
    [shown] = page.main.select(".verdict")
    assert shown["class"] == ["verdict", look.name]
    assert "So it is." in shown.get_text()
    assert page.main.find_all(style=True) == []
    rule = f".verdict.{look.name} {{ border-left-color: {look.edge}; background: {look.fill}; }}"
    assert rule in "".join(tag.string for tag in page.find_all("style"))


def test_what_an_answer_folds_itself_is_folded_once() -> None:
    notebook = read_text(NEW_FORM)
    page = "<details><summary>You have not predicted yet.</summary>it is four</details>"
    notebook.cells[3].outputs = [nbformat.v4.new_output("display_data", {"text/html": page})]
    main: Any = BeautifulSoup(_export(notebook, []), "html.parser").main
    outer, inner = main.select("details.answer, details.answer details")
    assert not outer.has_attr("open")
    assert inner.has_attr("open")


@pytest.mark.parametrize("lesson", series.LESSONS, ids=lambda lesson: lesson.number)
def test_the_index_shows_each_lesson_with_its_picture(site: Path, lesson: series.Lesson) -> None:
    index = parsed(site / "index.html")
    [link] = [link for link in index.select(".lesson a.to") if link["href"] == f"{lesson.stem}.html"]
    shown = link.find_parent(class_="lesson")
    assert link.get_text() == lesson.name.replace("`", "")
    assert f"{lesson.minutes} minutes" in shown.get_text()
    notebook = nbformat.read(FIRST.parent / lesson.file, as_version=4)
    heroes = [cell for cell in notebook.cells if "hero" in cell.metadata.get("tags", [])]
    for cell in heroes:
        notebook.cells = [cell]
    kept: Any = BeautifulSoup(first_picture(notebook), "html.parser").img
    assert (shown.img["alt"], shown.img["src"]) == (kept["alt"], kept["src"])


def test_pages_lead_to_hosts_and_copies_only_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(copies: str = "") -> list[list[str]]:
        pages = [page_of(FIRST, still=True, copies=copies), card(series.LESSONS[0], copies)]
        trees: list[Any] = [BeautifulSoup(page, "html.parser") for page in pages]
        near = [trees[0].nav.select("a:not([rel])")[1:], trees[1].select("p a")]
        return [[link["href"] for link in links] for links in near]

    monkeypatch.setattr(series, "REPOSITORY", "")
    assert ways() == [[], []]
    copy = f"copies/{FIRST.name}"
    assert ways("copies") == [[copy], [copy]]
    monkeypatch.setattr(series, "REPOSITORY", "ada/muon")
    hosts = list(series.hosted_links(series.LESSONS[0]).values())
    assert ways() == [hosts, hosts]


def film(moment: int) -> Picture:
    """A picture that is empty at moment 0, and has ten more words at each later moment."""
    figure, axes = blank(60, 40)
    for word in range(10 * moment):
        axes.text(5, 2 * word, f"word {word}")
    return finish(figure, "film", f"{10 * moment} words")


@pytest.mark.parametrize(("still", "begins"), [(None, 3), (2, 2), (7, 3)])
def test_a_film_that_begins_empty_begins_with_its_still_or_its_fullest_picture(
    still: int | None, begins: int
) -> None:
    shell = Shell(film, None if still is None else film(still), moment=slider("moment", last=3))
    assert draw_frames(shell, 10**6).knobs[0].pressed == begins
    full = Shell(film, None, moment=slider("moment", last=3, start=2))
    assert draw_frames(full, 10**6).knobs[0].pressed == 2


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


def open_page(driver: Any, page: Path) -> None:
    """Open a page from disk, and assert that it requests nothing else."""
    lab.requested(driver)
    driver.get(page.as_uri())
    asked = [url for url in lab.requested(driver) if url != page.as_uri()]
    assert [url[:80] for url in asked if not url.startswith(("data:", "blob:"))] == []


def assert_nothing_is_cut(driver: Any, page: Path, width: int) -> None:
    """With all folds open, no code is cut, and everything that is too wide has a scroll bar."""
    driver.execute_script(OPEN)
    cut, barless, wide = driver.execute_script(CLIPPED)
    assert (page.name, cut, barless) == (page.name, [], [])
    assert wide <= width


@lab.needs_a_browser
def test_in_a_browser_a_lesson_begins_on_its_first_screen_is_drawn_can_be_read_and_fits_a_phone(
    browser: Any, site: Path, lesson: Path
) -> None:
    page = site / f"{lesson.stem}.html"
    for width, height in first_screens.SCREENS:
        with first_screens.screen(browser, width, height):
            open_page(browser, page)
            assert browser.get_log("browser") == []
            assert first_screens.problems(browser, height) == []
            shown = browser.execute_script(lab.PICTURES, "img")
            assert len(shown) == len(parsed(page).find_all("img")) > 0
            assert all(picture["drawn"] and picture["alt"] for picture in shown)
            assert_nothing_is_cut(browser, page, width)
            read, faint = browser.execute_script(CONTRAST)
            assert read > 100
            assert faint == []
    with first_screens.screen(browser, *PHONE):
        assert browser.execute_script("return document.scrollingElement.scrollWidth") <= PHONE[0]


@lab.needs_a_browser
@pytest.mark.parametrize(("width", "height"), first_screens.SCREENS)
def test_on_no_other_page_is_anything_cut(
    width: int, height: int, browser: Any, site: Path, framed: Path
) -> None:
    others = {page for page in site.glob("*.html") if page.name != essay.NAME}
    with first_screens.screen(browser, width, height):
        for page in [*others - {site / f"{path.stem}.html" for path in LESSONS}, framed]:
            browser.get(page.as_uri())
            assert_nothing_is_cut(browser, page, width)


@lab.needs_a_browser
def test_a_fold_opens_with_the_keyboard(browser: Any, site: Path) -> None:
    open_page(browser, site / f"{FIRST.stem}.html")
    fold = browser.find_element("css selector", "details")
    inside = fold.find_element("css selector", ":scope > :not(summary)")
    assert not inside.is_displayed()
    fold.find_element("css selector", "summary").send_keys("\n")
    assert inside.is_displayed()


@lab.needs_a_browser
def test_frames_take_the_place_of_a_widget_and_move_with_the_keyboard(browser: Any, framed: Path) -> None:
    open_page(browser, framed)
    assert [alt[:14] for alt in browser.execute_script(SHOWN_FRAMES)] == ["1 · The weight"]
    browser.find_element("css selector", ".shell input").send_keys("\ue014")  # the arrow key to the right
    for _ in range(4):
        browser.switch_to.active_element.send_keys("\ue014")
    [alt] = browser.execute_script(SHOWN_FRAMES)
    assert alt.startswith(
        "3 · The momentum: takes up the mean gradient; dp cuts it. rank 0 holds rows 0 to 23"
    )
    assert all(picture["drawn"] for picture in browser.execute_script(lab.PICTURES, "img"))
    assert framed.stat().st_size < 2_000_000


BELOW = "more than half of the hero picture is below the screen"


@lab.needs_a_browser
@pytest.mark.parametrize(
    ("before", "wide", "tall", "said"),
    [
        ("", 300, 300, []),
        ("A long story.\n#\n# " * 40, 300, 300, ["the question is not on the first screen", BELOW]),
        ("", 300, 3000, [BELOW]),
        ("", 1400, 300, ["the hero picture's type is smaller than 11 pixels"]),
        ("", 300, None, ["there is no hero picture"]),
    ],
)
def test_a_screen_that_begins_too_late_is_found(
    before: str, wide: int, tall: int | None, said: list[str], browser: Any, tmp_path: Path
) -> None:
    notebook = read_text(NEW_FORM.replace("question?", f"question?\n#\n# {before}"))
    drawn = f"<svg xmlns='http://www.w3.org/2000/svg' width='{wide}' height='{tall}'/>"
    image = f'<img alt="hero" width="{wide}" src="data:image/svg+xml,{drawn}">'
    shown = image if tall is not None else "no picture"
    notebook.cells[1].outputs = [nbformat.v4.new_output("display_data", {"text/html": shown})]
    page = tmp_path / "page.html"
    page.write_text(_export(notebook, []), encoding="utf-8")
    with first_screens.screen(browser, 1200, 900):
        browser.get(page.as_uri())
        assert first_screens.problems(browser, 900) == said


@lab.needs_a_browser
def test_the_script_writes_a_screenshot_of_each_size(tmp_path: Path) -> None:
    number = FIRST.stem[:2]
    assert first_screens.main([number, "--out", str(tmp_path / "shots")]) == 0
    sizes = {path.name: imread(path).shape[1::-1] for path in (tmp_path / "shots").iterdir()}
    assert sizes == {f"{FIRST.stem}-{width}.png": (width, height) for width, height in first_screens.SCREENS}


def test_without_a_browser_it_says_what_it_needs_and_nothing_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_screens, "missing", lambda: ["chromium"])
    assert first_screens.main(["--out", str(tmp_path / "shots")]) == 0
    assert re.fullmatch(r"skipped: this needs chromium\n", capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
