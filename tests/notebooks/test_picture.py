"""The README's picture is the one that notebook 00 drew."""

from __future__ import annotations

import pytest

from scripts.picture import TARGET, drawn


def test_the_readmes_picture_is_notebook_00s_and_one_without_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert TARGET.read_text() == drawn(), "run python scripts/picture.py"
    monkeypatch.setattr("scripts.picture.CELL", "no such cell")
    with pytest.raises(SystemExit, match="no such cell"):
        drawn()
