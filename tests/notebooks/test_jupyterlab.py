"""Notebooks in JupyterLab in a real headless Chromium: opened unrun and untrusted, then run, then moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from scripts.notebooks import FOLDER

from . import lab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(lab.why_not() is not None, reason=str(lab.why_not())),
]

FIRST = FOLDER / "00_a_distributed_muon_step.ipynb"
PICTURES = """return [...document.querySelectorAll('.jp-Notebook .jp-OutputArea img')]
    .map(image => ({alt: image.alt, drawn: image.complete && image.naturalWidth > 0}))"""
TRUST = f"return [...{lab.NOTEBOOK}.content.model.cells].some(cell => cell.type == 'code' && cell.trusted)"
ALL_RAN = f"""return [...{lab.NOTEBOOK}.content.model.cells].filter(cell => cell.type == 'code')
    .every(cell => cell.executionState == 'idle' && cell.executionCount) && {lab.NOTEBOOK}.ran === true"""
RUN_ALL = f"""{lab.NOTEBOOK}.ran = false; const done = () => {{ {lab.NOTEBOOK}.ran = true }};
    window.jupyterapp.commands.execute('notebook:run-all-cells').then(done)"""
ERRORS = "return document.querySelectorAll('.jp-Notebook [data-mime-type*=error]').length"
WIDGET_ALT = "return document.querySelector('.widget-html img')?.alt"
REQUESTS = "return performance.getEntriesByType('resource').map(entry => entry.name)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.Server]:
    with lab.lab_server(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture
def page(server: lab.Server, tmp_path: Path) -> Iterator[Any]:
    with lab.browser(tmp_path) as driver:
        lab.open_notebook(driver, server, FIRST)
        yield driver


def pictures_in(path: Path) -> int:
    outputs = [out for cell in nbformat.read(path, as_version=4).cells for out in cell.get("outputs", [])]
    return sum("<img " in out.get("data", {}).get("text/html", "") for out in outputs)


def press(page: Any, selector: str, index: int = 0) -> Any:
    """The element, scrolled to the middle of the window and clicked."""
    element = page.find_elements("css selector", selector)[index]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()
    return element


def wait_for_alt(page: Any, start: str) -> None:
    complaint = f"the widget's picture does not say {start!r}"
    lab.wait_for(lambda: (page.execute_script(WIDGET_ALT) or "").startswith(start), 20, complaint)


def test_opened_unrun_and_untrusted_its_pictures_are_there_with_alt_text(
    page: Any, server: lab.Server
) -> None:
    shown = lab.wait_for(lambda: page.execute_script(PICTURES), 20, "no picture is there")
    assert page.execute_script(TRUST) is False
    assert len(shown) == pictures_in(FIRST) > 0
    assert all(picture["drawn"] and len(picture["alt"]) > 40 for picture in shown)
    assert [
        url for url in page.execute_script(REQUESTS) if not url.startswith((server.url, "data:", "blob:"))
    ] == []


def test_all_cells_run_the_widget_moves_and_its_picture_changes(page: Any, tmp_path: Path) -> None:
    page.execute_script(RUN_ALL)
    lab.wait_for(lambda: page.execute_script(ALL_RAN), 90, "not all cells ran")
    assert page.execute_script(ERRORS) == 0
    wait_for_alt(page, "1 · its weight, before the step: rank 0 holds all rows")
    press(page, ".noUi-handle").send_keys("\ue014" * 2)  # the arrow key to the right
    wait_for_alt(page, "3 · its momentum, gradients averaged, shared out over dp: rank 0 holds rows 0 to 23")
    press(page, ".widget-toggle-button", 3)
    wait_for_alt(page, "3 · its momentum, gradients averaged, shared out over dp: rank 3 holds rows 24 to 47")
    page.save_screenshot(str(tmp_path / "after.png"))
