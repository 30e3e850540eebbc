"""Cuts, routes and hops: what they refuse, and how they print. Tests of strategies cover the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from muon_tutorial import Grid, Hop, Matrix, Owned, Partial, Replicate, Route, Shard, owner, zero1
from muon_tutorial.errors import GridError, OneWayError
from muon_tutorial.plan.layout import Placement
from muon_tutorial.plan.strategies import WIRE


@pytest.mark.parametrize(
    ("sizes", "length", "parts"),
    [((3, 3), 7, 2), ((3, 4), 7, 3), ((9, -2), 7, 2), ((), 0, 1)],
    ids=["short", "one rank too many", "negative", "no rank"],
)
def test_a_cut_that_does_not_cover_is_refused(sizes: tuple[int, ...], length: int, parts: int) -> None:
    with pytest.raises(GridError, match=f"does not cover {length} indices over {parts} ranks"):
        Shard(0, sizes).lengths(length, parts)


@pytest.mark.parametrize(("kept", "said"), [(Shard(0), "reduce_scatter"), (Owned(1), "reduce")])
def test_a_sum_has_no_opposite_and_says_so(kept: Placement, said: str) -> None:
    hop = Hop("dp", Partial(), kept, (4, 4))
    with pytest.raises(OneWayError, match=f"a {said} over 'dp' has no opposite"):
        hop.inverse
    with pytest.raises(OneWayError):
        Route((hop,), torch.float32).inverse


NOTATION = (Path(__file__).resolve().parents[2] / "docs" / "notation.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "hop", ["all_gather", "gather", "drop", "all_to_all", "sum", "reduce", "reduce_scatter"]
)
def test_hops_print_what_the_page_on_notation_says(hop: str) -> None:
    rows, columns, copied, summed, owned = Shard(0), Shard(1), Replicate(), Partial(), Owned(1)
    ends: dict[str, tuple[Placement, Placement]] = {
        "all_gather": (rows, copied),
        "gather": (rows, owned),
        "drop": (copied, owned),
        "all_to_all": (rows, columns),
        "sum": (summed, copied),
        "reduce": (summed, owned),
        "reduce_scatter": (summed, rows),
    }
    (src, dst), shape = ends[hop], (4, 6)
    out, back = Hop("dp", src, dst, shape), Hop("dp", dst, src, shape)
    page = NOTATION.replace("=k", "=1").replace("G[", "W[")
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{out}`")]
    assert f"`{back}`" in row


def test_routes_of_plans_print_as_the_page_on_notation_says_of_the_step() -> None:
    matrices = [Matrix(index, f"m{index}", (9, 7), (("tp", Shard(1)),)) for index in range(40)]
    [bucket, *_] = zero1(matrices, Grid.of(dp=2, tp=2)).buckets
    assert str(bucket.gradient) == "w[B]{U_dp} → w[B_dp], in float32"
    assert str(bucket.compute) == "w[B_dp] → w[B], in bfloat16"
    assert str(bucket.entries[0].route) == "W[I, J_tp] → W[I, J], in bfloat16"
    assert str(bucket.compute.inverse) == "w[B] → w[B_dp], in bfloat16"
    assert str(bucket.parameter) == "w[B_dp] → w[B], in float32"
    assert all(
        f"`{term}`" in NOTATION for term in ("g[B]{U_dp} → g[B_dp]", "x[B_dp] → x[B]", "w[B_dp] → w[B]")
    )
    [bucket, *_] = owner(matrices, Grid.of(dp=2, tp=2)).buckets
    assert str(bucket.compute) == "exchange over dp·tp, in bfloat16"
    assert str(bucket.parameter) == "stays where it is, in float32"
    both = Route((Hop("dp", Shard(0), Replicate(), (4, 3)), Hop("tp", Shard(0), Replicate(), (8, 3))), WIRE)
    assert str(both) == "W[I_dp·tp, J] → W[I_tp, J] → W[I, J], in bfloat16"
