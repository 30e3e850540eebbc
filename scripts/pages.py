"""Makes offline pages of the notebooks: one HTML file each, and an index. Pages load nothing from elsewhere.

    python scripts/pages.py                   the committed notebooks and the reference, into dist/pages/
    python scripts/pages.py 00 05             some of the notebooks
    python scripts/pages.py --out FOLDER      … to another folder
    python scripts/pages.py --still           … with a still picture for each widget, and no cell is run

Only listed tags and attributes remain in the HTML of a notebook's texts and results. So the HTML holds no
script, form or style, and nothing that a browser would load; each page's security policy forbids them, too.

For a widget, the page has a picture for every position, and shows them by radio buttons and CSS alone. To
draw the pictures, the cells that the widget needs are run, with the notebook's own parameters.
"""

from __future__ import annotations

import base64
import html
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from string import Template
from typing import Any
from urllib.parse import quote

import nbformat
from bleach.sanitizer import Cleaner
from nbconvert import HTMLExporter
from nbformat import NotebookNode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.course import series
from muon_tutorial.learn.exercises.judge import LOOKS
from muon_tutorial.learn.pictures.colours import EMPTY, QUIET, rank_colour
from muon_tutorial.learn.pictures.picture import Picture, blank, rectangle
from muon_tutorial.learn.pictures.picture import write as write_words
from muon_tutorial.learn.the_mirror import recording
from muon_tutorial.learn.widgets import shell as widgets
from muon_tutorial.learn.widgets.reveal import NOT_PREDICTED
from muon_tutorial.learn.widgets.shell import Shell
from scripts import picture, reference
from scripts.files import FOLDER, POLICY, ROOT, STILL, made, run_writer, write_all
from scripts.notebook_guards import tags_of
from scripts.pack import read_notebook
from scripts.shells import displayed, widget_cells

TARGET = ROOT / "dist" / "pages"
NAMES = "beginnings of the notebooks' names: 00, 01 …"
TEMPLATES = Path(__file__).parent
MOST_POSITIONS = 2_000  # pictures of one widget; some have millions of positions, too many for a page
PAGE_BYTES = 1_900_000  # bytes of a page's pictures; with its text, the page has about 2 MB
DESCRIPTION = """Muon makes all directions of a weight update equally strong, and for that it needs the
whole matrix; but a model that is spread over processes has no whole matrix anywhere. This course
brings each matrix together and hands it back, on real processes, to the bit."""
ALL = {"href": "index.html", "text": "All lessons"}
WIDE = 360
"""Pictures wider than this scroll sideways on a phone, so that their text stays large enough to read."""
NO_ANSWER = ("No answer yet", "No right answer yet", "From here on, the reference is used")
"""The beginnings of lines that a notebook prints for an exercise without an answer."""
PREVIEW, PREVIEW_SIZE = "preview.png", (1200, 630)
"""The picture in link previews of the site, and its size in pixels."""
ONE_PAGE, EVIDENCE = ROOT / "scripts" / "one_page.py", ROOT / "docs" / "evidence.md"
_TAGS = (
    "a b blockquote br code dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i img li ol p pre s small span "
    "strong sub summary sup table tbody td th thead tr ul"
)
_ATTRIBUTES = {
    "img": {"alt", "width", "height", "title"},
    "a": {"title", "rel"},
    "th": {"align"},
    "td": {"align"},
}
_LOCAL_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)\.(?:ipynb|md)(#[^)\s]*)?\)")


@dataclass(frozen=True, slots=True)
class Knob:
    """A control as radio buttons: its name, a button for each value (``stops``), and the pressed button."""

    legend: str
    stops: tuple[str, ...]
    pressed: int


@dataclass(frozen=True, slots=True)
class Frames:
    """A widget without a kernel: its controls, and an ``<img>`` for each combination of their values.

    ``left_out``: the controls for which some values are not drawn. ``repeats``: the widget's still picture is
    one of these pictures.
    """

    knobs: tuple[Knob, ...]
    pictures: dict[tuple[int, ...], str]
    left_out: tuple[str, ...]
    repeats: bool


def committed(prefixes: Sequence[str] = ()) -> list[Path]:
    """The notebooks whose names start with a prefix, or all; UsageError if one matches no lesson's name."""
    names = [lesson.file for lesson in series.LESSONS]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise UsageError(f"no lesson's name starts with {prefix!r}; {names[0]} is the first")
    return [FOLDER / name for name in names if name.startswith(tuple(prefixes) or "")]


def page_of(path: Path, still: bool = False, copies: str = "") -> str:
    """A committed notebook as one HTML document; if ``still``, without frames of its widgets.

    ``copies`` is the folder of the self-contained copies, next to the page; empty if there are none.
    """
    notebook = read_notebook(path)
    try:
        frames = {} if still else frames_of(notebook)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UsageError(f"{path.name}: a widget cannot be drawn, {reason}; --still runs no cell") from error
    return _export(notebook, _links(path, copies), frames)


def text_page(text: str, links: Sequence[dict[str, str]]) -> str:
    return _export(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)]), links)


