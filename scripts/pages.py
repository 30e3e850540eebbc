"""The notebooks as offline pages: one HTML file each, and an index. A page asks for nothing from elsewhere.

    python scripts/pages.py [00 …]            the committed notebooks, written to dist/pages/
    python scripts/pages.py --out FOLDER      … to another folder
    python scripts/pages.py --still           … with a still picture for each widget, and no cell is run

For a widget, the page gets its picture at every position, shown by radio buttons and CSS alone. For that, the
cells that the widget needs are run, with the notebook's own parameters.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter
from nbconvert.preprocessors import TagRemovePreprocessor
from nbformat import NotebookNode

from muon_tutorial.learn import series, widgets
from muon_tutorial.learn.widgets import Shell
from scripts.notebooks import FOLDER, ROOT
from scripts.shells import displayed, widget_cells

TARGET = ROOT / "dist" / "pages"
TEMPLATES = Path(__file__).parent
FRAME_BYTES = 1_700_000  # of all the frames of one page: pages stay below 2 MB or so
INTRODUCTION = """These pages are the course as its notebooks were last run: text, code, results and pictures.
To run them, and to answer, open the notebooks."""
ALL = {"href": "index.html", "text": "All lessons"}
_LOCAL_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)\.(?:ipynb|md)(#[^)\s]*)?\)")


@dataclass(frozen=True, slots=True)
class Knob:
    """A control as a row of radio buttons: its name, the buttons, and which one is pressed."""

    legend: str
    stops: tuple[str, ...]
    pressed: int


@dataclass(frozen=True, slots=True)
class Frames:
    """A widget without a kernel: its knobs, the picture at each choice of stops, what was left out."""

    knobs: tuple[Knob, ...]
    pictures: dict[tuple[int, ...], str]
    left_out: tuple[str, ...]


def committed(prefixes: Sequence[str] = ()) -> list[Path]:
    """The notebooks whose names start with one of ``prefixes``; all of them without."""
    return [path for path in sorted(FOLDER.glob("*.ipynb")) if path.name.startswith(tuple(prefixes) or "")]


def page_of(path: Path, still: bool = False) -> str:
    """A committed notebook as one HTML document; without frames of its widgets if ``still``."""
    notebook = nbformat.read(path, as_version=4)
    return _export(notebook, _links(path), {} if still else frames_of(notebook))


def text_page(text: str, links: Sequence[dict[str, str]]) -> str:
    """Markdown text as one HTML document."""
    return _export(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)]), links)


def index() -> str:
    """The page that leads to all others."""
    words = "\n".join([f"- [{_heading(path.read_text(encoding='utf-8'))}]({path.name})" for path in _texts()])
    parts = ("# Distributed Muon, by hand", INTRODUCTION, series.table(""), series.paths(), words)
    return text_page("\n\n".join(parts), [])


def _heading(text: str) -> str:
    return re.findall(r"^# (.+)$", text, re.MULTILINE)[0]


def _texts() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def _export(
    notebook: NotebookNode, links: Sequence[dict[str, str]], frames: Mapping[str, Frames] | None = None
) -> str:
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _LOCAL_LINK.sub(r"](\1.html\2)", cell.source)
    title = _heading(notebook.cells[0].source)
    page, _ = _exporter().from_notebook_node(
        notebook, {"title": title, "links": links, "frames": frames or {}}
    )
    return page


def _exporter() -> HTMLExporter:
    exporter = HTMLExporter(
        template_name="page_template",
        extra_template_basedirs=[str(TEMPLATES)],
        mathjax_url="",
        require_js_url="",
        jquery_url="",
        exclude_anchor_links=True,
    )
    exporter.register_preprocessor(TagRemovePreprocessor(remove_cell_tags={"setup"}), enabled=True)
    return exporter


def _links(path: Path) -> list[dict[str, str]]:
    """The way to all lessons, and to those before and after."""
    [lesson] = [each for each in series.LESSONS if each.stem == path.stem]
    ways = zip(("prev", "next"), series.neighbours(lesson), strict=True)
    return [ALL, *({"href": f"{to.stem}.html", "rel": rel, "text": to.name} for rel, to in ways if to)]


def frames_of(notebook: NotebookNode) -> dict[str, Frames]:
    """For each cell that displays a widget, by its id, the widget's pictures at all its positions."""
    shown = {cell.id: displayed(notebook, cell) for cell in widget_cells(notebook)}
    shells = {name: shell for name, shell in shown.items() if isinstance(shell, Shell)}
    return {name: draw_frames(shell, FRAME_BYTES // len(shells)) for name, shell in shells.items()}


def draw_frames(shell: Shell, most: int) -> Frames:
    """All positions of a widget, in at most so many bytes, or nearly: while they need more, controls are left
    out from the last on. What is left out stays where it is."""
    start = {name: control.value for name, control in shell.controls.items()}
    values = {name: list(widgets.stops(control).values()) for name, control in shell.controls.items()}
    one = len(shell.at(**start).html)
    while len(values) > 1 and one * math.prod(map(len, values.values())) > most:
        values.popitem()
    pictures = {}
    for places in itertools.product(*(range(len(of_one)) for of_one in values.values())):
        chosen = {name: values[name][place] for name, place in zip(values, places, strict=True)}
        pictures[places] = shell.at(**{**start, **chosen}).html
    knobs = tuple(_knob(name, shell.controls[name]) for name in values)
    return Frames(knobs, pictures, tuple(name for name in shell.controls if name not in values))


def _knob(name: str, control: Any) -> Knob:
    stops = widgets.stops(control)
    legend = getattr(control, "description", "") or name
    return Knob(legend, tuple(stops), list(stops.values()).index(control.value))


def write(target: Path, prefixes: Sequence[str] = (), still: bool = False) -> list[Path]:
    """Write the chosen pages, the texts beside the notebooks and the index; returns where they are."""
    target.mkdir(parents=True, exist_ok=True)
    pages = {f"{path.stem}.html": page_of(path, still) for path in committed(prefixes)}
    pages |= {f"{path.stem}.html": text_page(path.read_text(encoding="utf-8"), [ALL]) for path in _texts()}
    pages["index.html"] = index()
    for name, page in pages.items():
        (target / name).write_text(page, encoding="utf-8")
    return [target / name for name in pages]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pages.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="how the notebooks' names start: 00, 01 …; all without")
    parser.add_argument("--out", type=Path, default=TARGET, help="the folder to write to (dist/pages)")
    parser.add_argument(
        "--still", action="store_true", help="a still picture for each widget; nothing is run"
    )
    options = parser.parse_args(arguments)
    if not committed(options.names):
        print(f"no notebook in {FOLDER} starts with {options.names}", file=sys.stderr)
        return 2
    for path in write(options.out, options.names, options.still):
        print(f"wrote {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
