"""Tables name their contents, and the formulas in predicted tables equal the ledgers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from muon_tutorial.evidence.tables import Table, median_and_spread
from scripts.lab.benchmarks.predicted import strategies_table


def test_a_table_is_markdown_with_its_command_and_notes() -> None:
    rows = [{"who": who, "how many": cell} for who, cell in (("a", 1234), ("b", None), ("c", 0.5))]
    table = Table("Bytes", tuple(rows), "run me", ("A note.",))
    lines = table.markdown().splitlines()
    assert lines[:3] == ["## Bytes", "", "`run me`"]
    assert lines[4:6] == ["| who | how many |", "| --- | ---: |"]
    assert lines[6:] == ["| a | 1,234 |", "| b | – |", "| c | 0.500 |", "", "A note."]
    assert json.loads(json.dumps(table.data()))["rows"][0] == {"who": "a", "how many": 1234}


def test_the_spread_is_the_middle_half() -> None:
    assert median_and_spread([5.0, 1.0, 4.0, 2.0, 3.0]) == (3.0, 2.0, 4.0)


def test_every_strategys_formula_is_its_ledger() -> None:
    rows = [row for row in strategies_table("").rows if row["by ledger"] is not None]
    assert len(rows) == 15
    assert all(row["by formula"] == row["by ledger"] for row in rows)


def test_ratios_are_of_whole_steps_and_their_sign_turns_round() -> None:
    """zero1 sends 1.25 times the bytes of AdamW's ZeRO-1 (the paper's bound), or 1.5 times in bf16."""
    rows: Any = {(row["strategy"], row["g"], row["p"]): row for row in strategies_table("").rows}
    over_ddp, over_zero1 = (
        {key: row[f"over {other} AdamW"] for key, row in rows.items()} for other in ("DDP", "ZeRO-1")
    )
    assert over_ddp["round_robin, all_reduce back", 4, 4] == 1.5
    assert [over_zero1["zero1, gather all", g, p] for g, p in ((4, 4), (2, 2))] == [1.25, 1.5]
    assert over_zero1["zero1, gather all", 4, 2] == pytest.approx(4 / 3)
    assert over_ddp["zero1, boundary", 4, 2] < 1 < over_ddp["zero1, boundary", 4, 4]
