"""``gram`` differs from one process within its bounds, is equal on all ranks, and sums once per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muon_tutorial import Grid, LocalWorld, Matrix, Muon, Shard, UsageError, gram, launch, zero1
from muon_tutorial.checkpoint import load_checkpoint, save_checkpoint
from muon_tutorial.evidence.memory import plan_memory
from muon_tutorial.evidence.predict import predict
from muon_tutorial.orthogonalizers.gram import DIFFERENCE, QUALITY_DIFFERENCE
from muon_tutorial.plan.assign import gram_cost
from muon_tutorial.plan.matrix import SummedGram, split_parts
from muon_tutorial.plan.strategies import layerwise
from muon_tutorial.worlds.build_mesh import build_mesh
from muon_tutorial.worlds.live import LiveWorld
from scripts.gram import TP, distances

from ..oracle import (
    UNEVEN,
    Case,
    Ranks,
    give_gradients,
    one_rank,
    own_part,
    seated,
    single_process,
    whole_gradients,
    whole_matrices,
)

SMALL = partial(gram, round_bytes=400)
DP2_TP2 = Grid.of(dp=2, tp=2)
WIDE = Matrix(0, "wide", (8, 48), (("tp", Shard(1)),))


def test_updates_and_their_quality_are_within_the_stated_bounds_of_one_process() -> None:
    found = list(distances(sides=((48, 192), (192, 48), (64, 64))))
    assert {one.tp for one in found} == set(TP)
    assert max(one.gram for one in found) <= DIFFERENCE
    assert max(one.gram for one in found) > 1e-4  # not all zero, so the bound is not vacuous
    for one in found:
        if one.orthogonalize != "minimax":  # its polynomials are different
            assert abs(one.mine.error - one.stocks.error) <= QUALITY_DIFFERENCE, one
            assert abs(one.mine.largest - one.stocks.largest) <= QUALITY_DIFFERENCE, one


@cache
def alone(case: Case, **settings: Any) -> list[Tensor]:
    """The whole matrices after the same steps in one process."""
    ranks = seated(Grid.of(), layerwise, replace(case, cuts=(Shard(0),) * len(case.shapes)), **settings)
    ranks.steps(whole_gradients(case))
    return [param.detach() for param in ranks.params[0]]


def assert_close(ranks: Ranks, wholes: Sequence[Tensor], bound: float) -> None:
    """Assert that parts err by at most rounding plus ``bound`` times the matrix's move in one process."""
    starts = whole_matrices(ranks.case)
    for at, params in zip(ranks.places, ranks.params, strict=True):
        for param, whole, start, cut in zip(params, wholes, starts, ranks.case.cuts, strict=True):
            mine, theirs = param.detach().float(), own_part(whole, cut, at).float()
            moved = (whole.float() - start.float()).norm()
            rounding = 3 * torch.finfo(param.dtype).eps * start.float().norm()
            assert (mine - theirs).norm() <= bound * moved + rounding


