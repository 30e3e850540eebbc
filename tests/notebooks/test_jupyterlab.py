"""Notebooks in JupyterLab in a headless Chromium: all are opened unrun and untrusted; the first is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from scripts.notebooks import FOLDER

from ..exhaustive import left_out
from . import lab

pytestmark = [lab.in_a_browser("jupyterlab"), pytest.mark.timeout(240)]
LESSONS = sorted(FOLDER.glob("*.ipynb"))
FIRST = LESSONS[0]
TRUST = f"return [...{lab.NOTEBOOK}.content.model.cells].some(cell => cell.type == 'code' && cell.trusted)"
ALL_RAN = f"""return [...{lab.NOTEBOOK}.content.model.cells].filter(cell => cell.type == 'code')
    .every(cell => cell.executionState == 'idle' && cell.executionCount) && {lab.NOTEBOOK}.ran === true"""
RUN_ALL = f"""{lab.NOTEBOOK}.ran = false; const done = () => {{ {lab.NOTEBOOK}.ran = true }};
    window.jupyterapp.commands.execute('notebook:run-all-cells').then(done)"""
ERRORS = "return document.querySelectorAll('.jp-Notebook [data-mime-type*=error]').length"
WIDGET_ALT = "return document.querySelector('.widget-html img')?.alt"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.Server]:
    with lab.lab_server(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def page(server: lab.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all notebooks, with the first one open in JupyterLab."""
    with lab.browser(tmp_path_factory.mktemp("browser"), logged=True) as driver:
        lab.open_notebook(driver, server, FIRST)
        yield driver


def pictures_in(path: Path) -> int:
    """The number of pictures that a notebook shows before a run; answers to predictions are folded."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if not folded(cell)]
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    return sum(out.get("data", {}).get("text/html", "").count("<img ") for out in outputs)


def folded(cell: Any) -> bool:
    return bool(cell.metadata.get("jupyter", {}).get("outputs_hidden"))


def press(page: Any, selector: str, index: int = 0) -> Any:
    """Scroll an element to the middle of the window and click it; returns the element."""
    element = page.find_elements("css selector", selector)[index]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()
    return element


def wait_for_alt(page: Any, start: str) -> None:
    complaint = f"the widget's picture does not say {start!r}"
    lab.wait_for(lambda: (page.execute_script(WIDGET_ALT) or "").startswith(start), 20, complaint)


@pytest.mark.parametrize(
    "lesson",
    [FIRST, *map(left_out, LESSONS[1:-1]), LESSONS[-1]],  # a usual run opens all of them as pages
    ids=lambda path: path.stem[:2],
)
def test_opened_unrun_and_untrusted_its_pictures_are_there_with_alt_text(
    page: Any, server: lab.Server, lesson: Path
) -> None:
    lab.show_notebook(page, server, lesson)
    expected = pictures_in(lesson)
    shown = lab.wait_for(lambda: all_drawn(page, expected), 20, f"{expected} pictures are not there")
    assert page.execute_script(TRUST) is False
    assert page.execute_script(ERRORS) == 0
    assert all(len(picture["alt"]) > 40 for picture in shown)
    own = (server.url, server.url.replace("http", "ws"), "data:", "blob:")
    assert [url for url in lab.requested(page) if not url.startswith(own)] == []


def all_drawn(page: Any, expected: int) -> list[dict[str, Any]]:
    """The pictures on the page if the expected number is there and all are drawn; otherwise none."""
    shown = page.execute_script(lab.PICTURES, ".jp-Notebook .jp-OutputArea img")
    return shown if len(shown) == expected and all(picture["drawn"] for picture in shown) else []


def test_all_cells_run_the_widget_moves_and_its_picture_changes(page: Any, server: lab.Server) -> None:
    lab.open_notebook(page, server, FIRST)
    page.execute_script(RUN_ALL)
    lab.wait_for(lambda: page.execute_script(ALL_RAN), 90, "not all cells ran")
    assert page.execute_script(ERRORS) == 0
    wait_for_alt(page, "1 · The weight: tp cuts its columns")
    press(page, ".noUi-handle").send_keys("\ue014" * 5)  # the arrow key to the right
    wait_for_alt(page, "3 · The momentum: takes up the mean gradient")
    press(page, ".widget-play button")
    wait_for_alt(page, "The end. Compared with one process, 0 of 98,304 bits differ.")
