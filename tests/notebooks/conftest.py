"""Fixtures that several test files share. The site is made once for all test processes."""

from __future__ import annotations

import fcntl
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import website

from . import lab


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site with still pictures. The first process that needs the site makes it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    target = shared / "made" / "the site é"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site.made").exists():
            with warnings.catch_warnings(record=True) as warned:
                assert website.main(["--still", "--out", str(target)]) == 0
            assert [each.message for each in warned if "pdoc" in each.filename] == []
            (shared / "site.made").touch()
    return target


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser that notes requests, for the tests of one file."""
    with lab.browser(tmp_path_factory.mktemp("browser"), logged=True) as driver:
        yield driver
