"""The benchmarks of Newton–Schulz recipes and of ``gram``: their counts and tables, on small matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from muon_tutorial.orthogonalizers.iterate import orthogonalize
from muon_tutorial.orthogonalizers.named import RECIPES, STOCK
from scripts import gram
from scripts.gram import CONTENDERS, StepTimes
from scripts.lab.benchmarks import newton_schulz_times
from scripts.lab.benchmarks.newton_schulz_times import TORCH, WorkTimes, contender, draw, measure, times_table


def test_contenders_orthogonalize_the_same_matrices() -> None:
    matrices = [draw((8, 12), 0), draw((16, 8), 1)]
    before = [matrix.clone() for matrix in matrices]
    theirs, ours = contender(TORCH)(matrices), contender(STOCK)(matrices)
    assert all(torch.equal(*both) for both in zip(theirs, ours, strict=True))
    by_shape = contender("auto", {(8, 12): "gram", (8, 16): STOCK})(matrices)
    assert torch.equal(by_shape[0], orthogonalize(matrices[0], RECIPES["gram"]))
    assert torch.equal(by_shape[1], ours[1])
    for name, recipe in RECIPES.items():
        results = contender(name)(matrices)
        expected = [orthogonalize(matrix, recipe) for matrix in matrices]
        assert all(torch.equal(*both) for both in zip(results, expected, strict=True))
    assert all(torch.equal(*both) for both in zip(matrices, before, strict=True))


def test_every_contender_is_timed_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    works = {"small": ((8, 8), (4, 8)), "one": ((8, 8),)}
    monkeypatch.setattr(newton_schulz_times, "WORKS", works)
    found = measure("small", (TORCH, "minimax"), rounds=3)
    assert not found.chosen
    assert set(measure("one", (TORCH, "auto"), rounds=1).chosen) == {"8 × 8"}
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == {TORCH: 3, "minimax": 3}
    assert {name: len(rates) for name, rates in found.rates.items()} == {"bf16": 15, "fp32": 15}
    table = times_table(found, "python x", "here")
    assert [row["orthogonalize"] for row in table.rows] == [TORCH, "minimax"]


def test_the_floor_counts_a_recipes_own_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four steps of degrees 5, 5, 7 and 7 take 4 · (½ + 1) long products, and ½ · 6 square products.
    recipe = RECIPES["minimax_bf16"]
    assert newton_schulz_times.form_of(recipe, 64, 64) == "direct"
    assert newton_schulz_times.operations_once(recipe, [(64, 64)]) == 2 * 64**3 * (4 * 1.5 + 0.5 * 6)
    monkeypatch.setattr(newton_schulz_times, "WORKS", {"small": ((64, 64),)})
    seconds = {TORCH: [4.0, 2.0, 8.0], "minimax_bf16": [1.0, 2.0, 0.5]}
    gflops = 2 * 64**3 * 9 / 1e9
    found = WorkTimes("small", seconds, {"bf16": [gflops, 2 * gflops], "fp32": [1.0]})
    _, row = times_table(found, "python x", "here").rows
    assert row["ms"] == 1000.0
    assert row["times torch"] == 4.0
    assert row["of its floor"] == 0.5


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
