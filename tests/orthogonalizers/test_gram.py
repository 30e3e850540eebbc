"""The Gram form in shards: any scale, number of steps and degree. ``step/test_gram`` has its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from muon_tutorial.newton_schulz import KELLER_JORDAN, zeropower_via_newtonschulz
from muon_tutorial.orthogonalizers.checked_recipe import Recipe
from muon_tutorial.orthogonalizers.gram import gram_recipe, orthogonalize_shard, packed_gram
from muon_tutorial.orthogonalizers.named import RECIPES, SAFE_POLAR_EXPRESS
from muon_tutorial.orthogonalizers.workspace import Workspace
from muon_tutorial.plan.matrix import SummedGram

STOCK: dict[str, Any] = {"ns_coefficients": KELLER_JORDAN, "ns_steps": 5}


def in_shards(G: Tensor, cut: int, lengths: Sequence[int], recipe: Recipe, eps: float = 1e-7) -> Tensor:
    """A matrix orthogonalized shard by shard, and put together again."""
    shards, workspace = G.bfloat16().split(list(lengths), cut), Workspace()
    grams = [torch.empty(SummedGram(cut, G.size(1 - cut)).elements) for _ in shards]
    for shard, gram in zip(shards, grams, strict=True):
        packed_gram(shard, cut, gram, workspace)
    summed = torch.stack(grams).sum(0)
    made = [orthogonalize_shard(shard, cut, summed, recipe, eps, workspace) for shard in shards]
    assert {one.dtype for one in made} == {torch.bfloat16}
    return torch.cat(made, cut)


def gaussian(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e12, 1e25])
def test_any_scale_and_a_matrix_of_zeros_stay_finite(scale: float) -> None:
    """A norm below eps stays small. If squares are too large for fp32, the step is zero, as with stock."""
    G = gaussian(20, 60) * scale
    mine, stock = in_shards(G, 1, (30, 30), gram_recipe(STOCK)), zeropower_via_newtonschulz(G)
    torch.testing.assert_close(mine.norm(), stock.norm(), rtol=0.02, atol=0)


def test_without_steps_it_divides_by_the_norm() -> None:
    G = gaussian(20, 60).bfloat16().float()
    mine = in_shards(G, 1, (30, 30), gram_recipe({**STOCK, "ns_steps": 0}))
    torch.testing.assert_close(mine.float(), G / G.norm(), rtol=0.01, atol=0)


def test_polynomials_of_degree_3_need_no_square() -> None:
    """The classical iteration (3X − X³)/2, as triples."""
    G = gaussian(20, 60)
    triples = {"ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 12}
    mine = in_shards(G, 1, (30, 30), gram_recipe(triples))
    stock = zeropower_via_newtonschulz(G, 12, (1.5, -0.5, 0.0))
    assert (mine.float() - stock.float()).norm() <= 0.02 * stock.float().norm()


def test_a_groups_coefficients_are_taken() -> None:
    assert gram_recipe(STOCK).coefficients == (KELLER_JORDAN,) * 5
    assert gram_recipe({**STOCK, "ns_steps": 3}).coefficients == (KELLER_JORDAN,) * 3
    assert gram_recipe({**STOCK, "orthogonalize": "minimax"}) is RECIPES["minimax"]
    safe = {**STOCK, "ns_coefficients": SAFE_POLAR_EXPRESS}
    assert gram_recipe(safe).coefficients == SAFE_POLAR_EXPRESS
