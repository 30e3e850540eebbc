"""The clocks of all ranks: one walk of each kind gives the times of TimedWorld, which walks every rank."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from muon_tutorial import Grid, Matrix, Shard
from muon_tutorial.engine.collective import Label
from muon_tutorial.evidence.memory import PeakMemory
from muon_tutorial.newton_schulz import zeropower_via_newtonschulz
from muon_tutorial.plan.matrix import split_parts
from muon_tutorial.plan.strategies import Plan, layerwise, one_by_one, owner
from muon_tutorial.timing import rank_walks, step_cost
from muon_tutorial.timing.clocks import Speed, run_clocks
from muon_tutorial.timing.compute_seconds import Work
from muon_tutorial.timing.machine import find_machine
from muon_tutorial.timing.models import find_model
from muon_tutorial.timing.rank_walks import RankWalks
from muon_tutorial.timing.recommend import Dtypes, read_sizes, stage_parts, strategies_on
from muon_tutorial.timing.step_cost import GATHER_ALL, SHARDED, STRATEGIES
from muon_tutorial.timing.timeline_cases import walk_ranks
from muon_tutorial.timing.walks_by_length import Lines, Tape

from ..exhaustive import left_out

H100 = find_machine("h100-infiniband")
SHAPES = ((512, 512), (256, 512), (512, 2048), (2048, 512), (128, 128))
GRIDS = ({"dp": 3, "tp": 2}, {"dp": 8}, {"dp": 2, "dp_shard": 4})
ONE_MATRIX, SOME = 1_000_000, 6_000_000


def matrices(sizes: dict[str, int], layers: int = 2) -> list[Matrix]:
    """A layer's shapes, cut as the grid cuts them."""
    found = []
    for i, shape in enumerate(SHAPES * layers):
        cuts = [("tp", Shard(i % 2))] if sizes.get("tp", 1) > 1 else []
        cuts += [("dp_shard", Shard(0))] if sizes.get("dp_shard", 1) > 1 else []
        found.append(Matrix(i, f"layers.{i // 5}.m{i}", shape, tuple(cuts), dtype=torch.bfloat16))
    return found


def cases() -> list[tuple[dict[str, int], str]]:
    return [
        (sizes, name)
        for sizes in GRIDS
        for name in ({**SHARDED, **GATHER_ALL} if "dp_shard" in sizes else STRATEGIES)
        if name != "gram" or "tp" in sizes
    ]


@pytest.mark.parametrize(("sizes", "name"), cases(), ids=str)
@pytest.mark.parametrize("limit", [ONE_MATRIX, SOME], ids=["one matrix", "some"])
def test_one_of_each_kind_takes_as_long_as_all_ranks(sizes: dict[str, int], name: str, limit: int) -> None:
    builder = {**STRATEGIES, **SHARDED, **GATHER_ALL}[name]
    plan = builder(matrices(sizes), Grid.of(**sizes), round_bytes=limit)
    walks = RankWalks(H100, beside=7)
    for window in (1, 2):
        ran, found = walk_ranks(plan, H100, window), step_cost.estimate_plan(name, plan, walks, window)
        mine = found.seconds if plan.expects == "local" else found.own
        # In zero1 and round_robin, collectives of two rounds overlap, but clocks run them one by one.
        among_others = 0.25 if name.startswith(("zero1", "round_robin")) else 0.025
        assert mine == pytest.approx(ran.seconds, rel=0.005 if window == 1 else among_others)
        busiest = step_cost.busiest(plan).rank
        assert found.product == pytest.approx(ran.total("product", busiest), rel=1e-6)


def test_a_round_costs_what_its_slowest_rank_takes() -> None:
    """If matrices come one by one, owners wait for each other; in one round, they work at the same time."""
    given = [Matrix(i, f"m{i}", (2048, 2048), dtype=torch.bfloat16) for i in range(4)]
    plan, walks = owner(given, Grid.of(dp=4)), RankWalks(H100, 3)
    apart, at_once = (step_cost.estimate_plan("owner", it, walks, 1) for it in (one_by_one(plan), plan))
    assert apart.product == pytest.approx(at_once.product)
    assert 3 * apart.product <= apart.others <= 3 * (apart.product + apart.copy)
    assert at_once.others < 0.05 * at_once.product
    assert apart.own > 2.5 * at_once.own


