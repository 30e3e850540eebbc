"""Recipes are within their bounds, drop-ins are no worse than stock, and diverging recipes are refused."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from muon_tutorial.errors import UsageError
from muon_tutorial.newton_schulz import CANS, KELLER_JORDAN, POLAR_EXPRESS, zeropower_via_newtonschulz
from muon_tutorial.orthogonalizers.checked_recipe import Polynomial, Recipe, flops, peak
from muon_tutorial.orthogonalizers.iterate import orthogonalize
from muon_tutorial.orthogonalizers.named import (
    BOUNDS,
    DROP_INS,
    LARGER_UPDATES,
    MINIMAX,
    MINIMAX_BF16,
    RECIPES,
    SAFE_POLAR_EXPRESS,
    STOCK,
)
from scripts.lab.quality import SPECTRA, Quality, Sample, draw_samples, shortfall

from ..exhaustive import left_out

SMALL, MIDDLE, LARGEST = ((128, 128), (256, 64)), (256, 512), (384, 768)
REACHING = {"polar_express": (LARGEST, "cliff"), "cans": (LARGEST, "cliff"), "turbo": (MIDDLE, "rank 8")}
"""The shape and spectrum on which a recipe comes close to a bound.

All recipes are also tried on small matrices and on the middle shape with a "cliff". A CPU without bf16 units
takes a second for a middle matrix, and four for a large one.
"""
FIELDS = {"Gaussian": "gaussian", "rank 8": "rank_8", "cliff": "cliff", "nearly zero": "nearly_zero"}


@cache
def samples(shape: tuple[int, int]) -> dict[str, Sample]:
    return draw_samples(*shape)


@cache
def qualities(name: str, on_the_largest: bool) -> dict[tuple[tuple[int, int], str], Quality]:
    """A recipe's qualities by shape and spectrum: on small matrices, and on large or critical matrices."""
    places = [(shape, spectrum) for shape in SMALL for spectrum in SPECTRA]
    if on_the_largest:
        places += [(LARGEST, spectrum) for spectrum in SPECTRA]
    else:
        places += dict.fromkeys(((MIDDLE, "cliff"), REACHING.get(name, (MIDDLE, "cliff"))))
    found = {(shape, spectrum): samples(shape)[spectrum] for shape, spectrum in places}
    return {place: sample.quality_of(result(name, sample.matrix)) for place, sample in found.items()}


def result(name: str, matrix: Tensor) -> Tensor:
    if name == STOCK:
        return _zeropower_via_newtonschulz(matrix.clone(), KELLER_JORDAN, 5, 1e-7)
    return orthogonalize(matrix, RECIPES[name])


@pytest.mark.parametrize("on_the_largest", [False, left_out(True)])
@pytest.mark.parametrize("name", BOUNDS)
def test_errors_stay_below_their_bounds_and_come_close_to_them(name: str, on_the_largest: bool) -> None:
    worst: dict[str, float] = {}
    for (_, spectrum), quality in qualities(name, on_the_largest).items():
        field = FIELDS.get(spectrum, "power_law")
        worst[field] = max(worst.get(field, 0.0), quality.error)
        worst["largest"] = max(worst.get("largest", 0.0), quality.largest)
    for field, measured in worst.items():
        bound = getattr(BOUNDS[name], field)
        assert 0.85 * bound < measured <= bound, field


@pytest.mark.parametrize("name", RECIPES)
def test_a_drop_in_is_no_worse_than_stock_and_the_others_are(name: str) -> None:
    stock = qualities(STOCK, False)
    found = {
        where: said
        for where, quality in qualities(name, False).items()
        if (said := shortfall(SPECTRA[where[1]], quality, stock.get(where, quality)))
    }
    assert (not found) == (name in DROP_INS), found


def test_the_table_of_bounds_holds_every_recipe() -> None:
    assert list(BOUNDS) == [STOCK, *RECIPES]


