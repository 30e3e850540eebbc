"""The one command that makes all tables: bad options are refused before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import measure
from scripts.result_files import RESULTS, read_tables


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rounds", "0"], "--rounds must be at least 1; got 0"),
        (["--layers", "-1"], "--layers must be at least 1; got -1"),
        (["--batch", "3"], "4 does not divide 3"),
        (["--heads", "3"], "got 3 and 256"),
        (["--heads", "8", "--width", "36"], "got 8 and 36"),
    ],
)
def test_options_that_no_contender_could_work_with_are_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        measure.main(["--out", str(tmp_path), *options])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_a_folder_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(SystemExit):
        measure.main(["--out", str(taken)])
    assert f"cannot write to {taken}: File exists" in capsys.readouterr().err
    assert taken.read_text() == "mine"


def test_plots_are_drawn_from_the_kept_tables(tmp_path: Path) -> None:
    words = measure.plots(tmp_path, read_tables(RESULTS / "measure.json"))
    assert len(words) == 3
    for name, said in words.items():
        assert "</svg>" in (tmp_path / name).read_text(encoding="utf-8")
        assert f"![{said}]({name})" in (RESULTS / "README.md").read_text(encoding="utf-8")