def test_few_ranks_are_walked_for_thousands_and_few_clocks_kept() -> None:
    plan = layerwise(matrices({}, layers=4), Grid.of(dp=2048), round_bytes=SOME)
    walked = RankWalks(H100, 7).rounds(plan)
    buckets = [bucket for its in walked.rounds for bucket in its]
    assert len(buckets) == len(plan.buckets) > 4
    owners = {entry.workers.start for bucket in plan.buckets for entry in bucket.entries}
    assert walked.sizes == (len(owners) + 1,)  # one kind per owner, and one for all ranks that own nothing
    assert all(one.kinds.shape == walked.sizes and len(one.traces) <= 6 for one in buckets)


@pytest.mark.parametrize("name", ["owner", "layerwise", "zero1", "round_robin"])
@pytest.mark.parametrize("window", [1, 2])
def test_ranks_that_share_a_clock_would_have_had_the_same(
    name: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"dp": 12, "tp": 2}
    plan = STRATEGIES[name](matrices(sizes, layers=1), Grid.of(**sizes), round_bytes=ONE_MATRIX)

    def apart(signs: object, slices: object, plan: Plan) -> tuple[np.ndarray, ...]:
        return tuple(np.arange(plan.grid.size(axis)) for axis in plan.buckets[0].axes)

    shared = RankWalks(H100, 7).rounds(plan)
    monkeypatch.setattr(rank_walks, "_fold", apart)
    single = RankWalks(H100, 7).rounds(plan)
    assert np.prod(shared.sizes) < np.prod(single.sizes) or name == "zero1"
    for watched in (0, 5, 11):
        speeds = Speed(), Speed(0.5)
        assert run_clocks(shared, speeds, window, watched) == run_clocks(single, speeds, window, watched)


SHORT = {"exchanged at once": [(120, 120)] * 110, "some at once": [(300, 100)] * 60 + [(64, 256)] * 30}


