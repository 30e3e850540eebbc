"""A first screen without title, question or hero picture is found; ``test_pages.py`` looks at all lessons."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from scripts import first_screens
from scripts.notebooks import read_text
from scripts.pages import _export, committed

from . import lab

FIRST = committed()[0]
TEXT = """
# %% [markdown]
# # A title
#
# A question?

# %% tags=["setup", "hero"] jupyter={"source_hidden": true}
hero()

# %% [markdown]
# The end.
"""


BELOW = "more than half of the hero picture is below the screen"


@lab.needs_a_browser
@pytest.mark.parametrize(
    ("before", "tall", "said"),
    [
        ("", 300, []),
        ("A long story.\n#\n# " * 40, 300, ["the question is not on the first screen", BELOW]),
        ("", 3000, [BELOW]),
        ("", None, ["there is no hero picture"]),
    ],
)
def test_a_screen_that_begins_too_late_is_found(
    before: str, tall: int | None, said: list[str], browser: Any, tmp_path: Path
) -> None:
    notebook = read_text(TEXT.replace("question?", f"question?\n#\n# {before}"))
    drawn = f"<svg xmlns='http://www.w3.org/2000/svg' width='300' height='{tall}'/>"
    image = f'<img alt="hero" width="300" src="data:image/svg+xml,{drawn}">'
    shown = image if tall is not None else "no picture"
    notebook.cells[1].outputs = [nbformat.v4.new_output("display_data", {"text/html": shown})]
    page = tmp_path / "page.html"
    page.write_text(_export(notebook, []), encoding="utf-8")
    with first_screens.screen(browser, 1200, 900):
        browser.get(page.as_uri())
        assert first_screens.problems(browser, 1200, 900) == said


@lab.needs_a_browser
def test_the_script_writes_a_screenshot_of_each_size(tmp_path: Path) -> None:
    number = FIRST.stem[:2]
    assert first_screens.main([number, "--out", str(tmp_path / "shots")]) == 0
    sizes = {path.name: png_size(path) for path in (tmp_path / "shots").iterdir()}
    assert sizes == {f"{FIRST.stem}-{width}.png": (width, height) for width, height in first_screens.SCREENS}


def png_size(path: Path) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def test_without_a_browser_it_says_what_it_needs_and_nothing_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_screens, "missing", lambda: ["chromium"])
    assert first_screens.main(["--out", str(tmp_path / "shots")]) == 0
    assert re.fullmatch(r"skipped: this needs chromium\n", capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