def index(copies: str = "", essay: str = "") -> str:
    """The front page: what Muon is and why this is hard, where to start, all lessons, and the other pages.

    ``essay`` is the essay's file next to the page; empty if there is none.
    """
    cards = "\n".join(card(lesson, copies) for lesson in series.LESSONS)
    film = base64.b64encode(picture.TARGET.read_bytes()).decode()
    alt = html.escape(picture.alt(recording.load()), quote=True)
    play = f'<p class="go"><a href="{essay}">Four processes, one matrix: play with it</a></p>'
    first = f"[The essay that plays]({essay})" if essay else "[Lesson 00](00_a_distributed_muon_step.html)"
    headings = {path.name: _heading(path.read_text(encoding="utf-8")) for path in _texts()}
    stems = {lesson.number: lesson.stem for lesson in series.LESSONS}
    number = re.compile(r"\b(\d\d)(?=[,.]| and |$)", re.MULTILINE)
    given = {
        "description": " ".join(DESCRIPTION.split()),
        "film": f'<img width="{picture.WIDTH}" alt="{alt}" src="data:image/svg+xml;base64,{film}">',
        "essay": play if essay else "",
        "fifteen": first,
        "paths": number.sub(lambda found: f"[{found[1]}]({stems[found[1]]}.html)", series.paths()),
        "lessons": f'<div class="lessons">\n{cards}\n</div>',
        "words": "\n".join(f"- [{heading}]({name})" for name, heading in headings.items()),
    }
    front = Template((TEMPLATES / "page_template" / "front.md").read_text(encoding="utf-8"))
    return text_page(front.substitute(given), [])


def one_page() -> str:
    code = ONE_PAGE.read_text(encoding="utf-8")
    said = "The whole step with only torch: seven phases, each with the layouts before and after it."
    return text_page(f"# The step on one page\n\n{said}\n\n```python\n{code}```\n", [ALL])


def evidence() -> str:
    """docs/evidence.md as a page; links to files that the site does not have become plain text."""
    text = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"`\1`", EVIDENCE.read_text(encoding="utf-8"))
    return text_page(text, [ALL])


def write_preview(target: Path) -> None:
    """Write the link preview: a matrix cut into the ranks' shards, then whole, then cut into shards again."""
    figure, axes = blank(*PREVIEW_SIZE)
    write_words(axes, 60, 90, "Four processes, one matrix", 34, weight="bold")
    write_words(axes, 60, 146, "Muon needs the whole matrix, and no process has it.", 19, color=QUIET)
    run = recording.load()
    name = run.busiest()
    rows, columns = run.shapes[name]
    for place, moment in enumerate((0, recording.AXIS, len(recording.PHASES) - 1)):
        for diary in run.diaries:
            down, right = divmod(diary.rank, 2)
            x, y = 60 + 384 * place + 160 * right, 216 + 172 * down
            rectangle(axes, x, y, 144, 144, EMPTY)
            for who, top, left, high, wide in diary.tiles[name][moment]:
                size = 144 * wide / columns, 144 * high / rows
                look = "///" if moment >= recording.AXIS else None
                corner = x + 144 * left / columns, y + 144 * top / rows
                rectangle(axes, *corner, *size, rank_colour(who), hatch=look)
        said = ("cut into pieces", "whole, and orthogonal", "home again")[place]
        write_words(axes, 60 + 384 * place, 586, said, 17)
    figure.savefig(target, dpi=96, metadata={"Software": None})


