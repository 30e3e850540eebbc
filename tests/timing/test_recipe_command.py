"""The command that shows the choices of ``"auto"``: it reads shapes, measures, stores and prints."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from muon_tutorial.cli import main
from muon_tutorial.errors import UsageError
from muon_tutorial.optimizer.auto_recipes import kept_calibration
from muon_tutorial.orthogonalizers.calibration import Calibration
from muon_tutorial.timing.recipe_command import read_shapes


def test_shapes_are_read_once_each_whatever_their_orientation() -> None:
    assert read_shapes("8x4, 4x8,3x3") == ((4, 8), (3, 3))


@pytest.mark.parametrize("text", ["", "8", "8x", "0x3", "8x8x8", "-1x2", "8x8;3x3", "9999999x1"])
def test_a_text_that_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shapes takes sizes such as 768x768"):
        read_shapes(text)


def test_the_command_measures_keeps_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept_calibration.cache_clear()
    assert main(["recipes", "--shapes", "8x16", "--folder", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    times = found["shapes"][0]["seconds"]
    assert found["fastest"] == {"8x16": min(times, key=times.get)}
    assert main(["recipes", "--shapes", "16x8", "--folder", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "← auto" in shown
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "0"], "--threads is at least 1"),
        (["--device", "abacus"], "--device abacus: "),
        (["--folder", __file__], "there is a file with this name"),
        (["--folder", f"{__file__}/below"], "cannot be used: Not a directory"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1


def test_a_calibration_that_is_not_kept_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = "muon_tutorial.timing.recipe_command.kept_calibration"
    with patch(kept, return_value=Calibration("a machine")):
        assert main(["recipes", "--shapes", "8x16", "--folder", str(tmp_path)]) == 0
    assert "a machine; not kept in " in capsys.readouterr().out.replace("\n", "")
