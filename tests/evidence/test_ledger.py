"""Requested bytes, compared with the formulas that predict them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from muon_tutorial import STRATEGIES, Grid, Ledger, LocalWorld, Plan, Shard
from muon_tutorial.engine.collective import Collective, Label
from muon_tutorial.evidence.formulas import boundary_received, straddled, tp_gathers
from muon_tutorial.evidence.ledger import LedgerRow
from muon_tutorial.evidence.ring_bytes import ring_bytes
from muon_tutorial.plan.grid import Coordinate
from muon_tutorial.plan.strategies import Builder, owner, zero1

from ..oracle import UNEVEN, Case, give_gradients, one_rank, whole_gradients
from ..worlds.requests import KINDS, PARTS, ROOT, SPLITS, Ask
from .zero1_by_rank import touched_pieces

EVEN = Case(
    shapes=((48, 8), (24, 24), (8, 48), (96, 16)),
    cuts=(Shard(0), Shard(1), Shard(1), Shard(0)),
    steps=1,
)
"""Shapes that 2, 3 and 4 divide, so that nothing is padded."""

GRIDS = [Grid.of(dp=dp, tp=tp) for dp, tp in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (4, 2))]
TP_TOO = ("replicated", "round_robin")
WIRE = 2  # bytes of a bfloat16
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


def counted(case: Case, builder: Builder, grid: Grid) -> tuple[Plan, list[dict[str, LedgerRow]]]:
    """The plan, and each rank's rows of one step by phase."""
    ledger = Ledger()
    world = LocalWorld(grid, observers=[ledger])
    ranks = [one_rank(case, builder, world.mesh(rank)) for rank in grid.ranks]
    for rank, (params, _) in enumerate(ranks):
        give_gradients(params, next(whole_gradients(case)), case, grid.at(rank))
    world.run([muon.program() for _, muon in ranks])
    plan = ranks[0][1].plan
    assert plan is not None
    return plan, [{row.phase: row for row in ledger.rows(rank)} for rank in grid.ranks]


def ring(rows: dict[str, LedgerRow], phase: str) -> int:
    return rows[phase].ring if phase in rows else 0


def received(rows: dict[str, LedgerRow], phase: str) -> int:
    return rows[phase].received if phase in rows else 0


