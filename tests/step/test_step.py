"""One rank's step under a plan: readied gradients, saved and loaded state, and the optimizer's interface."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from muon_tutorial import STRATEGIES, Coordinate, Grid, LocalWorld, Muon, Shard
from muon_tutorial.engine.collective import Collective
from muon_tutorial.errors import GradientError, UsageError
from muon_tutorial.plan.layout import Placement
from muon_tutorial.plan.layout import Replicate as Uncut
from muon_tutorial.step import reduce_gradients

from ..oracle import (
    UNEVEN,
    Case,
    Ranks,
    Stock,
    assert_alike,
    assert_own_parts,
    own_param,
    own_part,
    seated,
    whole_gradients,
    whole_matrices,
)
from ..plan.cases import hand_cuts
from ..plan.variants import BITWISE, VARIANTS

GRIDS = [Grid.of(dp=dp, tp=tp) for dp, tp in ((1, 1), (2, 1), (1, 2), (3, 2))]
DP2, DP2_TP2 = Grid.of(dp=2), Grid.of(dp=2, tp=2)
SLICED = ("zero1", "layerwise", "gram")  # these also take local gradients
EXACT = tuple(name for name in STRATEGIES if name != "gram")  # test_gram checks its bound


def assert_as_stock(ranks: Ranks, stock: Stock) -> None:
    assert_own_parts(ranks.params, stock.params, ranks.case, ranks.world.grid)


def few_bits(seed: int) -> list[Tensor]:
    """Gradients whose sums are exact in any order."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(-31, 32, shape, generator=made) * 2.0**-6 for shape in UNEVEN.shapes]


# Gradients made ready


def rest_of(grid: Grid) -> list[list[nn.Parameter]]:
    """All ranks' other parameters, in two dtypes, with local gradients of few bits."""
    shapes = (((7,), torch.float32), ((3, 2), torch.bfloat16), ((5,), torch.float32), ((2, 2), torch.float32))
    params = [[nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in shapes] for _ in grid.ranks]
    for rank in grid.ranks:
        made = torch.Generator().manual_seed(grid.at(rank)["dp"])
        for param in params[rank]:
            param.grad = torch.randint(-4, 5, param.shape, generator=made).to(param.dtype)
    return params


def test_averaged_strategies_leave_the_rests_gradients_alone_and_refuse_torn_ones() -> None:
    ranks, rest = seated(DP2, "replicated"), rest_of(DP2)
    ranks.give(few_bits(0))
    before = [param.grad for own in rest for param in own]
    kept = [grad.clone() for grad in before if grad is not None]
    torn, rest[1][2].grad = rest[1][2].grad, None
    with pytest.raises(GradientError, match="parameter 2 of the rest is missing on 1 of 2 ranks"):
        ranks.ready(rest=rest)
    rest[1][2].grad = torn
    ranks.ready(rest=rest)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True) if b is not None)


def test_the_rests_gradients_travel_in_runs_of_one_dtype_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_gradients, "ROUND_BYTES", 60)
    ranks, asked = seated(DP2), list[Collective]()
    ranks.world.observers.append(lambda request, at: asked.append(request) if at.rank == 0 else None)
    ranks.give(few_bits(0))
    ranks.ready(rest=rest_of(DP2))
    runs = [(it.dtype, it.receive) for it in asked if it.label.phase == "other gradients all_reduce"]
    assert runs == [(torch.bfloat16, 6), (torch.float32, 7 + 5), (torch.float32, 4)]


