"""Starts JupyterLab and a real headless Chromium, opens a notebook and looks at it, all in one folder."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.first_screens import browser as browser
from scripts.first_screens import missing
from scripts.first_screens import requested as requested
from scripts.notebooks import ROOT

PLUGINS = {
    "notebook-extension/tracker": {"windowingMode": "none", "kernelShutdown": True},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
NOTEBOOK = "window.jupyterapp.shell.currentWidget"
READY = (
    f"return {NOTEBOOK}?.content?.model?.cells?.length > 0 && !!{NOTEBOOK}.sessionContext?.session?.kernel"
)
PICTURES = """return [...document.querySelectorAll(arguments[0])]
    .map(image => ({alt: image.alt, drawn: image.complete && image.naturalWidth > 0}))"""
SHOW = """const app = window.jupyterapp;
    const others = [...app.shell.widgets('main')].filter(widget => widget.context);
    app.commands.execute('docmanager:open', {path: arguments[0]});
    for (const widget of others.filter(widget => widget.context.path !== arguments[0])) {
        widget.context.model.dirty = false;  // it would ask whether to save the kernel's version
        widget.close();
    }"""
SHOWN = f"return {NOTEBOOK}?.context?.path === arguments[0] && {NOTEBOOK}.content?.model?.cells?.length > 0"


def in_a_browser(*packages: str) -> pytest.MarkDecorator:
    """The mark of tests that need a browser and these packages; they skip if one is missing."""
    lacking = [*missing(), *(name for name in packages if importlib.util.find_spec(name) is None)]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {', '.join(lacking)}")


needs_a_browser = in_a_browser()


@dataclass(frozen=True, slots=True)
class Server:
    """A running JupyterLab: its address, its token, and the folder whose notebooks it shows."""

    url: str
    token: str
    folder: Path


@contextmanager
def lab_server(folder: Path) -> Iterator[Server]:
    """JupyterLab over ``folder/notebooks``; settings, trust and runtime files are also in ``folder``."""
    from jupyter_server.serverapp import list_running_servers

    shown = folder / "notebooks"
    shown.mkdir()
    for plugin, settings in PLUGINS.items():
        target = folder / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        target.parent.mkdir(parents=True)
        target.write_text(json.dumps(settings))
    folders = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {"IPYTHONDIR": str(folder / "ipython"), "HOME": str(folder)}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
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
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())],
        env={**os.environ, **folders, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    try:
        runtime, complaint = str(folder / "runtime"), "JupyterLab did not start"
        found = wait_for(lambda: next(list_running_servers(runtime)), 120, complaint)
        yield Server(found["url"], found["token"], shown)
    finally:
        process.terminate()
        process.wait(20)


def open_notebook(driver: Any, server: Server, notebook: Path) -> None:
    """Copy a notebook to the server's folder and open it; returns when its cells and kernel are there."""
    shutil.copy(notebook, server.folder)
    driver.get(f"{server.url}lab/tree/{notebook.name}?token={server.token}&reset")
    wait_for(lambda: driver.execute_script(READY), 120, "the notebook did not open")


def show_notebook(driver: Any, server: Server, notebook: Path) -> None:
    """Open another notebook in the open JupyterLab, and close the others."""
    shutil.copy(notebook, server.folder)
    driver.execute_script(SHOW, notebook.name)
    wait_for(lambda: driver.execute_script(SHOWN, notebook.name), 120, "the notebook did not open")


def wait_for(look: Callable[[], Any], seconds: float, complaint: str) -> Any:
    """Call ``look`` until its result is true; returns the result."""
    from selenium.webdriver.support.wait import WebDriverWait

    waiting: Any = WebDriverWait(None, seconds, 0.1, [Exception])
    return waiting.until(lambda _: look(), complaint)