@pytest.mark.parametrize(
    ("name", "sizes", "dtype"),
    [
        *(("gram", sizes, torch.float32) for sizes in ((1, 2), (1, 3), (3, 2), (1, 8))),
        *(("gram", (2, 2), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        ("minimax", (2, 3), torch.float32),
    ],
    ids=str,
)
def test_grids_keep_the_bound_and_copies_agree(name: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Cases: uneven cuts, empty shards, cuts of short sides, buckets in flight, and a missing gradient."""
    case, grid = replace(UNEVEN, dtype=dtype), Grid.of(dp=sizes[0], tp=sizes[1])
    ranks = seated(grid, SMALL, case, orthogonalize=name, window=2)
    ranks.steps(whole_gradients(case))
    assert_close(ranks, alone(case, orthogonalize=name), DIFFERENCE)
    for at, params in zip(ranks.places, ranks.params, strict=True):
        first = ranks.params[grid.rank({"tp": at["tp"]})]
        assert all(map(torch.equal, params, first))


def test_gathered_matrices_are_stock_to_the_bit_and_cut_ones_are_not() -> None:
    ranks = seated(DP2_TP2, SMALL, UNEVEN)
    ranks.steps(whole_gradients(UNEVEN))
    rank = ranks.places[0]
    same = [
        torch.equal(param, own_part(whole.detach(), cut, rank))
        for param, whole, cut in zip(ranks.params[0], single_process(UNEVEN), UNEVEN.cuts, strict=True)
    ]
    assert same[1]  # cut along its short side
    assert not all(same)


def test_the_long_side_decides_what_stays_cut() -> None:
    cuts = [cut for cut in UNEVEN.cuts if isinstance(cut, Shard)]
    shapes = enumerate(zip(UNEVEN.shapes, cuts, strict=True))
    plan = gram([Matrix(i, f"m{i}", shape, (("tp", cut),)) for i, (shape, cut) in shapes], DP2_TP2)
    summed = {e.matrix.index: e.gram for b in plan.buckets for e in b.entries if e.gram is not None}
    assert set(summed) == {2, 3, 4, 5, 6}
    assert summed[5] == SummedGram(0, 6)
    assert summed[6] == SummedGram(1, 3)
    assert not any(e.route.hops for b in plan.buckets for e in b.entries if e.gram is not None)


def test_a_matrix_in_a_stack_or_a_convolution_stays_cut_by_its_own_sides() -> None:
    stack = split_parts(Matrix(0, "experts", (2, 12, 8), (("tp", Shard(1)),)), "stack", 0)
    through = split_parts(Matrix(1, "cut through", (4, 12, 8), (("tp", Shard(0)),)), "stack", 2)
    (kernel,) = split_parts(Matrix(2, "conv", (8, 6, 3, 3), (("tp", Shard(1)),)), "flatten", 6)
    plan = gram([*stack, *through, kernel], Grid.of(tp=2))
    kept = {e.matrix.name: e.gram for b in plan.buckets for e in b.entries}
    assert kept["experts[part 0]"] == SummedGram(0, 8)
    assert kept["cut through[part 0]"] is None
    assert kept["conv"] == SummedGram(1, 8)


def test_stacks_and_convolutions_step_within_the_bound() -> None:
    grid, made = Grid.of(dp=2, tp=2), torch.Generator().manual_seed(0)
    world = LocalWorld(grid)
    kinds: list[tuple[tuple[int, ...], str, int]] = [((2, 12, 8), "stack", 1), ((8, 6, 3, 3), "flatten", 1)]
    wholes = [torch.randn(shape, generator=made) for shape, _, _ in kinds]
    grads = [torch.randn(shape, generator=made) for shape, _, _ in kinds]

    def muon(params: Sequence[nn.Parameter], **settings: Any) -> Muon:
        groups = [{"params": [p], "parts": kind} for p, (_, kind, _) in zip(params, kinds, strict=True)]
        return Muon(groups, lr=0.1, weight_decay=0.0, orthogonalize="gram", **settings)

    def cut(tensors: Sequence[Tensor], tp: int) -> list[nn.Parameter]:
        own = [nn.Parameter(x.chunk(2, d)[tp].clone()) for x, (_, _, d) in zip(tensors, kinds, strict=True)]
        for param, (_, _, dim) in zip(own, kinds, strict=True):
            param.partition_dim = dim  # type: ignore[attr-defined]
        return own

    one = [nn.Parameter(whole.clone()) for whole in wholes]
    ranks = [cut(wholes, grid.at(rank)["tp"]) for rank in grid.ranks]
    muons = [muon(params, strategy="gram", mesh=world.mesh(rank)) for rank, params in enumerate(ranks)]
    for param, grad in zip(one, grads, strict=True):
        param.grad = grad.clone()
    for rank, params in enumerate(ranks):
        for param, grad in zip(params, cut(grads, grid.at(rank)["tp"]), strict=True):
            param.grad = grad.detach()
    muon(one).step()
    world.run([each.program() for each in muons])
    for rank, params in enumerate(ranks):
        moves = [(end - start).detach().norm() for end, start in zip(one, wholes, strict=True)]
        for param, end, moved in zip(params, cut(one, grid.at(rank)["tp"]), moves, strict=True):
            assert (param - end).norm() <= DIFFERENCE * moved


def test_a_bucket_asks_for_one_all_reduce_and_no_gather() -> None:
    plan = gram([replace(WIDE, index=i, name=f"m{i}") for i in range(3)], Grid.of(tp=2))
    (flags, summed) = predict(plan, plan.grid.at(1)).entries
    assert (flags.phase, summed.phase, summed.kind) == ("gradient flags", "Gram all_reduce", "all_reduce")
    assert (summed.dtype, summed.payload) == ("float32", 4 * 3 * 36)


def test_work_and_the_largest_buffer_count_the_gram_matrix() -> None:
    grid = Grid.of(tp=4)
    (entry,) = gram([WIDE], grid).buckets[0].entries
    assert entry.cost == gram_cost(8, 96) == (4 * 8 * 96 + 34 * 8**3) // 5
    square = replace(WIDE, shape=(48, 48))
    assert plan_memory(gram([square], grid), grid.at(0)).whole == 4 * 48 * 49 // 2


def test_recipes_without_a_gram_form_are_refused_at_construction_where_a_matrix_stays_cut() -> None:
    def make(**settings: Any) -> None:
        seated(Grid.of(tp=2), SMALL, UNEVEN, **settings)

    for name in ("turbo", "float32", "minimax_bf16"):
        with pytest.raises(UsageError, match=f"orthogonalize must be 'stock' .* got '{name}'"):
            make(orthogonalize=name)
    with pytest.raises(UsageError, match="map a singular value"):
        make(ns_coefficients=(8.0, -20.0, 20.0))
    with pytest.raises(UsageError, match="Take fewer steps, or another strategy"):
        make(ns_steps=7)
    make(ns_steps=6)
    make(orthogonalize="minimax")
    seated(Grid.of(dp=2), SMALL, UNEVEN, orthogonalize="turbo")  # nothing is cut


# Real ranks


def run_live(rank: int, root: str) -> dict[str, list[Tensor]]:
    """Take two steps, save, take two more; take these again from the checkpoint, also under ``zero1``."""
    case, world = replace(UNEVEN, steps=4), LiveWorld(build_mesh({"dp": 2, "tp": 2}))
    gradients = list(whole_gradients(case))
    found: dict[str, list[Tensor]] = {}

    def walk(strategy: Any, steps: slice, load: bool) -> tuple[nn.Module, Muon]:
        params, muon = one_rank(case, partial(strategy, round_bytes=400), world, orthogonalize="gram")
        model = nn.Module()
        model.ps = nn.ParameterList(params)
        for index, group in enumerate(muon.param_groups):
            group["param_names"] = [f"ps.{i}" for i in range(len(params))] if index == 0 else []
        if load:
            load_checkpoint(root, model, muon)
        for grads in gradients[steps]:
            give_gradients(list(model.parameters()), grads, case, world.at)
            muon.step()
        return model, muon

    model, muon = walk(gram, slice(0, 2), load=False)
    save_checkpoint(root, model, muon)
    found["after two"] = [param.detach().clone() for param in model.parameters()]
    for grads in gradients[2:]:
        give_gradients(list(model.parameters()), grads, case, world.at)
        muon.step()
    found["through"] = [param.detach() for param in model.parameters()]
    found["resumed"] = [p.detach() for p in walk(gram, slice(2, 4), load=True)[0].parameters()]
    found["moved"] = [p.detach() for p in walk(zero1, slice(2, 2), load=True)[0].parameters()]
    found["moved, stepped"] = [p.detach() for p in walk(zero1, slice(2, 4), load=True)[0].parameters()]
    return found


def test_real_ranks_are_within_the_bound_resume_to_the_bit_and_move_to_zero1(tmp_path: Any) -> None:
    case = replace(UNEVEN, steps=4)
    by_rank = launch(run_live, 4, args=(str(tmp_path / "saved"),))
    ends = alone(case, orthogonalize="gram")
    for at, found in zip(map(DP2_TP2.at, DP2_TP2.ranks), by_rank, strict=True):
        assert all(map(torch.equal, found["through"], found["resumed"]))
        assert all(map(torch.equal, found["after two"], found["moved"]))
        assert all(map(torch.equal, found["through"], by_rank[at["tp"]]["through"]))
        for name in ("through", "moved, stepped"):
            parts = zip(found[name], ends, whole_matrices(case), case.cuts, strict=True)
            for param, end, start, cut in parts:
                off = (param - own_part(end, cut, at)).norm()
                assert off <= DIFFERENCE * (end - start).norm()
