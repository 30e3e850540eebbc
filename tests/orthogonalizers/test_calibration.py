"""Choices as text, calibrations as files, and measurements."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from muon_tutorial.errors import UsageError
from muon_tutorial.orthogonalizers import calibration
from muon_tutorial.orthogonalizers.calibration import Calibration, measure_shape, read_calibration
from muon_tutorial.orthogonalizers.orthogonalize_option import CANDIDATES, check_orthogonalize, name_for

CPU = torch.device("cpu")
DEFAULTS = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5}


def test_a_shape_that_nothing_was_chosen_for_is_named() -> None:
    with pytest.raises(UsageError, match=r"has no choice for a matrix of shape \(8, 8\)"):
        name_for("auto 8x24=gram", 8, 8)


@pytest.mark.parametrize("text", ["auto 8x8=turbo", "auto 8x8", "auto 8=gram", "auto -8x8=gram", "auto gram"])
def test_a_text_that_is_no_choice_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"must give a recipe for each shape, .* recipes are stock, float32"):
        check_orthogonalize({**DEFAULTS, "orthogonalize": text})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a calibration"),
        ("{}", "is not a calibration"),
        ('{"machine": "m", "shapes": [7]}', "is not a calibration"),
        ('{"machine": "m", "shapes": [{"rows": 2, "columns": 2, "seconds": ["a"]}]}', "is not a calibration"),
        ('{"machine": "m", "shapes": [{"rows": 1, "columns": 1, "seconds": {"fast": 1}}]}', "does not fit"),
        ('{"machine": "m", "shapes": [{"rows": 1, "columns": 1, "seconds": {"gram": 0}}]}', "does not fit"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        read_calibration(tmp_path / "c.json")
    with pytest.raises(UsageError, match="cannot be read"):
        read_calibration(tmp_path / "absent.json")


def test_candidates_take_turns_and_the_least_of_their_seconds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    seconds = {"stock": [9.0, 5.0, 3.0, 4.0], "gram": [1.0, 6.0, 7.0, 8.0]}
    monkeypatch.setattr(calibration, "_hopeful", lambda *_: list(seconds))
    monkeypatch.setattr(calibration, "_run", lambda name, *_: name)

    def timed(name: str, _: torch.device) -> float:
        turns.append(name)
        return seconds[name][turns.count(name) - 1]

    monkeypatch.setattr(calibration, "_seconds", timed)
    assert measure_shape(100, 7, CPU, rounds=3).seconds == {"stock": 3.0, "gram": 6.0}  # the first warms up
    assert turns == ["stock", "gram"] * 4
    turns.clear()
    large = measure_shape(3 * calibration.LARGEST_SIDE, 7, CPU, rounds=1).seconds
    assert large == {"stock": 5.0, "gram": 6.0}  # only the smaller side counts
    turns.clear()
    monkeypatch.setattr(calibration, "_matrices", lambda *_: torch.empty(8, 8))
    side = 2 * calibration.LARGEST_SIDE
    assert measure_shape(side, side, CPU, rounds=1).seconds == {"stock": 8 * 5.0, "gram": 8 * 6.0}


def test_a_small_shape_is_measured_once_and_the_best_is_among_the_measured() -> None:
    found = Calibration("here").measured([(5, 3), (5, 3)], CPU)
    assert len(found.shapes) == 1
    times = found.find(3, 5)
    assert times is not None
    assert set(times.seconds) <= set(CANDIDATES)
    assert times.seconds[times.fastest] == min(times.seconds.values())
    assert found.measured([(5, 3), (3, 5)], CPU) is found


def test_hopeless_candidates_follow_from_operations_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(n: int, dtype: torch.dtype, _: torch.device) -> float:
        return {torch.bfloat16: fast, torch.float32: 1.0}[dtype]

    monkeypatch.setattr(calibration, "_rate", rate)
    fast = 0.01
    assert set(calibration._hopeful(768, 3072, CPU)) == {"gram", "minimax", "three_steps"}
    fast = 100.0
    hopeful = calibration._hopeful(768, 3072, CPU)
    assert {"polar_express", "minimax_bf16"} <= set(hopeful)
    assert not {"gram", "three_steps"} & set(hopeful)


def test_a_clock_that_stands_still_is_not_gone_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit of processor time, the clock advances only every few milliseconds."""
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    measured = measure_shape(9, 9, CPU, rounds=1)
    assert all(0 < seconds < 10 for seconds in measured.seconds.values())
