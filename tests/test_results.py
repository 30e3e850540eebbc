"""The measurements in docs/evidence.md equal the ones in the results folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from muon_tutorial.orthogonalizers.named import RECIPES
from scripts import measure, step_benchmark
from scripts.lab.benchmarks.newton_schulz_times import summary
from scripts.lab.benchmarks.steps_over_ranks import OWNER, RANKS
from scripts.result_files import RESULTS, quoted, read_tables

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("ring", "Gloo data", "whole step", "state of the matrices")
PAGE = ROOT / "docs" / "evidence.md"


def table(title: str) -> list[dict[str, Any]]:
    return [*read_tables(RESULTS / "measure.json")[title].rows]


def on_the_page(data: str) -> str:
    """The lines that the page quotes from a file of results."""
    found = quoted(data).search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found[2]


def test_the_page_quotes_the_results() -> None:
    rows = {row["contender"]: row for row in table("Muon against AdamW")}
    lines = on_the_page("measure.json").strip().splitlines()[2:]
    assert len(lines) >= 4
    for name, *numbers in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines):
        assert numbers == [f"{rows[name][column]:.3f}" for column in COLUMNS]


def test_the_results_name_their_machine_versions_command_and_date() -> None:
    facts = json.loads((RESULTS / "measure.json").read_text(encoding="utf-8"))["facts"]
    assert {"date", "processor", "cores", "system", "python", "torch", "ranks", "work"} <= set(facts)
    assert str(facts["command"]).startswith("python scripts/measure.py")
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert all(f"- {name}: {value}" in text for name, value in facts.items())
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr|Users)/", text)


def test_predicted_bytes_are_the_kernels_for_every_contender() -> None:
    for row in table("Bytes of a step: every contender on the same work"):
        assert row["Gloo with preambles"] == row["counted by the kernel"]


def test_plots_are_drawn_from_the_kept_tables(tmp_path: Path) -> None:
    words = measure.plots(tmp_path, read_tables(RESULTS / "measure.json"))
    assert len(words) == 3
    for name, said in words.items():
        assert "</svg>" in (tmp_path / name).read_text(encoding="utf-8")
        assert f"![{said}]({name})" in (RESULTS / "README.md").read_text(encoding="utf-8")


def test_the_page_quotes_the_whole_steps() -> None:
    tables = [*read_tables(RESULTS / "step_benchmark.json").values()]
    assert step_benchmark.page_lines(tables) == on_the_page("step_benchmark.json")
    assert "torch.optim.Muon" in on_the_page("step_benchmark.json")


def test_whole_steps_are_compared_with_three_packages_and_over_ranks() -> None:
    times, work, ranks = read_tables(RESULTS / "step_benchmark.json").values()
    packages = [row for row in work.rows if not str(row["from"]).startswith(("torch", "this package"))]
    assert len(packages) >= 3
    assert [row["contender"] for row in times.rows] == [row["contender"] for row in work.rows]
    assert [row["ranks"] for row in ranks.rows if row["strategy"] == OWNER] == [*RANKS]


def test_the_loss_curves_are_of_three_seeds_and_300_steps() -> None:
    kept = json.loads((RESULTS / "loss_curves.json").read_text(encoding="utf-8"))
    by_way: dict[str, list[list[float]]] = {}
    for run in kept["runs"]:
        by_way.setdefault(run["way"], []).append(run["losses"])
    assert len(by_way) >= 3
    assert all(len(runs) == 3 and all(len(losses) == 300 for losses in runs) for runs in by_way.values())


def test_the_page_quotes_newton_schulz_by_name_and_every_recipe_was_timed() -> None:
    tables = read_tables(RESULTS / "newton_schulz.json")
    said = summary([(title, table.rows) for title, table in tables.items()])
    assert on_the_page("newton_schulz.json") == f"\n{said}\n\n"
    text = (RESULTS / "newton_schulz.md").read_text(encoding="utf-8")
    assert all(f"## {title}" in text for title in tables)
    assert "(newton_schulz.svg)" in text
    assert (RESULTS / "newton_schulz.svg").is_file()
    timed = [{row["orthogonalize"] for row in table.rows} for table in tables.values()]
    assert all(names >= {"torch.optim.Muon", "stock", "auto", "three_steps", "minimax"} for names in timed)
    assert set(RECIPES) <= timed[0]
