"""A checkpoint of one strategy and grid loads under any other, and training continues to the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from muon_tutorial import Grid, LiveWorld, Muon, MuonWithAdamW, Replicate, Shard, build_mesh, launch
from muon_tutorial.callbacks.create_configs import create_dtensor_config, create_processgroup_config
from muon_tutorial.checkpoint import load_checkpoint, save_checkpoint
from scripts.lab.faults.job import held, like

from ..oracle import UNEVEN, Case, own_params, whole_gradients, whole_matrices
from ..test_strategies import VARIANTS

HIDDEN = len(UNEVEN.shapes)
REST: Any = ((7, 3), (5,))  # for AdamW
CASE = replace(UNEVEN, steps=4, shapes=UNEVEN.shapes + REST, cuts=(*UNEVEN.cuts, Shard(0), Replicate()))
SAVED_AFTER = 2
STRATEGIES = {name: each for name, each in VARIANTS.items() if name not in ("owner, in turn", "throwaway")}
WAYS = (*STRATEGIES, "process groups", "FSDP2", "DTensor")
Sizes = tuple[int, int]
Pairs = Sequence[tuple[str, str]]
"""Sizes of dp and tp; and pairs of ways, one that saves and one that loads."""
GRIDS = ((1, 1), (4, 1), (1, 4), (3, 2), (2, 2))
"""The grids (dp, tp) on which checkpoints are loaded."""
DAILY = ((1, 4), (3, 2))
"""Grids on which a usual test run loads checkpoints saved on 2×2, half of ``WAYS`` on each.

The first has no dp and twice the tp; the second has uneven cuts.
"""


class Model(nn.Module):
    """The case's matrices for Muon, an embedding and a bias for AdamW, as one rank holds them."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self.matrices, self.rest = nn.ParameterList(params[:HIDDEN]), nn.ParameterList(params[HIDDEN:])
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def build(way: str, world: LiveWorld, case: Case, fresh: bool) -> tuple[Model, MuonWithAdamW]:
    """One rank's model and optimizer. With ``fresh``, they have other values, which a load must replace."""
    params: Sequence[Tensor] = own_params(case, world.at)
    if way in ("FSDP2", "DTensor"):
        wholes = zip(whole_matrices(case), case.cuts, strict=True)
        params = [_distributed(way, whole, cut, world) for whole, cut in wholes]
    model = Model(params)
    if fresh:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
    if way == "FSDP2":
        fully_shard(model, mesh=world.mesh["dp"])
    return model, _optimizer(way, model, world)


def _distributed(way: str, whole: Tensor, cut: Any, world: LiveWorld) -> Tensor:
    over_tp = TorchShard(cut.dim) if isinstance(cut, Shard) else TorchReplicate()
    if way == "FSDP2":
        return distribute_tensor(whole, world.mesh["tp"], [over_tp])
    return distribute_tensor(whole, world.mesh, [TorchShard(0), over_tp])


def _optimizer(way: str, model: Model, world: LiveWorld) -> MuonWithAdamW:
    matrices = [(f"matrices.{i}", param) for i, param in enumerate(model.matrices)]
    rest = [(f"rest.{i}", param) for i, param in enumerate(model.rest)]
    settings: dict[str, Any] = {"lr": 0.02}
    if way in STRATEGIES:
        settings |= {"strategy": partial(STRATEGIES[way], round_bytes=400), "mesh": world}
    elif way == "process groups":
        dp, tp = world.mesh.get_group("dp"), world.mesh.get_group("tp")
        settings["distributed_config"] = create_processgroup_config(dp_pg=dp, tp_pg=tp)
    else:
        settings["distributed_config"] = create_dtensor_config()
    return MuonWithAdamW(Muon(matrices, **settings), torch.optim.AdamW(rest, lr=0.01))


def train(model: Model, both: MuonWithAdamW, world: LiveWorld, case: Case, steps: slice) -> None:
    """Step with this rank's own part of the full gradients."""
    for grads in list(whole_gradients(case))[steps]:
        for param, grad, cut in zip(model.parameters(), grads, case.cuts, strict=True):
            param.grad = None if grad is None else like(param, held(param, grad, cut, world.at), grad)
        both.step()
        model.get_buffer("seen").add_(1)


