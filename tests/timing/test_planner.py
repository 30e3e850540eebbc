"""The planner: its bytes equal the ledger's, its shortcuts change nothing, and it warns of known problems."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from muon_tutorial import Grid, Matrix, Shard, layerwise, owner
from muon_tutorial.cli import main
from muon_tutorial.errors import GridError, UsageError
from muon_tutorial.evidence import formulas
from muon_tutorial.evidence.memory import plan_memory
from muon_tutorial.evidence.predict import predict, step_over_ones
from muon_tutorial.timing import step_cost
from muon_tutorial.timing.machine import Link, find_machine, machine_names
from muon_tutorial.timing.models import find_model
from muon_tutorial.timing.recommend import (
    Dtypes,
    ModelPlan,
    busiest_stage,
    plan_model,
    read_sizes,
    say,
    say_if_long,
    say_layout,
    search,
)
from muon_tutorial.timing.step_cost import SHARDED, STRATEGIES, busiest, estimate, estimate_adamw

H100, LAPTOP = find_machine("h100-infiniband"), find_machine("laptop")
SHAPES = ((64, 64), (32, 64), (64, 64), (128, 64), (64, 128))
LAYERS = 3
BY_DDP = "gradient all_reduce, by DDP"
for_all = pytest.mark.parametrize("name", STRATEGIES)


def matrices(tp: int) -> list[Matrix]:
    shapes = [(i, shape) for i, shape in enumerate(SHAPES * LAYERS)]
    cuts = [(("tp", Shard(i % 2)),) if tp > 1 else () for i, _ in shapes]
    return [Matrix(i, f"m{i}", shape, cut) for (i, shape), cut in zip(shapes, cuts, strict=True)]


@for_all
@pytest.mark.parametrize("grid", [Grid.of(dp=4, tp=1), Grid.of(dp=3, tp=4), Grid.of(dp=1, tp=2)], ids=str)
def test_its_bytes_are_those_of_the_ledger(name: str, grid: Grid) -> None:
    found = estimate(name, STRATEGIES[name], matrices(grid.size("tp")), grid, H100, round_bytes=50_000)
    plan = STRATEGIES[name](matrices(grid.size("tp")), grid, round_bytes=50_000)
    ledger = predict(plan, busiest(plan))
    own = {phase: sent for phase, sent in found.phases.items() if phase != BY_DDP and sent}
    assert own == {row.phase: row.ring for row in ledger.rows() if row.ring}
    elements = sum(e.matrix.box(busiest(plan)).numel for b in plan.buckets for e in b.entries)
    due = float(formulas.ddp_adamw(grid.size("dp"), elements, 4)) if plan.expects == "averaged" else 0
    assert found.phases.get(BY_DDP, 0) == pytest.approx(due, abs=grid.world_size * len(plan.buckets))


def test_a_receiver_is_busy_too() -> None:
    """Two slices of different lengths come one after the other; each is reduced to its owner, and broadcast
    from there."""
    grid, given = Grid.of(dp=2), [Matrix(i, f"m{i}", (1024, 1024 + i)) for i in range(2)]
    slow = replace(H100, inside=Link(1e6, 0.0))
    found = estimate("layerwise", layerwise, given, grid, slow, round_bytes=10**9)
    assert found.exposed + found.reduction == pytest.approx(2 * 2**20 * (4 + 4) / 1e6, rel=0.01)


@for_all
def test_a_step_on_other_links_is_a_step_on_a_machine_with_such_links(name: str) -> None:
    grid = Grid.of(dp=4, tp=2)
    found = estimate(name, STRATEGIES[name], matrices(2), grid, H100)
    assert found.seconds_at(1.0) == pytest.approx(found.seconds)
    for factor in (0.01, 4.0):
        inside = replace(H100.inside, bandwidth=factor * H100.inside.bandwidth)
        other = estimate(name, STRATEGIES[name], matrices(2), grid, replace(H100, inside=inside))
        assert found.seconds_at(factor) == pytest.approx(other.seconds, rel=1e-6)


@pytest.mark.parametrize("duplex", [True, False])
@for_all
def test_a_loopback_half_as_fast_is_one_that_was_calibrated_so(name: str, duplex: bool) -> None:
    """``duplex``: whether a rank's thread can send and receive at the same time."""
    grid, given = Grid.of(dp=4), [Matrix(i, f"m{i}", (64, 64)) for i in range(8)]
    machine = replace(LAPTOP, inside=Link(1e5, 1e-5, duplex=duplex), byte=0.0, message=0.0)
    half = replace(machine, inside=replace(machine.inside, bandwidth=5e4))
    walks = map(step_cost.RankWalks, (machine, half))
    found, other = (estimate(name, STRATEGIES[name], given, grid, its.machine, walks=its) for its in walks)
    assert found.seconds_at(0.5) == pytest.approx(other.seconds, rel=1e-3)


