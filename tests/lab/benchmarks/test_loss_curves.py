"""Loss curves: runs differ only in the recipe, and the tables describe them correctly."""

from __future__ import annotations

from muon_tutorial.orthogonalizers.named import STOCK
from muon_tutorial.training.settings import TrainSettings
from scripts.loss_curves import LAST, Way, WayCurve, curves_table, spread_table, train_curves


def test_runs_of_a_seed_begin_alike_and_go_different_ways() -> None:
    settings = TrainSettings(
        dp=1,
        tp=1,
        strategy="replicated",
        steps=3,
        batch=2,
        context=16,
        layers=1,
        width=16,
        heads=2,
        check=False,
    )
    curves = train_curves(settings, (Way(STOCK), Way("minimax")), (0, 1))
    assert [(curve.way, curve.seed) for curve in curves] == [
        (STOCK, 0),
        ("minimax", 0),
        (STOCK, 1),
        ("minimax", 1),
    ]
    stock, minimax, other, _ = curves
    assert stock.losses[0] == minimax.losses[0] != other.losses[0]
    assert stock.losses[2] != minimax.losses[2]
    assert len(stock.losses) == 3
    (slower,) = train_curves(settings, (Way(STOCK, 0.5),), (0,))
    assert slower.way == "stock, 0.5 of the rate"
    assert slower.losses[0] == stock.losses[0]
    assert slower.losses[1] != stock.losses[1]


def flat(way: str, seed: int, loss: float) -> WayCurve:
    return WayCurve(way, seed, [9.0, *([loss] * LAST)], loss + 1)


CURVES = [flat(STOCK, 0, 2.0), flat(STOCK, 1, 2.5), flat("gram", 0, 1.75), flat("gram", 1, 2.0)]


def test_differences_are_taken_on_the_same_seed() -> None:
    rows = curves_table(CURVES, "c").rows
    assert [row[f"mean of last {LAST}, minus stock's"] for row in rows] == [0, 0, -0.25, -0.5]
    assert [row["held out"] for row in rows] == [3.0, 3.5, 2.75, 3.0]
    stock, gram = spread_table(CURVES, "c").rows
    name = f"mean of last {LAST}"
    assert (stock[f"{name}, minus stock's"], stock[f"{name}, seeds lie apart"]) == (0, 0.5)
    assert (gram[f"{name}, minus stock's"], gram[f"{name}, seeds lie apart"]) == (-0.375, 0.25)
    assert gram["held out, seed by seed"] == "-0.2500, -0.5000"
