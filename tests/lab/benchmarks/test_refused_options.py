"""Scripts that record or time ranks refuse what they cannot do before any rank starts."""

from __future__ import annotations

from types import ModuleType

import pytest

from scripts import measure_launch, trace_run


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        (trace_run, ["--steps", "0"], "--steps must be at least 1, got 0"),
        (trace_run, ["--warmup", "-1"], "--warmup must be at least 0, got -1"),
        (trace_run, ["--folder", __file__], "(it is a file)"),
        (measure_launch, ["--times", "0"], "--times must be at least 1, got 0"),
        (measure_launch, ["--ranks", "0"], "--ranks must be at least 1, got 0"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused_in_one_line(
    script: ModuleType, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = script.main(options)
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
