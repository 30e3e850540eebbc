"""Scripts that record or time ranks refuse what they cannot do before any rank starts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from scripts import faults, measure, trace_run


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        (trace_run, ["--steps", "0"], "--steps: must be at least 1, got 0"),
        (trace_run, ["--folder", "{}/file"], "(it is a file)"),
        (measure, ["--out", "{}", "--rounds", "0"], "--rounds: must be at least 1, got 0"),
        (measure, ["--out", "{}/file"], "cannot write to {}/file: File exists"),
        (faults, ["--count", "2", "--only", "nosuchkind"], "no case matches"),
        (faults, ["--count", "2", "--case", "99"], "no case matches"),
        (faults, ["--count", "2", "--out", "{}/file"], "it is a file"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused_in_one_line(
    script: ModuleType,
    options: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(faults, "run", None)
    (tmp_path / "file").write_text("mine")
    try:
        code = script.main([option.format(tmp_path) for option in options])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert says.format(tmp_path) in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "mine"
