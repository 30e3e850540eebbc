"""Fixtures that several test files share, made once for all test processes."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from scripts import website


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site with still pictures; the first process that needs it makes it, by its command."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    target = shared / "made" / "the site é"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site.made").exists():
            assert website.main(["--still", "--out", str(target)]) == 0
            (shared / "site.made").touch()
    return target