def test_a_gradient_missing_on_some_ranks_counts_as_zero_there() -> None:
    torn, zeros = seated(DP2_TP2), seated(DP2_TP2)
    rests = rest_of(DP2_TP2), rest_of(DP2_TP2)
    for ranks, rest, is_torn in zip((torn, zeros), rests, (True, False), strict=True):
        ranks.give(few_bits(0), few_bits(1))
        for params, own in zip(ranks.params[2:], rest[2:], strict=True):
            for param in (params[4], own[0]):
                param.grad = None if is_torn else torch.zeros_like(param)
        ranks.ready(rest=rest)
        ranks.step()
    assert_alike(torn.params, zeros.params)
    for own, others in zip(*rests, strict=True):
        assert own[0].grad is not None
        assert others[0].grad is not None
        assert torch.equal(own[0].grad, others[0].grad)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_missing_everywhere_leaves_everything_of_the_parameter_as_it_was(strategy: str) -> None:
    """Such a parameter is not decayed either. A missing gradient of the rest stays None."""
    ranks, rest = seated(DP2_TP2, strategy), rest_of(DP2_TP2)
    ranks.give(few_bits(0))
    ranks.step()
    ranks.give(few_bits(1))
    for params, own in zip(ranks.params, rest, strict=True):
        params[4].grad = own[2].grad = None
    held = [[params[4].detach(), momentum(muon, params[4])] for params, muon in pairs(ranks)]
    before = [[tensor.clone() for tensor in its] for its in held]
    ranks.ready(rest=rest)
    ranks.step()
    assert_alike(held, before)
    assert all(own[2].grad is None for own in rest)


def pairs(ranks: Ranks) -> list[tuple[list[nn.Parameter], Muon]]:
    return list(zip(ranks.params, ranks.muons, strict=True))


def momentum(muon: Muon, param: Tensor) -> Tensor:
    return muon.state[param]["momentum_buffer"]


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - set(SLICED)))
def test_an_averaged_gradient_missing_on_some_ranks_is_an_error_that_changes_nothing(strategy: str) -> None:
    ranks = seated(DP2_TP2, strategy)
    ranks.give(few_bits(0))
    ranks.params[3][4].grad = None
    with pytest.raises(GradientError, match=r"parameter 4 is missing on 1 of 4 ranks.*give it to all ranks"):
        ranks.step()
    assert_own_parts(ranks.params, whole_matrices(UNEVEN), UNEVEN, DP2_TP2)
    ranks.give(few_bits(0))
    ranks.step()


# Clipping


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("grid", "max_norm"), [*((grid, 0.5) for grid in GRIDS), (DP2, 1e9)], ids=str)
def test_gradients_are_clipped_by_the_single_process_norm(strategy: str, grid: Grid, max_norm: float) -> None:
    """The total is summed in float64. The single process sums in float32, with an error below 1e-5 here."""
    ranks, grads, stock = seated(grid, strategy), few_bits(0), Stock()
    whole = [torch.arange(1.0, 6.0), torch.arange(1.0, 4.0 * grid.size("tp") + 1)]
    rest = [rest_parts(whole, at) for at in ranks.places]
    ranks.give(grads)
    norms = ranks.ready(max_norm=max_norm, rest=rest)
    exact = torch.cat([grad.flatten() for grad in [*grads, *whole]]).double().norm()
    torchs = nn.utils.get_total_norm([*grads, *whole])
    for found in norms:
        assert found is not None
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.float(), torchs, rtol=1e-5, atol=0)
    scale = (max_norm / (exact + 1e-6)).clamp(max=1.0).float()
    for at, own in zip(ranks.places, rest, strict=True):
        for param, due in zip(own, [whole[0], whole[1].chunk(grid.size("tp"))[at["tp"]]], strict=True):
            torch.testing.assert_close(param.grad, due * scale, rtol=1e-5, atol=0)
    ranks.step()
    ranks.steps([few_bits(1)])  # Newton–Schulz ignores scale, so only a second step shows the clipping
    stock.steps([[grad * scale for grad in grads], few_bits(1)])
    if strategy in EXACT or grid.size("tp") == 1:
        assert_as_stock(ranks, stock)


def rest_parts(whole: Sequence[Tensor], at: Coordinate) -> list[nn.Parameter]:
    """A parameter that all ranks hold, and one that is cut into a chunk per tensor-parallel position."""
    parts = [whole[0], whole[1].chunk(at.size("tp"))[at["tp"]]]
    params = [nn.Parameter(torch.zeros_like(part)) for part in parts]
    for param, part in zip(params, parts, strict=True):
        param.grad = part.clone()
    params[1].partition_dim = 0  # type: ignore[attr-defined]
    return params