def test_recipes_that_could_explode_are_refused() -> None:
    with pytest.raises(UsageError, match="drifts even when restarted"):
        Recipe("mine", "", (KELLER_JORDAN,) * 5, form="gram")
    with pytest.raises(UsageError, match=r"above 1.45: give them a safety factor"):
        Recipe("mine", "", CANS)
    with pytest.raises(UsageError, match=r"above 1.45"):
        Recipe("mine", "", POLAR_EXPRESS)
    with pytest.raises(UsageError, match=r"not torch\.float16"):
        Recipe("mine", "", (KELLER_JORDAN,) * 5, dtype=torch.float16)
    with pytest.raises(UsageError, match=r"degree is one of 5, 7, 9 in torch\.bfloat16"):
        Recipe("mine", "", ((1.5, -0.5),))
    with pytest.raises(UsageError, match=r"degree is one of 5, 9, 17 in torch\.float32"):
        Recipe("mine", "", MINIMAX_BF16, dtype=torch.float32)
    for degree in (3, 6, 8):
        polynomial = (0.5, *(0.0,) * (degree - 2), 0.1, 0.1, *(0.0,) * (8 - degree))
        with pytest.raises(UsageError, match=r"of degree \d cannot be written as a chain of squares"):
            Recipe("mine", "", (polynomial,), dtype=torch.float32)


@pytest.mark.parametrize(
    ("coefficients", "low", "left"), [(MINIMAX, 0.0021, 0.137), (MINIMAX_BF16, 0.0022, 0.110)]
)
def test_minimax_polynomials_are_best(coefficients: tuple[Polynomial, ...], low: float, left: float) -> None:
    # Chebyshev's theorem: the closest polynomial of degree 2m − 1 deviates by the same amount, alternately
    # above and below, m + 1 times. ``unsafe`` takes the safety factor 1.01 out of the coefficients.
    high = 1.0
    for polynomial in unsafe(coefficients):
        x = torch.linspace(low, high, 200_001, dtype=torch.float64)
        off = values(polynomial, x) - 1
        error = float(off.abs().max())
        touching = off[off.abs() > 0.97 * error].sign().tolist()
        turns = 1 + sum(before != after for before, after in pairwise(touching))
        assert turns == len(polynomial) + 1
        low, high = 1 - error, 1 + error
    assert error == pytest.approx(left, abs=2e-3)
    assert peak(coefficients) < 1.15


@pytest.mark.parametrize("n", [48, 300, 1000, 8000])
@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 3.0])
def test_three_steps_keep_stocks_error_on_power_laws_of_other_sizes(n: int, power: float) -> None:
    S = torch.arange(1, n + 1, dtype=torch.float64) ** -power
    counted = S > 1e-3
    stock, ours = S / S.norm(), S / (S**4).sum() ** 0.25
    for a, b, c in (KELLER_JORDAN,) * 5:
        stock = a * stock + b * stock**3 + c * stock**5
    for polynomial in RECIPES["three_steps"].coefficients:
        ours = values(polynomial, ours)
    errors = [(X[counted] - 1).square().mean().sqrt() for X in (ours, stock)]
    assert errors[0] <= 1.01 * errors[1]


def unsafe(coefficients: tuple[Polynomial, ...]) -> list[Polynomial]:
    return [tuple(c * 1.01 ** (2 * i + 1) for i, c in enumerate(one)) for one in coefficients]


def values(polynomial: Polynomial, x: Tensor) -> Tensor:
    return torch.stack([c * x ** (2 * i + 1) for i, c in enumerate(polynomial)]).sum(0)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [*SMALL, left_out(LARGEST)], ids=str)
def test_updates_are_of_stocks_size_or_larger_by_as_much_as_said(name: str, shape: tuple[int, int]) -> None:
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mine, stocks = orthogonalize(G, RECIPES[name]), zeropower_via_newtonschulz(G)
    ratio = float(mine.float().norm() / stocks.float().norm())
    low, high = (0.995, 1.005) if name in ("float32", "gram") else LARGER_UPDATES
    assert low < ratio < high


def test_polar_express_carries_its_safety_on_all_but_the_last() -> None:
    # NVIDIA's Transformer Engine has the first polynomial, rounded: (8.2051, -22.9019, 16.4607).
    assert SAFE_POLAR_EXPRESS[0] == pytest.approx((8.2051, -22.9019, 16.4607), abs=1e-4)
    assert SAFE_POLAR_EXPRESS[-1] == POLAR_EXPRESS[-1]


def test_three_steps_are_twelve_products_on_a_square_where_stock_has_fifteen() -> None:
    n = 2 * 100**3
    assert flops(RECIPES["three_steps"], 100, 100, "direct") == 12 * n
    assert flops(RECIPES["float32"], 100, 100, "direct") == 15 * n
