"""The benchmark of ``gram``: its tables hold the measurements, and its script writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from scripts.lab.benchmarks import gram
from scripts.lab.benchmarks.gram import CONTENDERS, StepTimes

SECONDS: Mapping[tuple[str, str], Sequence[float]] = {
    one: [0.1 * (place + 1)] * 3 for place, one in enumerate(CONTENDERS)
}


def test_seconds_are_compared_with_grams_of_the_same_recipe() -> None:
    table = gram.times_table([StepTimes("4 of 512 × 4096", SECONDS)], "command")
    over = {(row["strategy"], row["orthogonalize"]): row["over gram's"] for row in table.rows}
    assert over["gram", "stock"] == over["gram", "gram"] == 1.0
    assert over["zero1", "stock"] == round(0.1 / 0.5, 2)
    assert over["owner", "gram"] == round(0.4 / 0.6, 2)


def test_distances_keep_the_largest_of_each_spectrum_and_tp() -> None:
    found = list(gram.distances(sides=((8, 24), (24, 8)), tps=(2,)))
    rows = {(row["orthogonalize"], row["spectrum"]): row for row in gram.distance_table(found, "").rows}
    assert len(rows) == 3 * 8
    same = [one for one in found if (one.orthogonalize, one.spectrum) == ("minimax", "k^-3")]
    assert rows["minimax", "k^-3"]["error"] == float(f"{max(one.mine.error for one in same):.3g}")


def test_bytes_are_the_formulas() -> None:
    for row in gram.bytes_table("").rows:
        assert row["by ledger"] == row["by formula"]


def test_the_regime_tells_long_from_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "SHORT", 64)
    monkeypatch.setattr(gram, "ASPECTS", (1, 16))
    monkeypatch.setattr(gram, "TP", (2,))
    square, long = gram.regime_table("laptop", "").rows
    sent = [(float(str(row["MB, gram"])), float(str(row["MB, zero1"]))) for row in (square, long)]
    assert sent[0][0] > sent[0][1]
    assert sent[1][0] < sent[1][1]
    assert {row["least time"] for row in (square, long)} <= set(gram.FORMULAS)