# State


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_has_an_entry_for_every_parameter_from_the_start(strategy: str, grid: Grid) -> None:
    """Under a strategy that slices the momentum, the slices along dp make up the whole."""
    ranks = seated(grid, strategy)
    for params, muon in pairs(ranks):
        assert set(muon.state) == set(params)
        extra = ("kept", "steps") if strategy in SLICED else ("piece",) if grid.size("tp") > 1 else ()
        keys = {"momentum_buffer", *extra}
        assert all(set(state) == keys for state in muon.state.values())
        assert all(not momentum(muon, param).any() for param in params)
    kept = [[momentum(muon, param).numel() for param in params] for params, muon in pairs(ranks)]
    for at in ranks.places:
        over_dp = [kept[rank] for rank in (at.group("dp") if strategy in SLICED else (at.rank,))]
        whole = [param.numel() for param in ranks.params[at.rank]]
        assert [sum(same) for same in zip(*over_dp, strict=True)] == whole


def saved(muon: Muon) -> Any:
    """A Muon's state after saving to a file and loading."""
    file = io.BytesIO()
    torch.save(muon.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_state_continues_to_the_same_bits(strategy: str, dtype: torch.dtype) -> None:
    case = replace(UNEVEN, dtype=dtype, steps=4)
    straight, early, late = (seated(DP2_TP2, strategy, case) for _ in range(3))
    straight.steps(whole_gradients(case))
    early.steps(islice(whole_gradients(case), 2))
    for rank, (params, muon) in enumerate(pairs(late)):
        with torch.no_grad():
            for param, kept in zip(params, early.params[rank], strict=True):
                param.copy_(kept)
        muon.load_state_dict(saved(early.muons[rank]))
    late.steps(islice(whole_gradients(case), 2, None))
    assert_alike(late.params, straight.params)


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("grid", [Grid.of(dp=1), Grid.of(dp=3, tp=2)], ids=str)
def test_the_stock_optimizers_state_is_cut_and_continues_to_the_bit(strategy: str, grid: Grid) -> None:
    case = replace(UNEVEN, steps=4)
    stock, ranks = Stock(case), seated(grid, strategy, case)
    stock.steps(islice(whole_gradients(case), 2))
    for at, (params, muon) in zip(ranks.places, pairs(ranks), strict=True):
        with torch.no_grad():
            for param, whole, cut in zip(params, stock.params, case.cuts, strict=True):
                param.copy_(own_part(whole.detach(), cut, at))
        muon.load_state_dict(stock.muon.state_dict())
    ranks.steps(islice(whole_gradients(case), 2, None))
    stock.steps(islice(whole_gradients(case), 2, None))
    assert_as_stock(ranks, stock)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_momentum_of_a_wrong_shape_is_refused_by_name(strategy: str) -> None:
    muon = seated(DP2_TP2, strategy).muons[1]
    state = muon.state_dict()
    state["state"][3]["momentum_buffer"] = torch.zeros(2, 3)
    with pytest.raises(UsageError, match=r"parameter 3: a momentum of shape \(2, 3\).* rank 1 .*\(9, 1\)"):
        muon.load_state_dict(state)


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - set(SLICED)))
def test_another_piece_of_a_parameter_is_refused_but_a_copy_is_not(strategy: str) -> None:
    """Ranks 1 and 3 hold copies of one piece. States of older versions do not say which piece it is."""
    case = Case(((8, 8),), (Shard(0),), steps=1)
    ranks = seated(DP2_TP2, strategy, case)
    ranks.steps(whole_gradients(case))
    state = saved(ranks.muons[0])
    with pytest.raises(
        UsageError, match=r"parameter 0: this is the momentum of piece 0 .* rank 1 .* has piece 1"
    ):
        ranks.muons[1].load_state_dict(state)
    ranks.muons[1].load_state_dict(saved(ranks.muons[3]))
    del state["state"][0]["piece"]
    ranks.muons[1].load_state_dict(state)