@pytest.mark.parametrize("round_bytes", [400, 25_000_000])
@every_grid
def test_padding_is_what_uneven_sizes_cost_more(grid: Grid, round_bytes: int) -> None:
    plan, ranks = counted(UNEVEN, partial(zero1, cut="bucket", round_bytes=round_bytes), grid)
    sizes = [bucket.length(bucket.model_layout, grid.at(0)) for bucket in plan.buckets]
    dp = grid.size("dp")
    for rows in ranks:
        assert ring(rows, "gradient reduce_scatter") == sum((dp - 1) * size // dp for size in sizes) * 4
        assert ring(rows, "dp gather") == sum((dp - 1) * size // dp for size in sizes) * WIRE


@pytest.mark.parametrize("builder", [zero1, partial(zero1, gather="boundary")], ids=["all", "boundary"])
@pytest.mark.parametrize("case", [EVEN, UNEVEN], ids=["even", "uneven"])
@every_grid
def test_the_tp_gather_brings_the_other_shards_of_each_matrix_a_slice_touches(
    grid: Grid, case: Case, builder: Builder
) -> None:
    """A rank receives 2·(T − 1)·n bytes for each matrix that its slice intersects."""
    plan, ranks = counted(case, builder, grid)
    for at, rows in zip(places(grid), ranks, strict=True):
        touched = touched_pieces(plan, at)
        assert received(rows, "tp gather") == tp_gathers(grid.size("tp"), touched)
        if grid.size("tp") > 1:
            assert rows["tp gather"].collectives == len(touched)


@pytest.mark.parametrize("build", [zero1, partial(zero1, gather="boundary"), *map(STRATEGIES.get, TP_TOO)])
@every_grid
def test_a_tp_gather_by_the_bucket_moves_the_same_bytes_in_one_request(grid: Grid, build: Builder) -> None:
    each, together = (
        counted(UNEVEN, partial(build, tp_gather=by, round_bytes=400), grid) for by in ("matrix", "bucket")
    )
    for at, apart, packed in zip(places(grid), each[1], together[1], strict=True):
        assert {phase: (row.payload, row.ring, row.received) for phase, row in apart.items()} == {
            phase: (row.payload, row.ring, row.received) for phase, row in packed.items()
        }
        cut = [
            bucket
            for bucket in together[0].buckets
            if any(entry.route.hops and bucket.works_on(entry, at) for entry in bucket.entries)
        ]
        assert (packed["tp gather"].collectives if cut else 0) == len(cut)


@every_grid
def test_the_boundary_gather_brings_what_is_missing_of_straddling_matrices(grid: Grid) -> None:
    """2·Σ(elements of m − own piece) bytes, over the matrices m that straddle this rank's slice.

    A rank works with its tensor-parallel group even if its own, shorter piece does not reach its slice.
    """
    plan, ranks = counted(UNEVEN, partial(zero1, gather="boundary", round_bytes=400), grid)
    for at, rows in zip(places(grid), ranks, strict=True):
        assert received(rows, "dp gather") == boundary_received(straddled(plan, at))


@every_grid
def test_owners_receive_what_they_lack_and_send_it_back(grid: Grid) -> None:
    """Over all ranks, in each direction: a matrix without the owner's own piece, and one copy per replica."""
    plan, ranks = counted(EVEN, owner, grid)
    out = back = 0
    for entry in (entry for bucket in plan.buckets for entry in bucket.entries):
        home = grid.at(entry.workers.start)
        pieces = [entry.matrix.box(at).numel for at in places(grid)]
        out += entry.matrix.numel - pieces[home.rank]
        back += sum(pieces) - pieces[home.rank]
    for column in (ring, received):
        assert sum(column(rows, "gather to owners") for rows in ranks) == out * WIRE
        assert sum(column(rows, "scatter from owners") for rows in ranks) == back * WIRE


def test_the_baseline_moves_nothing_over_dp_but_the_flags() -> None:
    _, ranks = counted(EVEN, STRATEGIES["replicated"], Grid.of(dp=4))
    flags = 9 * 8  # two hashes of 32 bits as halves and their squares, and the largest element
    sent = 4 * flags  # to each rank of four
    for rows in ranks:
        assert {phase: row.payload for phase, row in rows.items()} == {"gradient flags": sent}


def places(grid: Grid) -> list[Coordinate]:
    return [grid.at(rank) for rank in grid.ranks]


# One collective at a time


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_group_sends_is_what_it_receives(kind: Any) -> None:
    for splits in SPLITS.values():
        ledger = Ledger()
        for rank in range(PARTS):
            ledger(Ask(kind, 4, splits=splits).request(rank), Grid.of(dp=PARTS).at(rank))
        (row,) = ledger.rows()
        assert row.ring == row.received
        assert row.collectives == PARTS


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all_gather", (32, 32, 32)),
        ("reduce_scatter", (32, 32, 32)),
        ("gather", (16, 0, 16)),
        ("scatter", (0, 32, 0)),
        ("all_to_all", (16, 16, 16)),
    ],
)
def test_bytes_of_one_collective_by_hand(kind: Any, sent: tuple[int, ...]) -> None:
    """Three ranks, pieces of four floats (two by two for all_to_all), the root in the middle."""
    assert ROOT == 1
    requests = [Ask(kind, 4).request(rank) for rank in range(PARTS)]
    assert tuple(ring_bytes(r, Grid.of(dp=PARTS).at(rank)) for rank, r in enumerate(requests)) == sent


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_a_ring_all_reduce_passes_the_tensor_around_almost_twice(parts: int) -> None:
    grid, mine = Grid.of(dp=parts), torch.zeros(12)
    request = Collective("all_reduce", ("dp",), mine.dtype, mine, 12, Label("sum"))
    assert {ring_bytes(request, at) for at in places(grid)} == {2 * (parts - 1) * 48 // parts}


def test_rows_are_sums_by_phase_of_one_rank_or_of_all() -> None:
    ledger, grid = Ledger(), Grid.of(dp=2)
    for phase, size in (("out", 4), ("back", 2), ("out", 6)):
        for at in places(grid):
            mine = torch.zeros(size, dtype=torch.bfloat16)
            ledger(Collective("all_gather", ("dp",), mine.dtype, mine, 2 * size, Label(phase, "x")), at)
    one, both = ledger.rows(1), ledger.rows()
    assert [(row.phase, row.collectives, row.payload, row.ring) for row in one] == [
        ("out", 2, 20, 20),
        ("back", 1, 4, 4),
    ]
    assert [(row.phase, row.payload) for row in both] == [("out", 40), ("back", 8)]
    ledger.clear()
    assert ledger.rows() == []
