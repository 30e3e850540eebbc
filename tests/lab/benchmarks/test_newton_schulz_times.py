"""The benchmark of Newton–Schulz recipes: its counts and its files, on small matrices."""

from __future__ import annotations

import pytest
import torch

from muon_tutorial.orthogonalizers.iterate import orthogonalize
from muon_tutorial.orthogonalizers.named import RECIPES, STOCK
from scripts.lab.benchmarks import newton_schulz_times
from scripts.lab.benchmarks.newton_schulz_times import (
    TORCH,
    WorkTimes,
    contender,
    draw,
    form_of,
    measure,
    operations_once,
    times_table,
)


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
    # Four steps of degree 5, 5, 7, 7: 4 · (½ + 1) long products, and ½ · 6 square ones.
    recipe = RECIPES["minimax_bf16"]
    assert form_of(recipe, 64, 64) == "direct"
    assert operations_once(recipe, [(64, 64)]) == 2 * 64**3 * (4 * 1.5 + 0.5 * 6)
    monkeypatch.setattr(newton_schulz_times, "WORKS", {"small": ((64, 64),)})
    seconds = {TORCH: [4.0, 2.0, 8.0], "minimax_bf16": [1.0, 2.0, 0.5]}
    gflops = 2 * 64**3 * 9 / 1e9
    found = WorkTimes("small", seconds, {"bf16": [gflops, 2 * gflops], "fp32": [1.0]})
    _, row = times_table(found, "python x", "here").rows
    assert row["ms"] == 1000.0
    assert row["times torch"] == 4.0
    assert row["of its floor"] == 0.5
