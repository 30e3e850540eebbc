"""Tests of the matrices that models have (fused, gated, per head, experts, convolutions), in any sharding.

The oracle is ``torch.optim.Muon`` over separate parameters, one per matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor

from muon_tutorial import Coordinate, DistributedConfig, Grid, LocalWorld, Muon, Shard, build_mesh, launch
from muon_tutorial.callbacks.create_configs import (
    create_devicemesh_config,
    create_dtensor_config,
    create_processgroup_config,
)
from muon_tutorial.plan.matrix import Parts

from ..exhaustive import left_out
from ..oracle import own_part
from ..test_strategies import VARIANTS
from .setups import counted, full
from .table import over_fsdp

STEPS = 2
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A parameter of a model, and how it holds matrices."""

    shape: tuple[int, ...]
    parts: Parts = None
    transposed: bool = False

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """The matrices of the parameter, cut out by hand."""
        if self.parts is None or self.parts == "flatten":
            return [whole.flatten(1)]
        words = ("heads", self.parts) if isinstance(self.parts, int) else self.parts
        if "stack" in words:
            inside = tuple(words[1:]) if isinstance(words, tuple) else ()
            stack = whole.flatten(0, -3)
            if not inside:
                return list(stack)
            inner = Kind(tuple(stack.shape[1:]), inside, self.transposed)
            return [piece for one in stack for piece in inner.pieces(one)]
        dim, sizes = int(self.transposed), [size for size in words if isinstance(size, int)]
        if words[0] == "heads":
            return list(whole.split(sizes * (self.shape[dim] // sum(sizes)), dim))
        if words[0] == "interleaved":
            groups = [group.split(sizes, dim) for group in whole.split(sum(sizes), dim)]
            return [torch.cat(runs, dim) for runs in zip(*groups, strict=True)]
        return list(whole.split(sizes, dim))


KINDS: dict[str, Kind] = {
    "plain": Kind((10, 14)),
    "fused QKV": Kind((24, 8), (8, 8, 8)),
    "grouped queries": Kind((24, 8), (16, 4, 4)),
    "gated": Kind((18, 7), (9, 9)),
    "per head": Kind((12, 9), 4),
    "experts": Kind((5, 6, 4), "stack"),
    "layers of experts": Kind((2, 3, 4, 6), "stack"),
    "convolution": Kind((6, 4, 3, 3), "flatten"),
    "one column": Kind((9, 1)),
    "stored (in, out)": Kind((6, 15), transposed=True),
    "fused, stored (in, out)": Kind((8, 20), (8, 8, 4), transposed=True),
    "per head, stored (in, out)": Kind((9, 12), 4, transposed=True),
    "experts stored (in, out)": Kind((5, 4, 6), "stack", transposed=True),
    "q, k, v head by head": Kind((24, 8), ("interleaved", 2, 2, 2)),
    "grouped queries, group by group": Kind((24, 7), ("interleaved", 4, 2, 2)),
    "latent heads": Kind((15, 6), ("heads", 3, 2)),
    "gate and up row by row": Kind((14, 5), ("interleaved", 1, 1)),
    "head by head, stored (in, out)": Kind((8, 20), ("interleaved", 3, 2), transposed=True),
    "head by head in experts": Kind((2, 12, 5), ("stack", "interleaved", 2, 1)),
    "experts with gate and up inside": Kind((3, 10, 4), ("stack", 5, 5)),
    "the same, stored (in, out)": Kind((3, 4, 10), ("stack", 6, 4), transposed=True),
    "gate and up alternate in experts": Kind((3, 4, 10), ("stack", "interleaved", 1, 1), transposed=True),
    "heads in experts": Kind((2, 12, 5), ("stack", "heads", 2, 4)),
}
COUNT = sum(len(kind.pieces(torch.empty(kind.shape))) for kind in KINDS.values())


def whole(index: int, step: int) -> Tensor:
    """The whole of a parameter (``step`` 0) or of its gradient, with few bits, so that sums are exact."""
    made = torch.Generator().manual_seed(100 * step + index)
    shape = list(KINDS.values())[index].shape
    return torch.randint(-31, 32, shape, generator=made) * 2.0**-6


@cache
def by_stock() -> list[list[Tensor]]:
    """The matrices of every parameter after the steps of ``torch.optim.Muon``."""
    kinds = list(KINDS.values())
    wholes = [kind.pieces(whole(i, 0)) for i, kind in enumerate(kinds)]
    made = [[nn.Parameter(piece.clone()) for piece in pieces] for pieces in wholes]
    stock = torch.optim.Muon([piece for pieces in made for piece in pieces], **OPTIONS)
    for step in range(1, STEPS + 1):
        for index, (kind, pieces) in enumerate(zip(kinds, made, strict=True)):
            for piece, grad in zip(pieces, kind.pieces(whole(index, step)), strict=True):
                piece.grad = grad.clone()
        stock.step()
    return [[piece.detach() for piece in pieces] for pieces in made]


def different(found: list[Tensor]) -> list[str]:
    """The kinds with a matrix that differs from the stock optimizer's in any bit."""
    return [
        name
        for (name, kind), tensor, pieces in zip(KINDS.items(), found, by_stock(), strict=True)
        if not all(map(torch.equal, kind.pieces(tensor), pieces))
    ]


def grouped(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """One group per kind: ``parts`` and ``transposed`` are options of the group.

    The learning rate's factor in ``OPTIONS`` is the same for a matrix and its transpose.
    """
    return [
        {"params": [p], "parts": kind.parts, "transposed": kind.transposed}
        for p, kind in zip(params, KINDS.values(), strict=True)
    ]


CUTS = (
    (Grid.of(dp=3, tp=1), 0),
    *((grid, dim) for grid in (Grid.of(dp=1, tp=3), Grid.of(dp=2, tp=2)) for dim in (0, 1, 2)),
)


def cut_of(kind: Kind, dim: int) -> Shard:
    """The cut along ``dim``, or the last dimension if ``dim`` is larger. Convolutions count as matrices."""
    return Shard(min(dim, 1 if kind.parts == "flatten" else len(kind.shape) - 1))


def own_params(dim: int, at: Coordinate) -> list[nn.Parameter]:
    params = []
    for index, kind in enumerate(KINDS.values()):
        param = nn.Parameter(own_part(whole(index, 0), cut_of(kind, dim), at))
        cut = cut_of(kind, dim)
        param.partition_dim = cut.dim  # type: ignore[attr-defined]
        param.partition_sizes = cut.lengths(kind.shape[cut.dim], at.size("tp"))  # type: ignore[attr-defined]
        params.append(param)
    return params


def cases() -> Iterator[Any]:
    """Every strategy with every cut. A usual run takes two cuts of each, and ``test_step`` draws others."""
    for place, strategy in enumerate(VARIANTS):
        for number, cut in enumerate(CUTS):
            daily = (number - place) % len(CUTS) in (0, 3)
            yield (strategy, *cut) if daily else left_out(strategy, *cut)


@pytest.mark.parametrize(("strategy", "grid", "dim"), cases(), ids=str)
def test_strategies_equal_stock_muon_on_separate_matrices(strategy: str, grid: Grid, dim: int) -> None:
    world = LocalWorld(grid)
    builder = partial(VARIANTS[strategy], round_bytes=500)
    ranks = []
    for rank in grid.ranks:
        params = own_params(dim, grid.at(rank))
        ranks.append((params, Muon(grouped(params), **OPTIONS, strategy=builder, mesh=world.mesh(rank))))
    for step in range(1, STEPS + 1):
        for rank, (params, _) in enumerate(ranks):
            for index, (kind, param) in enumerate(zip(KINDS.values(), params, strict=True)):
                param.grad = own_part(whole(index, step), cut_of(kind, dim), grid.at(rank))
        world.run([muon.program() for _, muon in ranks])
    for dp in range(grid.size("dp")):
        row = [ranks[grid.rank({"dp": dp, "tp": tp})][0] for tp in range(grid.size("tp"))]
        joined = [
            torch.cat([params[index].detach() for params in row], cut_of(kind, dim).dim)
            for index, kind in enumerate(KINDS.values())
        ]
        assert different(joined) == []


class Zoo(nn.Module):
    """A module with one parameter of each kind, whose gradients are ``whole(index, step)``."""

    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList(whole(index, 0) for index in range(len(KINDS)))

    def forward(self, step: int) -> Tensor:
        products = [(param * whole(index, step)).sum() for index, param in enumerate(self.params)]
        return torch.stack(products).sum()


def fsdp2(dim: int) -> tuple[list[nn.Parameter], Callable[[int], None]]:
    """Parameters under ``fully_shard``, cut along ``dim`` if that divides evenly, and else along 0."""
    mesh, model = build_mesh({"fsdp": dist.get_world_size()}), Zoo()

    def placement(param: nn.Parameter) -> TorchShard:
        return TorchShard(dim if param.shape[dim] % mesh.size() == 0 else 0)

    fully_shard(model, mesh=mesh, shard_placement_fn=placement if dim else None)

    def backward(step: int) -> None:
        model.zero_grad()
        model(step).backward()

    return list(model.params), backward


def laid_out(lay: Callable[[int, Tensor], Tensor]) -> tuple[list[nn.Parameter], Callable[[int], None]]:
    """DTensors that ``lay`` makes of an index and a whole tensor, and a function to set their gradients."""
    params = [nn.Parameter(lay(index, whole(index, 0))) for index in range(len(KINDS))]

    def backward(step: int) -> None:
        for index, param in enumerate(params):
            param.grad = lay(index, whole(index, step))

    return params, backward


def tensor_parallel(dim: int) -> tuple[list[nn.Parameter], Callable[[int], None]]:
    mesh = build_mesh({"tp": dist.get_world_size()})
    return laid_out(lambda _, it: distribute_tensor(it, mesh, [TorchShard(min(dim, it.ndim - 1))]))


def fsdp2_over_tp(_: int) -> tuple[list[nn.Parameter], Callable[[int], None]]:
    """FSDP2 over TP, which cuts rows of one kind and columns of the next."""
    mesh = build_mesh({"fsdp": dist.get_world_size() // 2, "tp": 2})
    return laid_out(lambda index, it: over_fsdp(index, it, mesh))


def run_sharded(rank: int, makers: list[tuple[Callable, int]]) -> dict[str, tuple[list[str], int]]:
    """The differences, and the number of matrices this rank orthogonalized, with real DTensors."""
    found = {}
    for (make, dim), owners in product(makers, (True, False)):
        params, backward = make(dim)
        settings: dict[str, Any] = {"distributed_config": create_dtensor_config()}
        if owners:
            settings = {"strategy": "owner", "mesh": params[0].device_mesh}
        muon = Muon(grouped(params), **OPTIONS, **settings)
        with counted() as counter:
            for step in range(1, STEPS + 1):
                backward(step)
                muon.step()
        wholes = [full(param, param.detach()) for param in params]
        found[f"{make.__name__}, Shard({dim}), {owners=}"] = different(wholes), counter.call_count
    return found


ONE_AXIS = list(product((fsdp2, tensor_parallel), (0, 1)))
TWO_AXES = [(fsdp2_over_tp, 0)]


@pytest.mark.parametrize(  # an odd number of ranks makes uneven shards, which the equality table covers
    ("world_size", "makers"),
    [(2, ONE_AXIS), left_out(3, ONE_AXIS), (4, TWO_AXES), left_out(6, TWO_AXES)],
    ids=["2", "3", "2 x 2", "3 x 2"],
)
def test_sharded_modules_step_as_stock_muon_does(world_size: int, makers: list[tuple[Callable, int]]) -> None:
    by_rank = launch(run_sharded, world_size, args=(makers,))
    for case in by_rank[0]:
        assert [found[case][0] for found in by_rank] == [[]] * world_size, case
        assert sum(found[case][1] for found in by_rank) == STEPS * COUNT, case


# Plain parameters that are cut by hand over fsdp and tp at once, evenly or not.


@dataclass(frozen=True, slots=True)
class ByHand:
    """A matrix and its cut: rows (or columns) per tp position, then rows of that piece per fsdp position."""

    shape: tuple[int, int]
    tp_dim: int
    tp: tuple[int, ...]
    fsdp: tuple[tuple[int, ...], ...]

    def part(self, tensor: Tensor, at: dict[str, int]) -> Tensor:
        mine = tensor.split(list(self.tp), self.tp_dim)[at["tp"]]
        return mine.split(list(self.fsdp[at["tp"]]))[at["fsdp"]].clone()


CUT_BY_HAND = (
    ByHand((8, 6), 0, (4, 4), ((2, 2), (2, 2))),
    ByHand((9, 6), 0, (5, 4), ((3, 2), (2, 2))),  # as torch.chunk cuts
    ByHand((7, 9), 1, (5, 4), ((4, 3), (4, 3))),
    ByHand((6, 9), 1, (8, 1), ((1, 5), (1, 5))),  # torch.chunk would not cut like this
    ByHand((1, 5), 1, (3, 2), ((1, 0), (1, 0))),  # empty shards
    ByHand((3, 4), 0, (3, 0), ((2, 1), (0, 0))),
)
ORDERS = (("fsdp", "tp"), ("tp", "fsdp"))


def gradient_by_hand(index: int, step: int) -> Tensor:
    made = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(CUT_BY_HAND[index].shape, generator=made)


def run_by_hand(rank: int) -> dict[str, list[int]]:
    """The matrices that differ, for both orders of the axes and both helpers that take plain tensors."""
    dims = {index: case.tp_dim for index, case in enumerate(CUT_BY_HAND)}
    found = {}
    for order in ORDERS:
        mesh = build_mesh(dict.fromkeys(order, 2))
        at = {axis: mesh.get_local_rank(axis) for axis in order}
        groups: dict[str, Any] = {f"{axis}_pg": mesh.get_group(axis) for axis in order}
        by_groups = create_processgroup_config(**groups, tp_dim=dims)
        by_mesh = create_devicemesh_config(mesh, order, tp_dim=lambda index, param: dims[index])
        found[f"groups, {order}"] = differing(at, by_groups)
        found[f"mesh, {order}"] = differing(at, by_mesh)
    return found


def differing(at: dict[str, int], config: DistributedConfig) -> list[int]:
    wholes = [nn.Parameter(gradient_by_hand(index, 0)) for index in range(len(CUT_BY_HAND))]
    stock = torch.optim.Muon(wholes, **OPTIONS)
    pairs = list(zip(CUT_BY_HAND, wholes, strict=True))
    params = [nn.Parameter(case.part(one.detach(), at)) for case, one in pairs]
    muon = Muon(params, **OPTIONS, distributed_config=config)
    for step in range(1, STEPS + 1):
        if step == STEPS:  # the first parameter leaves, and the others keep their tp_dim
            for optimizer in (stock, muon):
                del optimizer.param_groups[0]["params"][0]
        for index, (param, (case, one)) in enumerate(zip(params, pairs, strict=True)):
            one.grad = gradient_by_hand(index, step)
            param.grad = case.part(one.grad, at)
        stock.step()
        muon.step()
    ends = [case.part(one.detach(), at) for case, one in pairs]
    return [i for i, (param, end) in enumerate(zip(params, ends, strict=True)) if not torch.equal(param, end)]


def test_plain_tensors_cut_by_hand_equal_the_single_process() -> None:
    for found in launch(run_by_hand, 4):
        assert {case: wrong for case, wrong in found.items() if wrong} == {}