def test_adamw_sends_what_its_formula_says_and_pays_for_it_as_muon_does() -> None:
    lengths, one_link = [10**6] * 4, replace(H100, inside=Link(1e6, 0.0), between=None)
    hybrid = 4 * (formulas.rho(4) * 4 * 10**6 * 4 + 2 * formulas.rho(2) * 10**6 * 4)
    plain = estimate_adamw(lengths, Grid.of(dp=4), one_link, sharded=False)
    for found, due in (
        (estimate_adamw(lengths, Grid.of(dp=4), one_link), formulas.zero1_adamw(4, 4 * 10**6, 4, 2)),
        (estimate_adamw(lengths, Grid.of(dp=2, dp_shard=4), one_link), hybrid),  # FSDP2, and DDP
        (plain, formulas.ddp_adamw(4, 4 * 10**6, 4)),
    ):
        assert found.seconds == pytest.approx(float(due) / 1e6, rel=0.01)
    assert plain.seconds_at(2.0) == pytest.approx(plain.seconds / 2, rel=0.01)
    by_gloo = estimate_adamw(lengths, Grid.of(dp=4), replace(LAPTOP, cores=None)).seconds
    # Gloo's reduce_scatter is an all_reduce.
    assert by_gloo > 4 * 10**6 * LAPTOP.byte * (2 * 0.75 * 4 + 0.75 * 2)