def card(lesson: series.Lesson, copies: str = "") -> str:
    """A lesson on the index: its picture if it has been built, its question, and its requirements."""
    path = FOLDER / lesson.file
    drawn = first_picture(read_notebook(path)) if path.is_file() else ""
    after = f", after {', '.join(lesson.after)}" if lesson.after else ""
    ways = " ".join(f'<a href="{link["href"]}">{link["text"]}</a>' for link in _ways(lesson, copies))
    return (
        f'<div class="lesson">{drawn}'
        f'<h2><a class="to" href="{lesson.stem}.html">{html.escape(plain(lesson.name))}</a></h2>'
        f"<p>{lesson.minutes} minutes{after}</p>{f'<p>{ways}</p>' if ways else ''}</div>"
    )


def first_picture(notebook: NotebookNode) -> str:
    """The ``<img>`` of the cell tagged ``hero``, else the notebook's first; empty if there is none."""
    heroes = [cell for cell in notebook.cells if "hero" in tags_of(cell)]
    outputs = [out for cell in heroes or notebook.cells for out in cell.get("outputs", ())]
    images = re.findall(r"<img [^>]*>", " ".join(out.get("data", {}).get("text/html", "") for out in outputs))
    return images[0] if images else ""


def _heading(text: str) -> str:
    return (re.findall(r"^# (.+)$", text, re.MULTILINE) or ["Untitled"])[0]


def _first_paragraph(text: str) -> str:
    """The first paragraph below the heading, without Markdown's marks; empty if there is none."""
    after = text.partition("\n\n")[2].lstrip()
    first = "" if after.startswith(("<", "```", "- ", "|")) else after.partition("\n\n")[0]
    words = re.sub(r"\[([^\]]+)\]\([^)]*\)|[*_]", lambda found: found[1] or "", first)
    return " ".join(words.split())


def plain(title: str) -> str:
    return title.replace("`", "")


