"""JupyterLab in a real headless Chromium: start both, open a notebook, look at it. All in one folder."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.notebooks import ROOT

CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1600",
)
NOTEBOOK = "window.jupyterapp.shell.currentWidget"
READY = (
    f"return {NOTEBOOK}?.content?.model?.cells?.length > 0 && !!{NOTEBOOK}.sessionContext?.session?.kernel"
)
SHOW = """const app = window.jupyterapp;
    const others = [...app.shell.widgets('main')].filter(widget => widget.context);
    app.commands.execute('docmanager:open', {path: arguments[0]});
    for (const widget of others.filter(widget => widget.context.path !== arguments[0])) {
        widget.context.model.dirty = false;  // it would ask whether to save the kernel's version
        widget.close();
    }"""
SHOWN = f"return {NOTEBOOK}?.context?.path === arguments[0] && {NOTEBOOK}.content?.model?.cells?.length > 0"


def why_not(*packages: str) -> str | None:
    """What is missing for a run in a browser, or None."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    missing += [name for name in ("selenium", *packages) if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True)
class Server:
    """A running JupyterLab: its address, its token, and the folder whose notebooks it shows."""

    url: str
    token: str
    folder: Path


@contextmanager
def lab_server(folder: Path) -> Iterator[Server]:
    """JupyterLab over ``folder/notebooks``; settings, trust and runtime files are in ``folder``, too."""
    shown = folder / "notebooks"
    shown.mkdir()
    _write_settings(folder, "notebook-extension/tracker", windowingMode="none", kernelShutdown=True)
    _write_settings(folder, "apputils-extension/notification", fetchNews="false", checkForUpdates=False)
    process = subprocess.Popen(
        _lab_command(folder, shown), env=_lab_environment(folder), stderr=subprocess.DEVNULL
    )
    try:
        yield wait_for(lambda: _server_info(folder, shown), 60, "JupyterLab did not start")
    finally:
        process.terminate()
        process.wait(20)


def _write_settings(folder: Path, plugin: str, **values: Any) -> None:
    target = folder / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(values))


def _lab_command(folder: Path, shown: Path) -> list[str]:
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.allow_root": True,
        "ServerApp.open_browser": False,
        "ServerApp.root_dir": shown,
        "LabApp.expose_app_in_browser": True,
        "LabApp.user_settings_dir": folder / "settings",
        "LabApp.workspaces_dir": folder / "workspaces",
        "LabApp.extension_manager": "readonly",
    }
    return [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]


def _lab_environment(folder: Path) -> dict[str, str]:
    own = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"IPYTHONDIR": str(folder / "ipython"), "HOME": str(folder)}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **own, "PYTHONPATH": path}


def _server_info(folder: Path, shown: Path) -> Server | None:
    for file in (folder / "runtime").glob("jpserver-*.json"):
        found = json.loads(file.read_text() or "{}")
        if found:
            return Server(found["url"], found["token"], shown)
    return None


@contextmanager
def browser(folder: Path, logged: bool = False) -> Iterator[Any]:
    """A headless Chromium with a profile of its own; with ``logged``, ``requested`` can be asked."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    if logged:
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*CHROMIUM_FLAGS, f"--user-data-dir={folder / 'chromium'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def requested(driver: Any) -> list[str]:
    """The address of everything pages have asked for since the last call, but for the browser's own."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [asked["request"]["url"] for asked in sent if not asked["documentURL"].startswith("chrome:")]


def photograph(driver: Any, folder: Path, name: str, piece: int = 1600) -> list[Path]:
    """The whole page as pictures of at most ``piece`` pixels in height; returns where they are."""
    metrics = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    files = []
    for top in range(0, math.ceil(metrics["height"]), piece):
        height = min(piece, metrics["height"] - top)
        clip = {"x": 0, "y": top, "width": metrics["width"], "height": height, "scale": 1}
        taken = driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
        )
        files.append(folder / f"{name}-{top // piece:02d}.png")
        files[-1].write_bytes(base64.b64decode(taken["data"]))
    return files


def open_notebook(driver: Any, server: Server, notebook: Path) -> None:
    """Copy a notebook to the server's folder and open it; returns when its cells and kernel are there."""
    shutil.copy(notebook, server.folder)
    driver.get(f"{server.url}lab/tree/{notebook.name}?token={server.token}&reset")
    wait_for(lambda: driver.execute_script(READY), 60, "the notebook did not open")


def show_notebook(driver: Any, server: Server, notebook: Path) -> None:
    """Open one more notebook in the JupyterLab that is open already, and close the others."""
    shutil.copy(notebook, server.folder)
    driver.execute_script(SHOW, notebook.name)
    wait_for(lambda: driver.execute_script(SHOWN, notebook.name), 60, "the notebook did not open")


def photograph_notebook(driver: Any, folder: Path, name: str) -> list[Path]:
    """The whole of the open notebook as pictures: the window is made as tall as the notebook for that."""
    height = driver.execute_script(
        f"return {NOTEBOOK}.node.querySelector('.jp-WindowedPanel-outer').scrollHeight"
    )
    size = {"width": 1280, "height": height + 200, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        return photograph(driver, folder, name)
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def wait_for(look: Callable[[], Any], seconds: float, complaint: str) -> Any:
    """Look until there is something to see; returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            seen = look()
        except Exception:
            seen = None
        if seen:
            return seen
        time.sleep(0.1)
    raise TimeoutError(complaint)
