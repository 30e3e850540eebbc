"""What a calibration makes of its samples. How near it comes, scripts/step_times.py measures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from muon_tutorial.engine.collective import Kind
from muon_tutorial.evidence.gloo_bytes import GlooTraffic
from muon_tutorial.plan.grid import Grid
from muon_tutorial.timing.calibrate import (
    KINDS,
    ComputeRates,
    GlooSample,
    RankSample,
    fit_gloo,
    gloo_request,
    halfway,
    measure_copies,
    together,
)
from muon_tutorial.timing.machine import Link, Machine

BYTE, MESSAGE, LATENCY, TURN = 1e-9, 2e-5, 1e-4, 3e-5


def sampled(ranks: int, data: int, messages: int, cores: int) -> GlooSample:
    """A collective that takes what the numbers above say."""
    share = max(1.0, ranks / cores)
    worked = share * (data * BYTE + messages * MESSAGE + TURN)
    return GlooSample((GlooTraffic(data, messages, messages),) * ranks, worked + messages * LATENCY)


def test_numbers_are_found_again_that_made_the_samples() -> None:
    sizes = ((256, 2), (256, 4), (100_000, 2), (8_000_000, 4), (8_000_000, 12))
    samples = [sampled(ranks, data, messages, 2) for ranks in (2, 4) for data, messages in sizes]
    assert fit_gloo(samples, 2) == pytest.approx((BYTE, MESSAGE, LATENCY, TURN))


def test_a_collective_takes_from_the_last_question_to_the_last_answer() -> None:
    busy = GlooTraffic(100, 1, 1)
    early, late = RankSample(busy, (0.0, 10.0), (4.0, 13.0)), RankSample(busy, (2.0, 10.5), (3.0, 14.5))
    assert GlooSample.of((early, late)) == GlooSample((busy, busy), 3.0)


def test_rates_are_the_median_of_the_cores() -> None:
    cores = [
        ComputeRates({"float32": ((16.0, rate),)}, ((4096.0, 10 * rate),), rate / 100)
        for rate in (1.0, 2.0, 9.0)
    ]
    assert together(cores) == ComputeRates({"float32": ((16.0, 2.0),)}, ((4096.0, 20.0),), 0.02)


def test_halfway_is_the_mean_of_each_number() -> None:
    link, rates = Link(1e12, 2e-5), {"float32": ((16.0, 2.0),), "bfloat16": ((16.0, 4.0),)}
    one = Machine("m", rates, ((4096.0, 10.0),), 1e-6, 2e-6, link, cores=2, byte=1e-9, message=1e-5)
    twice = {name: ((16.0, 2 * its[0][1]),) for name, its in rates.items()}
    other = replace(one, gemm=twice, operation=3e-6, byte=2e-9, inside=replace(link, latency=4e-5))
    between = halfway(one, other)
    assert between.gemm == {"float32": ((16.0, 3.0),), "bfloat16": ((16.0, 6.0),)}
    found = between.operation, between.turn, between.byte, between.inside.latency
    assert found == pytest.approx((2e-6, 2e-6, 1.5e-9, 3e-5))


def test_copies_are_measured_at_the_sizes_asked_for() -> None:
    (small, rate), (large, _) = measure_copies((4096, 1_048_576))
    assert (small, large) == (4096, 1_048_576)
    assert rate > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 2])
def test_collectives_are_asked_for_as_the_engine_does(kind: Kind, rank: int) -> None:
    request = gloo_request(kind, Grid.of(dp=4).at(rank), 4096)
    assert (request.kind, request.dtype) == (kind, torch.float32)
    if kind == "all_to_all":
        assert request.sends == tuple(0 if place == rank else 256 for place in range(4))
    if kind == "broadcast":
        assert (request.send is None) == (rank != 0)
    if kind == "reduce":
        assert request.receive == (0 if rank else 1024)
