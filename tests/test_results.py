"""The measurements in docs/evidence.md are those in the results folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from muon_tutorial.orthogonalizers.named import RECIPES
from scripts import fused_figures, step_benchmark
from scripts.lab.benchmarks.contenders import CONTENDERS
from scripts.lab.benchmarks.newton_schulz_times import summary
from scripts.lab.benchmarks.steps_over_ranks import OWNER, RANKS
from scripts.result_files import quoted, read_tables

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("ring", "Gloo data", "whole step", "state of the matrices")
PAGE = ROOT / "docs" / "evidence.md"


def kept() -> dict[str, Any]:
    return json.loads((ROOT / "results" / "measure.json").read_text(encoding="utf-8"))


def table(title: str) -> list[dict[str, Any]]:
    return next(one["rows"] for one in kept()["tables"] if one["title"] == title)


def said() -> dict[str, list[str]]:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.search(r"<!-- from results/measure.json -->(.*?)<!-- end -->", page, re.DOTALL)
    assert rows is not None
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in rows[1].strip().splitlines()[2:]
    ]
    return {name: numbers for name, *numbers in cells}


@pytest.mark.parametrize("what", fused_figures.ROWS)
def test_the_figures_of_fused_and_sharded_updates_are_todays(what: str) -> None:
    """Only for the first of the script's seeds, and nearly: another CPU's products may round differently."""
    row = re.search(
        rf"^\| {re.escape(what)} \| (\S+) to (\S+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert row is not None
    least, largest = map(float, row.groups())
    assert least - 0.003 <= fused_figures.ROWS[what](0) <= largest + 0.003


def test_the_page_quotes_the_results() -> None:
    rows = {row["contender"]: row for row in table("Muon against AdamW")}
    quoted = said()
    assert len(quoted) >= 4
    for name, numbers in quoted.items():
        assert numbers == [f"{rows[name][column]:.3f}" for column in COLUMNS]


def test_the_results_name_their_machine_versions_command_and_date() -> None:
    facts = kept()["facts"]
    assert {"command", "date", "processor", "cores", "system", "python", "torch", "ranks", "work"} <= set(
        facts
    )
    assert str(facts["command"]).startswith("python scripts/measure.py")
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert all(f"- {name}: {value}" in text for name, value in facts.items())
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr|Users)/", text)


def test_predicted_bytes_are_the_kernels_for_every_contender() -> None:
    for row in table("Bytes of a step: every contender on the same work"):
        assert row["Gloo with preambles"] == row["counted by the kernel"]


def test_the_interface_agrees_within_two_per_cent() -> None:
    rows = table("Interface counters")
    assert len(rows) == len(CONTENDERS)
    assert all(abs(row["off by"]) < 0.02 for row in rows)


def test_the_page_quotes_the_whole_steps() -> None:
    tables = [*read_tables(ROOT / "results" / "step_benchmark.json").values()]
    page = PAGE.read_text(encoding="utf-8")
    block = quoted("step_benchmark.json").search(page)
    assert block is not None
    assert step_benchmark.page_lines(tables) == block[2]
    assert "torch.optim.Muon" in block[0]


def test_whole_steps_are_compared_with_three_packages_and_over_ranks() -> None:
    times, work, ranks = read_tables(ROOT / "results" / "step_benchmark.json").values()
    packages = [row for row in work.rows if not str(row["from"]).startswith(("torch", "this package"))]
    assert len(packages) >= 3
    assert [row["contender"] for row in times.rows] == [row["contender"] for row in work.rows]
    assert [row["ranks"] for row in ranks.rows if row["strategy"] == OWNER] == [*RANKS]


def test_the_loss_curves_are_of_three_seeds_and_300_steps() -> None:
    kept = json.loads((ROOT / "results" / "loss_curves.json").read_text(encoding="utf-8"))
    by_way: dict[str, list[list[float]]] = {}
    for run in kept["runs"]:
        by_way.setdefault(run["way"], []).append(run["losses"])
    assert len(by_way) >= 3
    assert all(len(runs) == 3 and all(len(losses) == 300 for losses in runs) for runs in by_way.values())


def newton_schulz() -> list[dict[str, Any]]:
    path = ROOT / "results" / "newton_schulz.json"
    return json.loads(path.read_text(encoding="utf-8"))["tables"]


def test_the_page_quotes_newton_schulz_by_name_and_every_recipe_was_timed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    said = summary([(table["title"], table["rows"]) for table in newton_schulz()])
    assert f"<!-- from results/newton_schulz.json -->\n\n{said}\n\n<!-- end -->" in page
    results = (ROOT / "results" / "newton_schulz.md").read_text(encoding="utf-8")
    assert all(f"## {table['title']}" in results for table in newton_schulz())
    assert "(newton_schulz.svg)" in results
    assert (ROOT / "results" / "newton_schulz.svg").is_file()
    for table in newton_schulz():
        names = {row["orthogonalize"] for row in table["rows"]}
        assert {"torch.optim.Muon", "stock", "auto", "three_steps", "minimax"} <= names
    assert set(RECIPES) <= {row["orthogonalize"] for row in newton_schulz()[0]["rows"]}
