"""The packaged numbers behind the published report's figures; a doctest checks the figures themselves."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from muon_tutorial.errors import TraceError
from muon_tutorial.learn.cheaper.published_traces import gpu_step, report
from scripts.lab.report_001 import as_markdown, check_report, read_step, read_summaries

VARIABLE = "MUON_TUTORIAL_TRACES"  # a folder with the report's four traces, gzipped or not


def test_what_stands_beside_them() -> None:
    beside = {ratio.what: ratio.shown for figure in check_report() for ratio in figure.beside}
    assert list(beside.values()) == [
        "4.0 and 4.4 times", "0.594×", "0.24×", "1.25×", "1.70×",
        "40.6%", "-70%",
        "61%", "44%", "5.2%", "37%",
        "1.12×", "1.42×", "1.99×",
        "2.12×", "1.74×", "0.900×", "0.95×", "1.54×", "0.987×",
        "50%", "190%",
    ]  # fmt: skip


def test_sync_and_async_runs_asked_for_the_same_collectives() -> None:
    def asked(key: str) -> set[tuple[str, int, str, int, int, int]]:
        rows = report()[key].collectives
        return {(row.kind, row.group, row.dtype, row.sent, row.received, row.count) for row in rows}

    assert asked("muon") == asked("muon_async")
    assert asked("adamw") == asked("adamw_async")
    assert not asked("adamw") & asked("muon")


def test_the_package_holds_what_the_traces_say() -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"the report's traces are not here; set {VARIABLE} to a folder that holds them")
    assert report() == read_summaries(folder)
    assert gpu_step() == read_step(folder)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_command_prints_a_table_with_a_row_for_every_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = check_report()
    monkeypatch.setattr(sys, "argv", ["report_001"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("scripts.lab.report_001", run_name="__main__")
    printed = capsys.readouterr().out
    assert printed == as_markdown(figures) + "\n"
    assert printed.count("\n| ") == sum(1 + len(figure.beside) for figure in figures)


def test_a_folder_without_the_traces_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="trace_adamw_FULLSTEP_rank0"):
        read_summaries(tmp_path)
