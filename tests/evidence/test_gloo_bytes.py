"""Gloo sends the formula's bytes, according to the kernel's counters of each socket."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from muon_tutorial import Grid, LiveWorld, build_mesh, launch
from muon_tutorial.engine.collective import Kind
from muon_tutorial.evidence.gloo_bytes import gloo_barrier, gloo_sent
from muon_tutorial.evidence.ledger import entry_of
from scripts.lab.benchmarks.contender_costs import settled_tcp, tcp_after
from scripts.lab.benchmarks.predicted import KINDS, sample_request
from scripts.lab.kernel_counters import tcp_sent

from ..exhaustive import left_out
from ..worlds.requests import one

DTYPES = (torch.float32, torch.bfloat16)


def miscounted(rank: int, elements: tuple[int, ...]) -> list[tuple[str, int, int | None]]:
    """Request every kind, size and dtype on this real rank; returns where kernel and formula differ."""
    world = LiveWorld(build_mesh(Grid.of(dp=dist.get_world_size())))
    for kind in KINDS:  # connections are made when first used
        ask(kind, world, elements[0], DTYPES[0])
    wrong = []
    for kind, each, dtype in product(KINDS, elements, DTYPES):
        request = sample_request(kind, world.at, each, dtype)
        due = gloo_sent(request, world.at).tcp + gloo_barrier(world.at.size("dp")).tcp
        before = settled_tcp()
        ask(kind, world, each, dtype)
        dist.barrier()
        sent = tcp_after(before, due)
        if sent != due:
            wrong.append((f"{kind} of {each} {dtype}", due, sent))
    return wrong


def ask(kind: Kind, world: LiveWorld, each: int, dtype: torch.dtype) -> None:
    world.run(one(sample_request(kind, world.at, each, dtype, device="cpu")))


@pytest.mark.timeout(600)  # eight ranks, on two cores
@pytest.mark.skipif(tcp_sent() is None, reason="only Linux counts a socket's bytes")
@pytest.mark.parametrize("parts", [left_out(2), 3, 4, left_out(8)])
def test_gloo_sends_what_the_formula_says_to_the_byte(parts: int) -> None:
    assert launch(miscounted, parts, args=((1, 300_001, 700_001),)) == [[]] * parts


@pytest.mark.parametrize("kind", KINDS)
@example(parts=1, each=5)
@given(parts=st.integers(1, 9), each=st.integers(1, 3_000_000))
def test_all_ranks_together_send_as_much_as_they_receive(kind: Kind, parts: int, each: int) -> None:
    grid = Grid.of(dp=parts)
    entries = [entry_of(sample_request(kind, grid.at(r), each), grid.at(r)) for r in grid.ranks]
    assert sum(e.wire.messages_out for e in entries) == sum(e.wire.messages_in for e in entries)
    assert parts > 1 or entries[0].wire.tcp == entries[0].ring == 0
    assert sum(e.ring for e in entries) == pytest.approx(sum(e.received for e in entries), abs=parts)
    ring, gloo = sum(e.ring for e in entries), sum(e.gloo for e in entries)
    if kind == "reduce":  # a ring; then chunks go to the root, some needlessly
        assert ring * (1 + 1 / parts) - 2 * parts <= gloo <= ring * (1 + 2 / max(1, parts - 1))
    else:
        assert gloo == pytest.approx((2 if kind == "reduce_scatter" else 1) * ring, abs=2 * parts)