@pytest.mark.parametrize("giver", [0, 2, 3])
def test_another_ranks_slices_are_refused_though_their_sizes_fit(giver: int) -> None:
    """Slices differ along dp, and pieces along tp, but only a record in the state shows whose they are."""
    case = Case(((8, 8),), (Shard(0),), steps=1)
    ranks = seated(DP2_TP2, "zero1", case)
    ranks.steps(whole_gradients(case))
    sizes = [[momentum(muon, param).shape for param in params] for params, muon in pairs(ranks)]
    assert sizes[giver] == sizes[1]
    state, before = ranks.muons[1].state, copy.deepcopy(ranks.muons[1].state_dict())
    with pytest.raises(UsageError, match=r"parameter 0: this momentum was saved by another rank.*rank 1"):
        ranks.muons[1].load_state_dict(saved(ranks.muons[giver]))
    assert ranks.muons[1].state is state
    now = ranks.muons[1].state_dict()
    assert now["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert torch.equal(now["state"][index]["momentum_buffer"], entry["momentum_buffer"])
        assert now["state"][index]["kept"] == entry["kept"]


# The rest of the optimizer's interface


GROUPS = ({"lr": 0.05, "weight_decay": 0.0}, {"weight_decay": 0.3, "momentum": 0.5})


def grouped(params: Sequence[nn.Parameter], lr: Tensor) -> list[dict[str, Any]]:
    return [{"params": list(params[i::2]), "lr": lr.clone(), **GROUPS[i]} for i in range(2)]


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize(
    ("late", "dtype", "lr"),
    [(False, torch.float32, torch.tensor(0.7)), (True, torch.bfloat16, torch.tensor([0.7]))],
    ids=["from the start", "the second after two steps"],
)
def test_groups_have_settings_of_their_own(strategy: str, late: bool, dtype: torch.dtype, lr: Tensor) -> None:
    """A learning rate may be a tensor. As a Python float, 0.7·sqrt(33/6) would be rounded differently."""
    case = replace(UNEVEN, dtype=dtype, steps=4)
    ranks, stock, first = seated(DP2_TP2, strategy, case), Stock(case), slice(1 if late else 2)
    builder = partial(STRATEGIES[strategy], round_bytes=400)
    ranks.muons = [
        Muon(grouped(params, lr)[first], strategy=builder, mesh=ranks.world.mesh(rank))
        for rank, params in enumerate(ranks.params)
    ]
    stock.muon = torch.optim.Muon(grouped(stock.params, lr)[first])
    for step, grads in enumerate(whole_gradients(case)):
        if late and step == 2:
            stock.muon.add_param_group(grouped(stock.params, lr)[1])
            for params, muon in pairs(ranks):
                muon.add_param_group(grouped(params, lr)[1])
        ranks.steps([grads])
        stock.steps([grads])
    assert_as_stock(ranks, stock)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_of_several_matrices_in_one_parameter_continues_in_several_buckets(strategy: str) -> None:
    made = torch.Generator().manual_seed(0)
    grads = [torch.randint(-31, 32, (12, 8), generator=made) * 2.0**-6 for _ in range(4)]
    alone = Muon([nn.Parameter(torch.ones(12, 8))], parts=(3, 4, 5))
    world, builder = LocalWorld(DP2), partial(STRATEGIES[strategy], round_bytes=128)
    params = [nn.Parameter(torch.ones(12, 8)) for _ in range(2)]
    muons = [Muon([p], parts=(3, 4, 5), strategy=builder, mesh=world.mesh(r)) for r, p in enumerate(params)]
    (whole,) = alone.param_groups[0]["params"]
    for step, grad in enumerate(grads):
        if step == 2:
            for param, muon in zip(params, muons, strict=True):
                param.data.copy_(whole.data)
                muon.load_state_dict(alone.state_dict())
        for param in (whole, *params):
            param.grad = grad.clone()
        alone.step()
        if step >= 2:
            world.run([muon.program() for muon in muons])
    assert all(torch.equal(param, whole) for param in params)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_copy_that_would_step_alone_is_refused(make_copy: Callable[[Muon], object]) -> None:
    with pytest.raises(UsageError, match=r"cannot be copied or pickled.*load this one's state_dict\(\)"):
        make_copy(seated(DP2).muons[0])


# Random cases


@dataclass(frozen=True, slots=True)
class Drawn:
    """A parameter: its shape, the matrices it holds, how tp cuts it, and whether it is stored (in, out)."""

    shape: tuple[int, ...]
    parts: Any
    cut: Placement
    transposed: bool

    def own(self, whole: Tensor, at: Coordinate) -> Tensor:
        return own_part(whole.detach(), self.cut, at)


@st.composite
def drawn_parameters(draw: st.DrawFn, tp: int) -> Drawn:
    parts: Any = draw(st.sampled_from((None, None, "rows", "heads", "stack", "flatten")))
    deep, transposed = parts in ("stack", "flatten"), draw(st.booleans())
    shape = tuple(draw(st.lists(st.integers(1, 5 if deep else 12), min_size=2, max_size=4 if deep else 2)))
    lines = shape[int(transposed)]
    if parts == "rows":
        parts = (1, lines - 1) if lines > 1 else None
    elif parts == "heads":
        parts = draw(st.sampled_from([each for each in range(1, lines + 1) if lines % each == 0]))
    dim = draw(st.integers(-1, 1 if parts == "flatten" else len(shape) - 1))
    sizes = draw(hand_cuts(shape[dim], tp))
    cut = Uncut() if dim < 0 else Shard(dim, draw(st.sampled_from((None, sizes))))
    return Drawn(shape, parts, cut, transposed)


@pytest.mark.parametrize("variant", BITWISE)
@given(
    data=st.data(),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    round_bytes=st.sampled_from((1, 64, 300, 10_000)),
    window=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {"nesterov": st.booleans(), "adjust_lr_fn": st.sampled_from(("original", "match_rms_adamw"))}
    ),
)
@settings(deadline=None, max_examples=5)
def test_any_parameters_on_any_grid_step_as_the_single_process_does(
    variant: str, data: Any, sizes: Any, dtype: torch.dtype, round_bytes: int, window: int, options: Any
) -> None:
    """Fused lines, heads, stacks and convolutions, transposed or not, cut evenly or by hand."""
    grid = Grid.of(dp=sizes[0], tp=sizes[1])
    drawn = data.draw(st.lists(drawn_parameters(grid.size("tp")), min_size=1, max_size=4))
    world, made = LocalWorld(grid, random.Random(0).randrange), torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(each.shape, generator=made).to(dtype)) for each in drawn]
    places = [grid.at(rank) for rank in grid.ranks]
    own = [[own_param(x, each.cut, at) for each, x in zip(drawn, whole, strict=True)] for at in places]

    def muon(params: Sequence[nn.Parameter], **settings: Any) -> Muon:
        groups = [
            {"params": [p], "parts": each.parts, "transposed": each.transposed}
            for p, each in zip(params, drawn, strict=True)
        ]
        return Muon(groups, lr=0.1, **options, **settings)

    builder, alone = partial(VARIANTS[variant], round_bytes=round_bytes), muon(whole)
    seats = zip(own, map(world.mesh, grid.ranks), strict=True)
    ranks = [muon(params, strategy=builder, mesh=mesh, window=window) for params, mesh in seats]
    for _ in range(2):
        for place, (each, x) in enumerate(zip(drawn, whole, strict=True)):
            x.grad = (torch.randint(-31, 32, each.shape, generator=made) * 2.0**-6).to(dtype)
            for at, params in zip(places, own, strict=True):
                params[place].grad = each.own(x.grad, at)
        alone.step()
        world.run([each.program() for each in ranks])
    for at, params in zip(places, own, strict=True):
        assert all(torch.equal(p, e.own(x, at)) for e, x, p in zip(drawn, whole, params, strict=True))


@pytest.mark.parametrize("call", ["add_param_group", "load_state_dict"])
def test_calls_that_would_lose_readied_gradients_are_refused(call: str) -> None:
    param = torch.nn.Parameter(torch.ones(3, 3))
    muon = Muon([param], strategy="zero1", mesh=LocalWorld(Grid.of(dp=1)).mesh(0))
    state, param.grad = muon.state_dict(), torch.full((3, 3), 100.0)
    muon.ready_gradients(max_norm=1.0)
    more = {"add_param_group": {"params": [torch.nn.Parameter(torch.ones(2, 2))]}, "load_state_dict": state}
    with pytest.raises(UsageError, match=rf"{call}\(\) between ready_gradients\(\) and step\(\)"):
        getattr(muon, call)(more[call])
    muon.step()
    getattr(muon, call)(more[call])
