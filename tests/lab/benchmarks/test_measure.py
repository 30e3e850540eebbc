"""The command that makes all tables draws its plots from the stored tables."""

from __future__ import annotations

from pathlib import Path

from scripts import measure
from scripts.result_files import RESULTS, read_tables


def test_plots_are_drawn_from_the_kept_tables(tmp_path: Path) -> None:
    words = measure.plots(tmp_path, read_tables(RESULTS / "measure.json"))
    assert len(words) == 3
    for name, said in words.items():
        assert "</svg>" in (tmp_path / name).read_text(encoding="utf-8")
        assert f"![{said}]({name})" in (RESULTS / "README.md").read_text(encoding="utf-8")
