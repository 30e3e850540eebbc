"""A calibration recovers known numbers from samples. scripts/step_times.py measures its accuracy."""

from __future__ import annotations

import math
import os
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import pytest

from muon_tutorial import Grid, LocalWorld, Matrix, UsageError, launch
from muon_tutorial.cli import main
from muon_tutorial.engine.collective import Kind
from muon_tutorial.evidence.gloo_bytes import GlooTraffic
from muon_tutorial.timing import calibrate as calibration
from muon_tutorial.timing.calibrate import (
    BANDWIDTHS,
    ENDLESS,
    KINDS,
    ComputeRates,
    GlooSample,
    RankSample,
    average_machines,
    calibrate,
    fit_gloo,
    gloo_request,
    measure_copies,
    median_by_number,
    sample_gloo,
    took,
)
from muon_tutorial.timing.machine import Link, Machine, find_machine
from muon_tutorial.timing.step_cost import STRATEGIES, estimate

from ..worlds.requests import one

SIZES = ((256, 2), (256, 4), (100_000, 2), (8_000_000, 4), (8_000_000, 12))
BYTE, MESSAGE, LATENCY, TURN = 1e-9, 2e-5, 1e-4, 3e-5


def sampled(ranks: int, data: int, messages: int, cores: int, bandwidth: float = ENDLESS) -> GlooSample:
    """A collective whose time follows from the numbers above."""
    share = max(1.0, ranks / cores)
    worked = max(share * (data * BYTE + messages * MESSAGE), data / bandwidth)
    seconds = worked + share * TURN + messages * LATENCY
    return [RankSample(GlooTraffic(data, messages, messages), data, (0.0,), (seconds,))] * ranks


SLOW = min(BANDWIDTHS, key=lambda one: abs(one - 0.6e9))


@pytest.mark.parametrize(
    ("cores", "most", "bandwidth", "found"),
    [
        (2, 4, ENDLESS, (MESSAGE, LATENCY)),
        (2, 4, SLOW, (MESSAGE, LATENCY)),  # two ranks on two cores wait for bandwidth; four wait for cores
        (8, 8, ENDLESS, (0.0, LATENCY + MESSAGE)),  # if ranks share no core, a message's work is a delay
    ],
)
def test_numbers_are_found_again_that_made_the_samples(
    cores: int, most: int, bandwidth: float, found: tuple[float, float]
) -> None:
    samples = [sampled(ranks, *size, cores, bandwidth) for ranks in (2, most) for size in SIZES]
    assert astuple(fit_gloo(samples, cores)) == pytest.approx((BYTE, *found, TURN, bandwidth))


def test_a_collective_takes_from_the_last_question_to_the_last_answer() -> None:
    busy = GlooTraffic(100, 1, 1)
    early = RankSample(busy, 200, (0.0, 10.0), (4.0, 13.0))
    late = RankSample(busy, 100, (2.0, 10.5), (3.0, 14.5))
    assert took((early, late)) == 3.0


def test_rates_are_the_median_of_the_cores() -> None:
    def core(rate: float) -> ComputeRates:
        return ComputeRates({"float32": ((16.0, rate),)}, ((4096.0, 10 * rate),), rate / 100)

    cores = [astuple(core(rate)) for rate in (1.0, 2.0, 9.0)]
    assert ComputeRates(*median_by_number(cores)) == core(2.0)


def test_two_machines_are_averaged_number_by_number() -> None:
    one, other = machine(1.0), machine(3.0)
    assert average_machines(one, other) == machine(2.0)
    slow, fast = (replace(one, inside=Link(bandwidth, 2e-5)) for bandwidth in (1e9, 3e9))
    assert average_machines(slow, fast).inside.bandwidth == pytest.approx(1.5e9)


def machine(unit: float) -> Machine:
    rates = {"float32": ((16.0, 2 * unit),), "bfloat16": ((16.0, 4 * unit),)}
    numbers = 1e-6 * unit, 2e-6 * unit, Link(1e12, 2e-5 * unit)
    byte, message = 3e-9 * unit, 1e-5 * unit
    return Machine("m", rates, ((4096.0, 10 * unit),), *numbers, cores=2, byte=byte, message=message)


def test_ranks_stop_together_where_time_is_up() -> None:
    """One rank's time runs out long before the other's."""
    ends = (math.inf, 0.0)
    assert launch(lambda rank: len(sample_gloo(rank, ends[rank])), 2) == [0, 0]


def test_a_machine_too_busy_to_be_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time runs out before anything is measured, as on a very slow machine."""
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 0.0, 0.0))
    said = r"too busy to be measured in 0\.01 s: load average 9\.0 on \d+ cores"
    with pytest.raises(UsageError, match=said):
        calibrate(limit=0.01)


def test_tensors_take_turns_in_being_copied() -> None:
    ((size, rate),) = measure_copies((1200,), cold=8 * 1000)
    assert size == 1200
    assert 0 < rate < 1e13


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_are_such_as_ranks_can_ask_for(kind: Kind) -> None:
    """``LocalWorld`` refuses requests whose sizes do not fit."""
    grid = Grid.of(dp=4)
    requests = [gloo_request(kind, grid.at(rank), 4096) for rank in grid.ranks]
    answers = LocalWorld(grid).run([one(request) for request in requests])
    assert [answer.numel() for answer in answers] == [request.receive for request in requests]
    if kind == "all_to_all":
        assert all(request.sends and request.sends[rank] == 0 for rank, request in enumerate(requests))


def rough_rates(rank: int) -> calibration.ComputeRates:
    """Measure a core's rates roughly, with few operations on little data, in about a second."""
    calibration.COLD, calibration.SWEPT, calibration.SWEEPS = 1_000_000, 1_000_000, 10
    calibration._seconds.__defaults__ = (0.005,)
    calibration.measure_products.__defaults__ = ((16, 64),)
    return calibration.compute_rates(rank)


@pytest.mark.timeout(600)
def test_this_machine_is_calibrated_and_predicts_a_step_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The timeouts are long, since other tests run at the same time."""
    monkeypatch.setattr(calibration, "compute_rates", rough_rates)
    monkeypatch.setattr("muon_tutorial.timing.commands.calibrate", partial(calibrate, limit=300.0))
    out = tmp_path / "machine.json"
    assert main(["calibrate", "--out", str(out)]) == 0
    machine = find_machine(str(out))
    has_affinity = hasattr(os, "sched_getaffinity")
    assert machine.cores == (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count())
    assert machine.byte > 0
    assert machine.operation > 0
    matrices = [Matrix(0, "w", (16, 16))]
    assert estimate("zero1", STRATEGIES["zero1"], matrices, Grid.of(dp=2), machine).seconds > 0
    assert main(["calibrate", "--out", str(tmp_path / "none" / "machine.json")]) == 2
    monkeypatch.setattr("muon_tutorial.timing.commands.calibrate", None)  # the folder is refused first
    capsys.readouterr()
    assert main(["calibrate", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} cannot be written: it is a folder\n"
