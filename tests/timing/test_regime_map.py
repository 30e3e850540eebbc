"""The regime map: its cells are the planner's own winners, and its picture shows their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from muon_tutorial.cli import main
from muon_tutorial.timing import regime_map
from muon_tutorial.timing.machine import Machine, find_machine
from muon_tutorial.timing.models import find_model
from muon_tutorial.timing.recommend import ModelPlan, plan_model, read_sizes
from muon_tutorial.timing.regime_map import FACTORS, FILLS, RegimeMap, draw_map, survey

H100 = find_machine("h100-infiniband")


def planned(model: str, grid: str, machine: Machine = H100) -> ModelPlan:
    return plan_model(find_model(model), read_sizes(grid), machine)


def scaled(machine: Machine, factor: float) -> Machine:
    links = (machine.inside, machine.between)
    inside, between = (link and replace(link, bandwidth=factor * link.bandwidth) for link in links)
    assert inside is not None
    return replace(machine, inside=inside, between=between)


@pytest.fixture(scope="module", autouse=True)
def _up_to_256_ranks() -> Iterator[None]:
    """Columns of thousands of ranks take a minute each; ``exhaustive`` has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regime_map, "MOST_RANKS", 256)
        yield


@pytest.fixture(scope="module")
def found(_up_to_256_ranks: None) -> RegimeMap:
    return survey(planned("gpt2", "dp=16,pp=4"))


def test_a_cell_is_what_a_plan_on_such_links_says(found: RegimeMap) -> None:
    assert found.ranks == [4, 16, 64, 256]
    assert len(found.regimes) == len(found.ranks) * len(FACTORS)
    for ranks, factor in ((4, 4.0), (64, 1.0), (256, 1 / 16)):
        other = planned("gpt2", f"dp={ranks // 4},pp=4", scaled(H100, factor))
        best = min(other.estimates, key=lambda one: one.seconds)
        cell = next(one for one in found.regimes if (one.ranks, one.factor) == (ranks, factor))
        assert cell.winner == best.strategy
        assert 1 + cell.over_adamw == pytest.approx(best.seconds / other.adamw, rel=1e-6)
        assert cell.over_ddp is not None
        assert 1 + cell.over_ddp == pytest.approx(best.seconds / other.adamw_at(1.0, sharded=False), rel=1e-6)


def test_muon_is_slower_than_adamw_here_and_faster_there(found: RegimeMap) -> None:
    """Under DDP with bf16 weights, AdamW sends more than layerwise, which matters on slow links."""
    signs = {one.over_ddp > 0 for one in found.regimes if one.over_ddp is not None}
    assert signs == {True, False}


def test_the_picture_is_the_maps_alone_and_has_each_number(found: RegimeMap) -> None:
    drawn = draw_map(found)
    assert drawn == draw_map(found)
    texts = re.findall(r"<!-- (.*?) -->", drawn)
    for one in found.regimes:
        for number in (one.over_adamw, one.over_ddp):
            assert number is not None
            assert regime_map._say(number) in texts
    assert {"4", "256", *found.winners} <= set(texts)
    assert "they have not been checked against measurements" in drawn


def test_grids_that_cannot_share_the_experts_are_left_out() -> None:
    plan = planned("mixtral-8x7b", "dp=32,ep=8,pp=16")
    assert survey(plan).ranks == [128, 512]


def test_if_nothing_fits_no_strategy_is_named() -> None:
    tight = replace(H100, memory=1e6)
    nowhere = survey(planned("gpt2", "dp=16,pp=4", tight))
    assert nowhere.winners == ["nothing fits"]
    assert "nothing fits" in draw_map(nowhere)


def test_parameters_cut_by_fsdp2_have_one_adamw() -> None:
    found = survey(planned("gpt2", "dp=16,dp_shard=8"))
    assert {one.over_ddp for one in found.regimes} == {None}
    assert set(found.winners) <= {"owner", "owner_per_replica", "gather_all"} <= set(FILLS)
    assert "with FSDP2" in draw_map(found)


@pytest.mark.exhaustive
def test_columns_reach_16384_ranks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regime_map, "MOST_RANKS", 16384)
        assert survey(planned("gpt2", "dp=16,pp=4")).ranks == [4, 16, 64, 256, 1024, 4096, 16384]


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = tmp_path / "map.svg"
    assert main(["plan", "gpt2", "--grid", "dp=4,pp=4", "--map", str(target)]) == 0
    assert target.read_text(encoding="utf-8").startswith("<svg")
    assert "wrote" in capsys.readouterr().out