def save_all(rank: int, root: str, sizes: Sizes, ways: Sequence[str], case: Case) -> None:
    world = LiveWorld(build_mesh(Grid.of(dp=sizes[0], tp=sizes[1])))
    for way in ways:
        model, both = build(way, world, case, fresh=False)
        train(model, both, world, case, slice(0, SAVED_AFTER))
        save_checkpoint(Path(root, way), model, both, extra={"step": SAVED_AFTER})


def load_all(rank: int, root: str, sizes: Sizes, pairs: Pairs, case: Case) -> int:
    """Load one way's checkpoint in another way, go on, and compare with the single process."""
    world = LiveWorld(build_mesh(Grid.of(dp=sizes[0], tp=sizes[1])))
    expected = single_process(case)
    for saved, way in pairs:
        model, both = build(way, world, case, fresh=True)
        assert load_checkpoint(Path(root, saved), model, both) == {"step": SAVED_AFTER}
        assert model.get_buffer("seen").tolist() == [SAVED_AFTER] * 3
        train(model, both, world, case, slice(SAVED_AFTER, case.steps))
        for index, (param, cut) in enumerate(zip(model.parameters(), case.cuts, strict=True)):
            mine = (param.to_local() if isinstance(param, DTensor) else param).detach()
            part, where = held(param, expected[index], cut, world.at), (saved, way, sizes, index)
            assert mine.numel() == part.numel(), where
            assert not mine.numel() or torch.equal(mine, part), where
    return len(pairs)


def single_process(case: Case) -> list[Tensor]:
    """The parameters after all steps in one process, without saving."""
    params = [nn.Parameter(whole) for whole in whole_matrices(case)]
    muon, adamw = torch.optim.Muon(params[:HIDDEN], lr=0.02), torch.optim.AdamW(params[HIDDEN:], lr=0.01)
    for grads in whole_gradients(case):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        muon.step()
        adamw.step()
    return [param.detach() for param in params]


def check_table(
    root: Path, pairs: Pairs, grids: Sequence[Sizes], case: Case = CASE, home: Sizes = (2, 2)
) -> int:
    """Save on the grid ``home`` and load every pair on every grid; returns the number of comparisons."""
    ways = sorted({saved for saved, _ in pairs})
    launch(save_all, home[0] * home[1], args=(str(root), home, ways, case), output="quiet")
    compared = 0
    for sizes in grids:
        given = str(root), sizes, pairs, case
        compared += launch(load_all, sizes[0] * sizes[1], args=given, output="quiet")[0]
    return compared


def test_every_way_is_saved_once_and_loaded_once_on_other_grids(tmp_path: Path) -> None:
    pairs = list(zip(WAYS, (*WAYS[4:], *WAYS[:4]), strict=True))
    for number, grid in enumerate(DAILY):
        its = pairs[number :: len(DAILY)]
        assert check_table(tmp_path / str(number), its, [grid]) == len(its)


@pytest.mark.exhaustive  # in ``test_format``, three ranks save uneven shards, and one rank loads
@pytest.mark.parametrize("home", [(3, 2), (1, 1), (1, 4)], ids=str)
def test_other_grids_can_be_the_first(tmp_path: Path, home: tuple[int, int]) -> None:
    pairs = [("zero1, all", "FSDP2"), ("FSDP2", "zero1, boundary")]
    pairs.append(("owner, longest first", "round_robin, all_reduce"))
    assert check_table(tmp_path, pairs, [(2, 2)], home=home) == len(pairs)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_loads_what_every_way_saved_on_every_grid(tmp_path: Path, dtype: torch.dtype) -> None:
    pairs = [(saved, way) for saved in WAYS for way in WAYS]
    cells = check_table(tmp_path, pairs, GRIDS, replace(CASE, dtype=dtype))
    assert cells == len(WAYS) ** 2 * len(GRIDS)
