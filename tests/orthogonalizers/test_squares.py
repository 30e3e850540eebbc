"""A polynomial becomes a chain of squarings, which gives the same values and coefficients."""

from __future__ import annotations

import pytest
import torch

from muon_tutorial.errors import UsageError
from muon_tutorial.orthogonalizers.squares import Squares, completed_squares, evaluate_squares

CHAINS = [
    Squares(0.5, ((2.0, 0.0, -1.0),)),
    Squares(-0.7, ((1.0, 0.0, 0.3), (-3.0, 0.2, 0.1))),
    Squares(-2.1, ((1.0, 0.0, -1.8), (1.0, 0.3, -1.7), (0.4, 0.06, 0.2))),
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: f"{len(chain.rounds)} squarings")
def test_completing_squares_gives_back_the_polynomial(chain: Squares) -> None:
    assert completed_squares(chain.polynomial()).polynomial() == pytest.approx(chain.polynomial())


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: f"{len(chain.rounds)} squarings")
@pytest.mark.parametrize("sides", [(5, 5), (3, 5, 5), (390, 390)], ids=str)
def test_evaluating_a_chain_is_evaluating_its_polynomial(chain: Squares, sides: tuple[int, ...]) -> None:
    G = torch.randn(sides, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = G @ G.mT / torch.linalg.matrix_norm(G @ G.mT, 2, keepdim=True)
    expected = sum(
        (c * torch.linalg.matrix_power(A, i) for i, c in enumerate(chain.polynomial())), torch.zeros(())
    )
    value, other = evaluate_squares(chain, A.clone(), torch.full_like(A, torch.nan))
    torch.testing.assert_close(value, expected)
    assert value.data_ptr() != other.data_ptr()


def test_of_degree_eight_only_some_are_chains_of_squares() -> None:
    with pytest.raises(UsageError, match="of degree 8 cannot be written as a chain of squares"):
        completed_squares((1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0))