@pytest.mark.parametrize("shapes", ["five large", *SHORT])
@pytest.mark.parametrize("name", ["zero1", "zero1 boundary"])
def test_ranks_that_are_retold_do_to_the_bit_what_they_do_when_walked(
    name: str, shapes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's slice cuts the shapes at different places, but most walks can be derived from three ranks'
    walks."""
    sizes, its = {"dp": 53, "tp": 2}, []
    if shapes in SHORT:
        sizes = {"dp": 53}
        its = [Matrix(i, f"m{i}", shape) for i, shape in enumerate(SHORT[shapes])]
    plan = STRATEGIES[name](its or matrices(sizes, layers=24), Grid.of(**sizes), round_bytes=ONE_MATRIX)

    def turns() -> list[object]:
        """All turns of each kind of rank; which bucket a request serves does not matter."""
        buckets = [one for its in RankWalks(H100, 7).rounds(plan).rounds for one in its]
        found = [turn for one in buckets for trace in one.traces for turn in trace]
        asked = [it and replace(it, label=Label(it.label.phase)) for it in (turn.asked for turn in found)]
        return [*(replace(turn, asked=None) for turn in found), *(it and astuple(it) for it in asked)]

    with patch.object(RankWalks, "_retold", autospec=True, side_effect=RankWalks._retold) as retold:
        quick = turns()
    assert retold.call_count > 5
    monkeypatch.setattr(Lines, "sizes", lambda lines, first: None)
    assert turns() == quick


@pytest.mark.parametrize("name", ["replicated", "round_robin", "owner", "gram"])
def test_what_is_charged_once_is_what_every_matrix_costs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two grids share the walks. A weight holds two matrices, and tp, which cuts columns, cuts both."""
    parts: list[Matrix] = []
    for param in range(4):
        about: Any = {"dtype": torch.float32, "grad_dtype": torch.float32}
        weight = Matrix(param, f"w{param}", (1024, 2048), (("tp", Shard(1)),), **about)
        parts += split_parts(weight, (1024, 1024), len(parts), True)
    charged: list[object] = []
    once = RankWalks._once

    def noted(walks: RankWalks, *given: Any) -> Any:
        before = len(walks._charges)
        result = once(walks, *given)
        charged.append(given[2] is not zeropower_via_newtonschulz and len(walks._charges) == before)
        return result

    def run(walks: RankWalks, memory: PeakMemory, work: Work, function: Any, *given: Any) -> Any:
        """Newton–Schulz is always charged as one sum, so it is not compared here."""
        if function is zeropower_via_newtonschulz:
            return once(walks, memory, work, function, *given)
        return function(*given)

    def found() -> list[object]:
        walks = RankWalks(H100, 7)
        plans = (STRATEGIES[name](parts, Grid.of(**sizes)) for sizes in ({"dp": 4}, {"dp": 2, "tp": 2}))
        each = (step_cost.estimate_plan(name, plan, walks) for plan in plans)
        return [(one.seconds, one.own, one.copy, one.peak, one.others, one.exposed) for one in each]

    monkeypatch.setattr(RankWalks, "_once", noted)
    quick = found()
    assert any(charged)
    monkeypatch.setattr(RankWalks, "_once", run)
    assert found() == quick


def test_sizes_are_read_off_lines_only_if_a_third_walk_lies_on_them() -> None:
    for third, expected in (((9, 24), [11, 30]), ((9, 25), None)):
        lines = Lines()
        for first, its in ((1, (3, 6)), (3, (5, 12)), (7, third)):
            lines.add(Tape(first, [0, 1], ["hold", "copy"], [*its]))
        assert lines.sizes(9) == expected


SMALL = (
    ("gpt2", "dp=4,pp=12"),
    ("llama-3.1-8b", "dp=4,tp=2,pp=32"),
    ("llama-3.1-8b", "dp=2,dp_shard=4,pp=32"),
    ("mixtral-8x7b", "dp=4,tp=2,ep=4,pp=32"),
)
"""Models and grids; each stage has one layer."""
LARGER = (
    ("gpt2-medium", "dp=2,tp=4,pp=12"),
    ("llama-3.2-1b", "dp=8,pp=16"),
    ("gpt2", "dp=16"),
    ("gpt2-large", "dp=64,pp=12"),
    ("llama-3.1-8b", "dp=32,pp=8"),
    ("llama-3.1-8b", "dp=8,dp_shard=8,pp=16"),
    ("llama-3.1-70b", "dp=8,tp=8,pp=40"),
    ("qwen3-30b-a3b", "dp=8,tp=2,ep=8,pp=24"),
    ("gpt-oss-20b", "dp=4,tp=4,ep=4,pp=12"),
)
LIMITS = {"one matrix": 1, "many": 400_000_000}
FURTHER = {("gpt-oss-20b", "one matrix", "layerwise"): 0.021}
"""The one plan whose estimate is further off than 2 %, by 0.09 ms of 4.47. Ranks that take no part in a
bucket's tp gather ask for the next bucket early; the clocks let all ranks take their turns together."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("model", "grid"), [*SMALL, *(left_out(*case) for case in LARGER)])
def test_plans_of_models_take_as_long_as_all_ranks_do(model: str, grid: str, limit: str) -> None:
    """With each strategy, for dense matrices and for experts, the estimate is within 2 % of walking all
    ranks."""
    sizes = read_sizes(grid)
    for part in stage_parts(find_model(model), sizes, 0, H100, Dtypes()):
        for name, builder in strategies_on(sizes).items() if part.matrices else ():
            plan = builder(part.matrices, part.grid, round_bytes=LIMITS[limit])
            found = step_cost.estimate_plan(name, plan, part.walks, 1)
            mine = found.seconds if plan.expects == "local" else found.own
            bound = FURTHER.get((model, limit, name), 0.02)
            assert mine == pytest.approx(walk_ranks(plan, part.walks.machine).seconds, rel=bound), name