def _texts() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def _export(
    notebook: NotebookNode, links: Sequence[dict[str, str]], frames: Mapping[str, Frames] | None = None
) -> str:
    notebook.cells = [cell for cell in notebook.cells if {"setup", "hero"} & {*tags_of(cell)} != {"setup"}]
    fold_beginning(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _LOCAL_LINK.sub(r"](\1.html\2)", cell.source)
    given = {
        "title": plain(_heading(notebook.cells[0].source)),
        "description": plain(_first_paragraph(notebook.cells[0].source)) or " ".join(DESCRIPTION.split()),
        "preview": f"{series.site()}{PREVIEW}",
        "links": links,
        "frames": frames or {},
        "policy": POLICY,
        "looks": LOOKS,
    }
    page, _ = _exporter().from_notebook_node(notebook, given)
    return page


@cache
def _exporter() -> HTMLExporter:
    """One exporter for all pages, which parses the templates once."""
    exporter = HTMLExporter(
        template_name="page_template",
        extra_template_basedirs=[str(TEMPLATES)],
        mathjax_url="",
        require_js_url="",
        jquery_url="",
        exclude_anchor_links=True,
    )
    for each in (sanitised, opened, wide, without_notes):
        exporter.register_filter(each.__name__, each)
    return exporter


def fold_beginning(notebook: NotebookNode) -> None:
    """Move the parameters and the imports into the fold that precedes them."""
    cells = notebook.cells
    first = next((n for n, cell in enumerate(cells) if "parameters" in tags_of(cell)), 0)
    if not first or not cells[first - 1].source.endswith("</details>"):
        return
    last = next(n for n, cell in enumerate(cells) if n > first and cell.cell_type == "markdown")
    code = "\n\n".join(cell.source for cell in cells[first:last])
    about = cells[first - 1]
    about.source = f"{about.source.removesuffix('</details>')}```python\n{code}\n```\n\n</details>"
    del cells[first:last]


def sanitised(page: str) -> str:
    """HTML without anything that could run, load something, or cover the page; embedded pictures stay.

    A verdict's style, which is known exactly, becomes a class; no other style passes.

    >>> sanitised('<b onclick="x()">bold</b><img src="https://example.org/a.png" alt="a">')
    '<b>bold</b><img alt="a">'
    """
    for look in LOOKS.values():
        page = page.replace(f'<div style="{look.style}">', f'<div class="verdict {look.name}">')
    return _CLEANER.clean(page)


def _may_stay(tag: str, name: str, value: str) -> bool:
    if name in ("class", "id"):
        return True
    if (tag, name) == ("img", "src"):
        return value.startswith("data:image/")
    if (tag, name) == ("a", "href"):
        return not re.match(r"\s*data:", value, re.IGNORECASE)
    return name in _ATTRIBUTES.get(tag, ())


def opened(page: str) -> str:
    """Open all folds of an answer's HTML, because the page puts each answer into a fold of its own."""
    return page.replace(f"<summary>{NOT_PREDICTED}", "<summary>").replace("<details>", "<details open>")


def without_notes(text: str) -> str:
    """Printed text without the notes on answers, for readers who cannot answer."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(NO_ANSWER))


def wide(page: str) -> bool:
    """Whether a picture in this HTML is wider than a phone.

    >>> wide('<img width="900">'), wide('<img width="300">')
    (True, False)
    """
    return max(map(int, re.findall(r'<img [^>]*?\bwidth="(\d+)"', page)), default=0) > WIDE


_CLEANER = Cleaner(
    tags=_TAGS.split(), attributes=_may_stay, protocols=["http", "https", "mailto", "data"], strip=True
)


def _links(path: Path, copies: str) -> list[dict[str, str]]:
    """Links to all lessons, to the previous and next one, and to hosts that run this one."""
    [lesson] = [each for each in series.LESSONS if each.stem == path.stem]
    near = [
        {"href": f"{to.stem}.html", "rel": rel, "text": to.number, "title": plain(f" · {to.title}")}
        for rel, to in zip(("prev", "next"), series.neighbours(lesson), strict=True)
        if to
    ]
    return [ALL, *near, *_ways(lesson, copies)]


def _ways(lesson: series.Lesson, copies: str) -> list[dict[str, str]]:
    """Links to hosts that run a lesson, and to its self-contained copy."""
    hosts = [{"href": to, "text": f"Open in {host}"} for host, to in series.hosted_links(lesson).items()]
    return [*hosts, {"href": f"{copies}/{lesson.file}", "text": "Notebook to keep"}] if copies else hosts


def frames_of(notebook: NotebookNode) -> dict[str, Frames]:
    """The pictures of each widget at all its positions, by the id of the cell that displays it."""
    cells = widget_cells(notebook)
    shown = zip(cells, displayed(notebook, cells), strict=True)
    shells = {cell.id: shell for cell, shell in shown if isinstance(shell, Shell)}
    room, frames = PAGE_BYTES - len(nbformat.writes(notebook)), {}
    for waiting, (name, shell) in zip(range(len(shells), 0, -1), shells.items(), strict=True):
        frames[name] = draw_frames(shell, room // waiting)
        room -= sum(map(len, frames[name].pictures.values()))
    return frames


def draw_frames(shell: Shell, most: int) -> Frames:
    """A widget at all its positions, or at as many positions as fit into ``most`` bytes."""
    stops = {name: widgets.stops(control) for name, control in shell.controls.items()}

    @cache
    def drawn(*words: str) -> Picture:
        return shell.at(**{name: stops[name][word] for name, word in zip(stops, words, strict=True)})

    pressed = beginning(shell, stops, drawn)
    for kept in selections([list(of_one) for of_one in stops.values()], pressed):
        if math.prod(map(len, kept)) <= MOST_POSITIONS and (chosen := fitting(kept, drawn, most)):
            break
    legends = [getattr(control, "description", "") or name for name, control in shell.controls.items()]
    return Frames(
        tuple(map(Knob, legends, map(tuple, kept), map(list.index, kept, pressed))),
        dict(zip(itertools.product(*map(range, map(len, kept))), map(lean, chosen), strict=True)),
        tuple(name for name, words in zip(stops, kept, strict=True) if len(words) < len(stops[name])),
        shell.still is None or shell.still.alt in {picture.alt for picture in chosen},
    )


def fitting(kept: Sequence[list[str]], drawn: Callable[..., Picture], most: int) -> list[Picture]:
    """The pictures of a selection; none if there are several and they take more than ``most`` bytes."""
    chosen, room = [], most
    for words in itertools.product(*kept):
        chosen.append(drawn(*words))
        room -= len(lean(chosen[-1]))
        if room < 0 and math.prod(map(len, kept)) > 1:
            return []
    return chosen


def beginning(
    shell: Shell, stops: Mapping[str, Mapping[str, Any]], drawn: Callable[..., Picture]
) -> list[str]:
    """The values that a page shows first: the widget's own, unless these show a film's empty first frame.

    Such a film begins with its still picture if that is one of its frames, else with its largest frame.
    """
    first, *rest = own = [
        next(word for word, value in of_one.items() if value == shell.controls[name].value)
        for name, of_one in stops.items()
    ]
    if shell.still is not None and 2 * len(drawn(*own).svg) >= len(shell.still.svg):
        return own
    sizes = {word: len(drawn(word, *rest).svg) for word in next(iter(stops.values()))}
    fullest = max(sizes, key=sizes.__getitem__)
    if 2 * sizes[first] >= sizes[fullest]:
        return own
    if shell.still is not None and math.prod(map(len, stops.values())) <= MOST_POSITIONS:
        for words in itertools.product(*stops.values()):
            if drawn(*words).alt == shell.still.alt:
                return [*words]
    return [fullest, *rest]


def selections(stops: Sequence[list[str]], pressed: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yield selections of values to draw: first all values, then fewer and fewer.

    In turn, the controls from the last to the second keep only their pressed value. Then the first
    control keeps every second value, every third, and so on, until only the pressed one is left.
    """
    held = [[word] for word in pressed]
    for moving in range(len(stops), 0, -1):
        yield [*stops[:moving], *held[moving:]]
    for stride in range(2, len(stops[0])):
        few = [word for place, word in enumerate(stops[0]) if place % stride == 0 or word == pressed[0]]
        yield [few, *held[1:]]
    yield held


def lean(picture: Picture) -> str:
    """The picture as one ``<img>`` of fewer bytes: with short ids, and text instead of base64."""
    names = re.findall(r'\bid="([^"]+)"', picture.svg)
    short = {name: f"i{number:x}" for number, name in enumerate(names)}
    svg = re.sub(r'(\bid="|href="#|url\(#)([^")]+)', lambda found: found[1] + short[found[2]], picture.svg)
    data = quote(svg.replace('"', "'"), safe=" ='/:;,.()")
    return f'<img alt="{html.escape(picture.alt)}" width="{picture.width}" src="data:image/svg+xml,{data}">'


def write(
    target: Path, names: Sequence[str] = (), still: bool = False, copies: str = "", essay: str = ""
) -> None:
    """Write the chosen pages, the notebooks' texts and the index; with all pages, also the reference.

    ``copies`` is the folder below ``target`` with the self-contained copies, if there are any;
    ``essay`` is the essay's file.
    """
    chosen = committed(names)
    made(target)
    named = partial(page_of, still=still, copies=copies)
    if still or len(chosen) == 1:
        made_pages = [*map(named, chosen)]
    else:  # pages run their cells side by side, each in its own process
        with beside() as pool:
            made_pages = [*pool.map(named, chosen)]
    pages = {f"{path.stem}.html": page for path, page in zip(chosen, made_pages, strict=True)}
    pages |= {f"{path.stem}.html": text_page(path.read_text(encoding="utf-8"), [ALL]) for path in _texts()}
    write_all(target, {**pages, "index.html": index(copies, essay)})
    if not names:
        write_all(target, {"one_page.html": one_page(), "evidence.html": evidence()})
        write_preview(target / PREVIEW)
        reference.write(target / reference.TARGET.name)


def beside(processes: int | None = None) -> ProcessPoolExecutor:
    """A pool of processes for pages, one for each core; Ctrl-C ends them without a traceback."""
    return ProcessPoolExecutor(processes, get_context("spawn"), signal, (SIGINT, SIG_DFL))


def main(arguments: Sequence[str] | None = None) -> int:
    return run_writer("pages", __doc__, write, arguments, TARGET, names=NAMES, still=STILL)


if __name__ == "__main__":
    sys.exit(main())