def test_adamws_estimate_is_taken_apart_as_muons_is() -> None:
    grid, lengths = Grid.of(dp=4), [10**6, 10**6, 10**5 + 2]
    found = estimate_adamw(lengths, grid, H100, p=torch.float32, beside=3)
    assert (found.product, found.runs, found.buckets) == (0.0, 0, 3)
    assert found.sent == formulas.zero1_adamw(4, sum(lengths) + 2, 4, 4)  # padded to a multiple of 4
    assert (found.held, found.momentum) == (8 * sum(lengths), 2 * (sum(lengths) + 2))
    half = replace(H100, inside=replace(H100.inside, bandwidth=H100.inside.bandwidth / 2))
    slower = estimate_adamw(lengths, grid, half, p=torch.float32, beside=3).seconds
    assert found.seconds_at(0.5) == pytest.approx(slower, rel=1e-6)
    assert found.peak == 4 * (10**6 + 10**6 // 4)  # a packed bucket, and its reduced slice


def test_the_stage_with_the_most_work_is_planned_for() -> None:
    shape = find_model("deepseek-v3")  # its first three layers have no experts
    assert busiest_stage(shape, 16) > 0
    assert busiest_stage(find_model("gpt2"), 4) == 0


def test_ranks_that_share_a_node_share_its_cores_whatever_their_axis() -> None:
    alone, crowded = (plan_model(find_model("gpt2"), read_sizes(g), LAPTOP) for g in ("dp=4", "dp=4,pp=4"))
    one, other = (next(iter(each.estimates)) for each in (alone, crowded))
    assert one.strategy == other.strategy == "replicated"
    # With pp=4, a rank has a quarter of the layers, but also only a quarter of a core.
    assert other.product == pytest.approx(one.product, rel=0.01)


def test_layerwise_sends_what_zero1_adamw_does_and_orthogonalizes_each_matrix_once() -> None:
    for dp, g, p in ((2, 4, 4), (4, 4, 2), (8, 2, 2)):
        dtypes = {2: torch.bfloat16, 4: torch.float32}
        given = [Matrix(i, f"m{i}", (32, 64), (), dtype=dtypes[p], grad_dtype=dtypes[g]) for i in range(16)]
        grid = Grid.of(dp=dp)
        plan = layerwise(given, grid)
        rows = Counter[str]()
        for rank in grid.ranks:
            for row in predict(plan, grid.at(rank)).rows():
                rows[row.phase] += row.ring
        flags = rows.pop("gradient flags")
        due = formulas.zero1_adamw(dp, 16 * 32 * 64, g, p) * dp
        assert sum(rows.values()) == due
        assert flags < 0.05 * due
        assert all(len(plan.workers(i)) == 1 for i in range(16))


@cache
def planned(model: str, grid: str, **options: Any) -> ModelPlan:
    return plan_model(find_model(model), read_sizes(grid), H100, **options)


def test_small_buckets_and_few_matrices_are_warned_of() -> None:
    small, large = (planned("gpt2", "dp=16,pp=4", round_bytes=size) for size in (5_000_000, 500_000_000))
    remedy = "Larger buckets or layerwise reduce this."
    assert any("buckets of 5 MB, " in line and remedy in line for line in say(small))
    assert any("buckets of 500 MB, " in line and ". layerwise reduces this." in line for line in say(large))
    assert not any(line.startswith("zero1") for line in say(planned("gpt2", "dp=2,pp=4", round_bytes=10**9)))
    few = planned("gpt2", "dp=24,pp=4", round_bytes=500_000_000)
    assert any("the least possible" in line for line in say(few))
    many = planned("gpt2", "dp=8,pp=4", round_bytes=5_000_000)  # 36 matrices for 8 owners
    assert not any("the least possible" in line for line in say(many))


def test_one_matrix_is_called_the_floor_only_where_it_is() -> None:
    """If a model has two parts, one owner may get a matrix of each, so the least possible work is two
    matrices, not one."""
    few = planned("mixtral-8x7b", "dp=64,tp=2,ep=2,pp=32")
    assert any("the least possible" in line for line in say(few))
    whole = next(one for one in few.estimates if one.strategy == "layerwise")
    assert whole.runs <= len(few.parts) == 2
    more = replace(whole, newton_schulz=whole.newton_schulz * 3 // 2)
    said = say(replace(few, estimates=(more,), builders={}))
    assert not any("floor" in line for line in said)
    assert any("matrices: owners have unequal work" in line for line in said)


def test_layers_that_a_plan_does_not_count_are_said_beside_it() -> None:
    found = planned("gpt2", "dp=4")
    noted = replace(found, shape=replace(found.shape, notes=("A layer is not counted.",)))
    assert say(noted) == [*say(found), "A layer is not counted."]


def test_a_strategy_that_does_not_fit_is_not_recommended() -> None:
    found = planned("llama-3.1-8b", "dp=64,pp=8", round_bytes=200_000_000)
    assert found.best is not None
    assert found.memory(found.best) <= 80e9
    nothing = planned("llama-3.1-70b", "dp=8")
    assert nothing.best is None
    assert say(nothing)[0].startswith("Nothing fits into 80 GB per rank")


def test_parameters_sharded_over_dp_are_not_averaged_by_ddp() -> None:
    """FSDP reduces sharded gradients in backward; an all_reduce would add up different shards."""
    grid, whole = Grid.of(dp=4), matrices(1)
    sharded = [replace(matrix, cuts=(("dp", Shard(0)),)) for matrix in whole]
    sent = [estimate("owner", owner, given, grid, H100).phases for given in (whole, sharded)]
    assert sent[0][BY_DDP] == pytest.approx(float(formulas.ddp_adamw(4, sum(m.numel for m in whole), 4)))
    assert BY_DDP not in sent[1]
    mixed = estimate("owner", owner, [*whole[:5], *sharded[5:]], grid, H100).phases
    assert mixed[BY_DDP] == pytest.approx(float(formulas.ddp_adamw(4, sum(m.numel for m in whole[:5]), 4)))


def test_experts_are_planned_on_their_own_grid() -> None:
    alone, shared = (planned("mixtral-8x7b", f"dp=8,ep={ep},pp=16") for ep in (1, 8))
    assert alone.shape.experts == 8
    by_name = [{one.strategy: one for one in found.estimates} for found in (alone, shared)]
    # Every rank averages all experts' gradients; with expert parallelism, it averages an eighth of them.
    assert by_name[1]["zero1"].sent < by_name[0]["zero1"].sent / 4


def test_parameters_cut_by_fsdp2_are_planned_for_with_owners_alone() -> None:
    found = planned("gpt2", "dp=4,dp_shard=8")
    crossing, within, baseline = found.estimates
    assert [one.strategy for one in found.estimates] == ["owner", "owner_per_replica", "gather_all"]
    assert baseline.runs == 72  # every rank does all the work
    assert baseline.shares == pytest.approx(32)
    elements = find_model("gpt2").hidden
    for one in found.estimates:
        assert one.held == elements * (2 + 4) / 8
        assert one.momentum == elements * 4 / 8  # the gradients' dtype
        assert one.phases["gradient reduce_scatter, by FSDP2"] == elements * 4 * 7 / 8
        assert one.phases["gradient all_reduce, by FSDP2"] == elements / 8 * 4 * 2 * 3 / 4
        assert one.fsdp >= elements // 12 * 4  # FSDP2's own buffer, of a layer
        assert one.memory == one.held + one.momentum + max(one.peak, one.fsdp)
    assert within.runs >= 2 * crossing.runs  # every replica does all the work
    assert any("full_tensor() of all matrices at once" in line for line in say(found))


def test_more_shards_never_take_more_memory() -> None:
    """FSDP2 reduces all of a layer's gradients at once, even if a rank keeps only few of them."""
    found = [planned("llama-3.1-8b", f"dp_shard={shards}") for shards in (8, 64)]
    for fewer, more in itertools.pairwise(found):
        for one, other in zip(fewer.estimates, more.estimates, strict=True):
            assert one.strategy == "gather_all" or other.peak <= one.peak  # which holds whole matrices
            assert other.held < one.held


def test_nothing_of_owner_per_replica_travels_between_replicas() -> None:
    apart, slow = replace(H100, ranks_per_node=8), Link(1e6, 0.0)
    shape = find_model("gpt2")
    fast, slower = (
        plan_model(shape, read_sizes("dp=2,dp_shard=8"), replace(apart, between=link), strategies=SHARDED)
        for link in (H100.between, slow)
    )
    by_fsdp2 = shape.hidden / 8 * 4  # an all_reduce over two ranks: each sends as many bytes as it holds
    for one, other in zip(fast.estimates, slower.estimates, strict=True):
        longer = other.seconds - one.seconds
        if one.strategy == "owner_per_replica":
            assert longer == pytest.approx(by_fsdp2 / 1e6, rel=0.01)
        else:
            assert longer > 1.05 * by_fsdp2 / 1e6


def test_experts_under_fsdp2_are_cut_over_what_expert_parallelism_leaves() -> None:
    found = planned("mixtral-8x7b", "dp=2,dp_shard=8,ep=4,pp=16")
    dense = 2 * (4096 * 4096 * 2 + 4096 * 1024 * 2)  # two layers' attention
    experts = 2 * 8 * 3 * 4096 * 14336
    assert {one.momentum for one in found.estimates} == {4 * (dense // 8 + experts // 4 // 2)}
    assert any('pass experts="muon"' in line for line in say(found))
    with pytest.raises(GridError, match="ep=8 does not divide dp_shard × tp = 4"):
        planned("mixtral-8x7b", "dp=4,dp_shard=4,ep=8,pp=16")


def test_more_matrices_than_can_be_planned_are_refused() -> None:
    """With every expert whole on each of 16,384 ranks, the plan itself would take 24 GB and minutes."""
    with pytest.raises(GridError, match="16,384 ranks would hold 69,120 matrices; take more ep or pp"):
        plan_model(find_model("kimi-k2"), read_sizes("dp=2048,tp=8"), find_machine("h100-infiniband"))


@pytest.mark.parametrize(
    ("model", "grid", "said"),
    [
        ("llama-3.1-405b", "dp=16384,tp=8", "Planning 882 matrices on 131,072 ranks takes over half"),
        ("kimi-k2", "dp=2048,tp=8,ep=8", "; a larger ep or pp shortens it."),
        ("kimi-k2", "dp=2048,tp=8,ep=128", ""),
        ("llama-3.1-70b", "dp=2048,tp=8", ""),
    ],
)
def test_a_long_plan_is_announced(model: str, grid: str, said: str) -> None:
    line = say_if_long(find_model(model), read_sizes(grid), H100)
    assert said in line
    assert bool(said) == bool(line)


def test_a_batch_says_what_part_of_a_step_the_optimizer_is() -> None:
    shape, found = find_model("gpt2"), planned("gpt2", "dp=4", tokens=2**20)
    assert found.training == pytest.approx(6 * 2**20 * shape.hidden / (4 * max(H100.gemm["bfloat16"])[1]))
    slow = replace(
        found, machine=replace(H100, gemm={"bfloat16": ((64, 2e9), (512, 1e9)), "float32": ((9, 4e9),)})
    )
    assert slow.training == pytest.approx(6 * 2**20 * shape.hidden / (4 * 4e9))  # the best of all rates
    assert "for the hidden matrices alone, 68.3 % of the parameters" in " ".join(say(found))
    assert any(line.startswith("Forward and backward of 1,048,576 tokens") for line in say(found))
    assert planned("gpt2", "dp=4").training is None
    mixed = find_model("mixtral-8x7b")
    assert mixed.active is not None
    assert mixed.active * 8 - mixed.hidden * 2 == (8 - 2) * 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2)
    unknown = replace(planned("gpt2", "dp=2", tokens=9), shape=replace(mixed, experts_met=None))
    assert any("It is unknown how many experts" in line for line in say(unknown))


BAD = {
    "batch": (["gpt2", "--grid", "dp=2", "--batch", "0"], "--batch is a number of tokens"),
    "map's name": (["gpt2", "--grid", "dp=2", "--map", "map.png"], "--map names a file that ends in .svg"),
    "map's folder": (["gpt2", "--grid", "dp=2", "--map", "no/map.svg"], "there is no folder no"),
    "no-such-model": (["no-such-model", "--grid", "dp=2"], "no model is called 'no-such-model'"),
    "no grid": (["gpt2", "--grid", "dp:2"], "a grid is typed as dp=64,tp=8"),
    "no axis": (["gpt2", "--grid", "cp=2"], "a grid is typed as dp=64,tp=8"),
    "heads": (["gpt2", "--grid", "dp=2,tp=8"], "heads"),
    "experts": (["mixtral-8x7b", "--grid", "dp=6,ep=6"], "experts"),
    "layers": (["gpt2", "--grid", "dp=2,pp=13"], "12 layers"),
    "machine": (["gpt2", "--grid", "dp=2", "--machine", "abacus"], "no machine is called 'abacus'"),
    "window": (["gpt2", "--grid", "dp=2", "--window", "0"], "--window"),
    "twice": (["gpt2", "--grid", "dp=2,dp=4"], "a grid is typed as dp=64,tp=8"),
    **{
        f"bucket {size}": (["gpt2", "--grid", "dp=2", "--bucket-mb", size], "--bucket-mb")
        for size in ("nan", "inf", "0", "1e-7")
    },
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_line(what: str, capsys: pytest.CaptureFixture) -> None:
    arguments, says = BAD[what]
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_it_prints_a_table_or_json(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muon_tutorial.timing.recommend.MANY_PLACED", 1)
    assert main(["plan", "gpt2", "--grid", "dp=4,tp=2,pp=4", "--machine", "laptop"]) == 0
    out, err = capsys.readouterr()
    assert err == "Planning 18 matrices on 8 ranks takes over half a minute; a larger pp shortens it.\n"
    assert "multiplies bf16 without units for it" in out
    assert all(name in out for name in STRATEGIES)
    assert "take " in out
    assert "AdamW, ZeRO-1" in out
    assert "…" not in out
    assert main(["plan", "gpt2", "--grid", "dp=8,pp=4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    adamw, *rows = sorted(said["strategies"], key=lambda row: not row["strategy"].startswith("AdamW"))
    assert {row["strategy"] for row in rows} == set(STRATEGIES) - {"gram"}
    assert adamw["strategy"] == "AdamW, ZeRO-1"
    assert said["call"].startswith("Muon(params, ")
    assert said["parameters"] == 124_439_808
    for words in (" ".join(out.split()), said["seconds_are"]):
        assert "they have not been checked against measurements at this scale" in words


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_that_comes_along_says_where_its_numbers_are_from(name: str) -> None:
    machine = find_machine(name)
    assert {"gemm", "copy", "operation"} <= set(machine.sources)
    assert all(machine.sources.values())


def test_a_search_prints_the_call_of_what_is_faster_than_any_row() -> None:
    found = planned("gpt2", "dp=8,pp=2")
    first, *others = search(found)
    assert first.estimate.seconds <= min(one.seconds for one in found.estimates)
    assert all(first.estimate.seconds <= other.estimate.seconds for other in others)
    assert first.call.startswith("Muon(params, strategy=partial(")
    options = {step_cost.ROUND_LIMIT: first.round_bytes, "window": first.window}
    for name, number in options.items():
        assert f"{name}={number:_}" in first.call
    again = planned("gpt2", "dp=8,pp=2", round_bytes=first.round_bytes, window=first.window)
    same = next(one for one in again.estimates if one.strategy == first.estimate.strategy)
    assert same.seconds == pytest.approx(first.estimate.seconds)
    assert first.call in say(found, [first])[0]


def test_the_advice_says_whether_it_holds_on_other_links_or_where_it_turns() -> None:
    holds = planned("gpt2", "dp=8,pp=4")
    said = "stays the fastest, or about as fast, at half and at twice the speed of links"
    assert any(said in line for line in say(holds))
    crossing, within, _ = planned("gpt2", "dp=2,dp_shard=4,pp=4").estimates
    ahead, behind = sorted((crossing, within), key=lambda one: one.seconds)

    def slower(factor: float) -> float:
        """The winner's time if it sent many more bytes, so that on slow links the other strategy is
        faster."""
        return ahead.seconds + (behind.seconds - ahead.seconds) * 4 * (1 / factor - 1)

    bound = replace(ahead, at_factor=(slower,))
    other = replace(behind, at_factor=(lambda factor: behind.seconds,))
    turning = replace(holds, estimates=(bound, other), builders={})
    line = next(line for line in say(turning) if line.startswith("With links half as fast"))
    assert (
        f"{behind.strategy} is faster; the two take equally long with links at 0.8" in line
    )  # 4 (1/f - 1) = 1 at f = 0.8


def test_a_baseline_that_the_package_lacks_is_never_advised() -> None:
    found = planned("gpt2", "dp_shard=4,pp=12")
    *_, baseline = found.estimates
    assert baseline.strategy == "gather_all"
    fast = replace(found, estimates=(*found.estimates[:-1], replace(baseline, product=0.0, copy=0.0)))
    assert "gather_all" not in " ".join(say(fast, search(fast)))


def test_the_momentum_that_is_counted_is_the_one_that_a_step_keeps() -> None:
    given = [Matrix(0, "m", (8, 8), dtype=torch.bfloat16, grad_dtype=torch.float32)]
    plan = STRATEGIES["zero1"](given, Grid.of(dp=2))
    at = plan.grid.at(0)
    kept = step_over_ones(plan, at, torch.device("cpu")).parameters[0].state["momentum_buffer"]
    assert plan_memory(plan, at).momentum == kept.nbytes == 8 * 8 // 2 * 4


def test_the_whole_models_memory_counts() -> None:
    plain = planned("gpt2", "dp=4")
    shape = plain.shape
    assert plain.rest == shape.rest * (2 + 4) + shape.rest * 8 // 4
    dtypes = Dtypes(torch.float32, torch.bfloat16, torch.bfloat16, torch.float32)
    more = planned("gpt2", "dp=4", dtypes=dtypes)
    named = {one.strategy: one for one in plain.estimates}
    for one in more.estimates:
        before = named[one.strategy]
        assert one.held == before.held  # 4 + 2 bytes per element instead of 2 + 4
        assert 2 * one.momentum == before.momentum  # bf16 instead of fp32
        assert one.master == 2 * one.momentum
        assert more.memory(one) == one.memory + one.master + more.rest
    said = "parameters float32, gradients bfloat16, momentum bfloat16, float32 master weights"
    assert said in say_layout(more)
    cut = planned("llama-3.1-8b", "dp=16,tp=4")
    assert "tp varies fastest, 8 ranks per node, tp within one" in say_layout(cut)
    for grid in ("dp=4,tp=3", "dp=2,tp=3,pp=4"):  # ranks 6 to 8 are on two nodes
        assert "no axis within one" in say_layout(planned("gpt2", grid))
    assert "activations" in say_layout(plain)


def test_bytes_are_split_by_link() -> None:
    inside, crossing = (planned("gpt2", grid).estimates for grid in ("dp=8", "dp=16"))
    assert all(one.between == 0 < one.sent for one in inside)
    for one in crossing:
        assert 0 < one.between < one.sent
    shards = planned("gpt2", "dp=2,dp_shard=8,pp=4").estimates
    within = next(one for one in shards if one.strategy == "owner_per_replica")
    phases = within.phases.items()
    most = sum(sent for phase, sent in phases if "all_reduce" in phase or "flags" in phase)
    assert 0 < within.between <= most


@pytest.mark.parametrize("grid", ["dp=8,tp=8", "dp=64,tp=8"])
def test_with_tp_within_a_node_all_that_travels_along_dp_leaves_it(grid: str) -> None:
    for one in planned("llama-3.1-8b", grid).estimates:
        if one.strategy in ("gram", "layerwise", "zero1", "zero1 boundary"):
            along_tp = ("tp ", "Gram all_reduce")
            along_dp = sum(sent for phase, sent in one.phases.items() if not phase.startswith(along_tp))
            assert one.between == pytest.approx(along_dp, rel=1e-5)


def test_shares_are_of_all_ranks_in_every_row() -> None:
    rows = {one.strategy: one for one in planned("llama-3.1-8b", "dp=4,tp=4,pp=8").estimates}
    assert rows["replicated"].shares == pytest.approx(16)
    assert rows["layerwise"].shares >= 1
    ratio = rows["replicated"].newton_schulz / rows["layerwise"].newton_schulz
    assert rows["replicated"].shares / rows["layerwise"].shares == pytest.approx(ratio)


def test_a_batch_of_sequences_is_noticed() -> None:
    [line] = [line for line in say(planned("gpt2", "dp=64,pp=4", tokens=32)) if "batch" in line]
    assert line.startswith("A batch of 32 tokens is less than one for each of dp=64 ranks: --batch ")


def test_a_model_that_does_not_fit_names_the_axes_that_would_help() -> None:
    tight = replace(H100, memory=1e6)
    dense, mixture = (
        plan_model(find_model(model), read_sizes(grid), tight)
        for model, grid in (("gpt2", "dp=4,pp=4"), ("mixtral-8x7b", "dp=2,pp=32"))
    )
    assert say(dense)[0].endswith("Take more tp, pp or dp_shard (FSDP2, instead of dp).")
    assert "Take more tp, pp, ep or dp_shard" in say(mixture)[0]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("dp=1000000", "a grid of 1,000,000 ranks; plans are made for up to 131,072"),
        ("dp=65536,pp=4", "a grid of 262,144 ranks"),
        ("dp=" + "9" * 5000, "a grid is typed as dp=64,tp=8"),
    ],
)
def test_a_grid_that_would_take_hours_is_refused(grid: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_sizes(grid)
    assert read_sizes("dp=65536,ep=64,tp=2")["ep"] == 64  # expert parallelism spans the other axes
