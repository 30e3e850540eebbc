"""What README.md says of measurements is what the results folder keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("ring", "Gloo data", "whole step", "state of the matrices")


def kept() -> dict[str, Any]:
    return json.loads((ROOT / "results" / "measure.json").read_text(encoding="utf-8"))


def table(title: str) -> list[dict[str, Any]]:
    return next(one["rows"] for one in kept()["tables"] if one["title"] == title)


def said() -> dict[str, list[str]]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.search(r"<!-- from results/measure.json -->(.*?)<!-- end -->", readme, re.DOTALL)
    assert rows is not None
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in rows[1].strip().splitlines()[2:]
    ]
    return {name: numbers for name, *numbers in cells}


def test_the_readme_quotes_the_results() -> None:
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
    for row in table("Bytes of a step: fifteen contenders on the same work"):
        assert row["Gloo with preambles"] == row["counted by the kernel"]


def test_the_interface_agrees_within_two_per_cent() -> None:
    rows = table("Interface counters")
    assert len(rows) == 15
    assert all(abs(row["off by"]) < 0.02 for row in rows)
