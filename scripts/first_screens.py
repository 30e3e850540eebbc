"""Takes a screenshot of the top of every lesson's page, and checks that title, question and picture show.

    python scripts/first_screens.py [00 …] [--out FOLDER]     written to dist/first_screens/

The pages are made with still pictures, so no cell is run. A headless Chromium opens the pages, 1200 × 900
and 400 × 800 pixels. Without a Chromium, the script says so and ends without an error.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.errors import UsageError
from scripts import pages
from scripts.files import ROOT, made, run_writer

TARGET = ROOT / "dist" / "first_screens"
SCREENS = ((1200, 900), (400, 800))
"""Width and height of a laptop's window and of a phone, in pixels."""
FLAGS = (  # in addition to chromedriver's own flags
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-component-update",
    "--window-size=1280,1600",
)
_BOXES = """
const box = element => {
    if (!element) return null;
    const {top, bottom} = element.getBoundingClientRect();
    return {top, bottom};
};
const first = document.querySelector('main .text'), question = [...first.querySelectorAll('p')].at(-1);
const hero = document.querySelector('.hero img'), type = hero && hero.clientWidth / hero.naturalWidth;
return [...[first.querySelector('h1'), question, hero].map(box), type];
"""


def missing() -> list[str]:
    """The programs and packages that browser checks need but this machine lacks."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return lacking if importlib.util.find_spec("selenium") else [*lacking, "selenium"]


@contextmanager
def browser(folder: Path, logged: bool = False) -> Iterator[Any]:
    """A headless Chromium with a profile of its own; with ``logged``, it records the requests of pages."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    if logged:
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={folder / 'chromium'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        # JupyterLab needs focus to have a current widget, and a headless window may never be focused.
        driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        yield driver
    finally:
        driver.quit()


@contextmanager
def screen(driver: Any, width: int, height: int) -> Iterator[None]:
    """Make the browser emulate a screen of this size; a narrow screen counts as a phone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def requested(driver: Any) -> list[str]:
    """The URLs that pages have requested since the last call, without the browser's own pages."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [asked["request"]["url"] for asked in sent if not asked["documentURL"].startswith("chrome")]


def problems(driver: Any, height: int) -> list[str]:
    """The errors of the open page: its title, question or hero picture is not on the first screen."""
    title, question, hero, size = driver.execute_script(_BOXES)
    seen = 1.0  # the fraction of the picture's height that is above the lower edge of the screen
    if hero:
        tall = max(hero["bottom"] - hero["top"], 1.0)
        seen = max(0.0, min(hero["bottom"], height) - hero["top"]) / tall
    wrong = {
        "the title is not on the first screen": not (
            title and title["top"] >= 0 and title["bottom"] <= height
        ),
        "the question is not on the first screen": not (question and question["bottom"] <= height),
        "there is no hero picture": not hero,
        "more than half of the hero picture is below the screen": seen < 0.5,
        "the hero picture's type is smaller than 11 pixels": hero and size < 0.75,  # its size: 11 points
    }
    return [what for what, is_so in wrong.items() if is_so]


def write(target: Path, names: Sequence[str] = ()) -> None:
    """Write all screenshots, and check each page; UsageError says at the end which pages failed."""
    if lacking := missing():
        print(f"skipped: this needs {', '.join(lacking)}")
        return
    chosen, found = pages.committed(names), []
    made(target)
    with TemporaryDirectory() as folder, browser(Path(folder)) as driver:
        for path in chosen:
            page = Path(folder) / f"{path.stem}.html"
            page.write_text(pages.page_of(path, still=True), encoding="utf-8")
            for width, height in SCREENS:
                with screen(driver, width, height):
                    driver.get(page.as_uri())
                    taken = base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", {})["data"])
                    (target / f"{path.stem}-{width}.png").write_bytes(taken)
                    found += [f"{path.stem}, {width} × {height}: {what}" for what in problems(driver, height)]
    print(f"wrote {len(chosen) * len(SCREENS)} screenshots to {target}")
    if found:
        raise UsageError("; ".join(found))


def main(arguments: Sequence[str] | None = None) -> int:
    return run_writer("first_screens", __doc__, write, arguments, TARGET, names=pages.NAMES)


if __name__ == "__main__":
    sys.exit(main())
