"""Lesson 11: traps, a few lines of code each, tried on real ranks. Every rank imports this."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from ... import DistributedConfig, Muon, TutorialError, build_mesh, create_dtensor_config
from ...errors import RankFailedError
from ...launching.echo import in_one_line
from ...launching.launch import launch
from ...newton_schulz import zeropower_via_newtonschulz
from ...worlds.live import gather_objects
from . import three_functions
from .on_ranks import LR, bad_rows, rows_at, whole_matrix
from .three_functions import State

SHORT = 2.0
SIDE = 24
STEPS = 3


def try_on_groups(function: Callable[[Tensor, Any], object], dp: int, tp: int, backend: str = "gloo") -> str:
    """Run ``function(shard, group)`` on every rank, in the groups along dp, and say what happened."""
    return _by_rank(launch(_on_group, dp * tp, args=(function, dp, tp), backend=backend, output="quiet"))


def try_uneven(
    function: Callable[[Tensor, list[int]], object], ranks: int, seed: int, backend: str = "gloo"
) -> str:
    """Run ``function(shard, rows of each rank)`` over all ranks with a short timeout; say what happened."""
    try:
        told = launch(_uneven, ranks, args=(function, seed), backend=backend, output="quiet", timeout=SHORT)
    except RankFailedError as error:
        told = [str(error).splitlines()[0]]
    return _by_rank(told)


def try_for_steps(
    gather_fn: Callable[[Tensor, int, State], Any], ranks: int, seed: int, backend: str = "gloo"
) -> str:
    """How far the updates with this ``gather_fn``, whose state has the parameters, are from one process's."""
    off = launch(_steps_off, ranks, args=(gather_fn, seed), backend=backend, output="quiet")[0]
    return "\n".join(f"step {step}: {far:.2f} away from the right update" for step, far in enumerate(off, 1))


def try_partial(ranks: int, seed: int, backend: str = "gloo") -> str:
    """Orthogonalize a rank's own sum, and say what the package reports for a ``Partial`` parameter."""
    return "\n".join(launch(_partial, ranks, args=(seed,), backend=backend, output="quiet")[0])


def try_several(ranks: int, seed: int, backend: str = "gloo") -> str:
    """Step weights that hold several matrices: as one matrix, and part by part."""
    return "\n".join(launch(_several, ranks, args=(seed,), backend=backend, output="quiet")[0])


def _by_rank(told: Sequence[str]) -> str:
    """What each rank says; ranks that say the same share a line."""
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(told):
        ranks.setdefault(said, []).append(rank)
    lines = (f"rank {', '.join(map(str, those))}: {said}" for said, those in ranks.items())
    return "\n".join(textwrap.fill(line, 98, subsequent_indent="    ") for line in lines)


def _said_of(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return re.sub(r"\s*<[^>]* object at [^>]*>", "", f"{type(error).__name__}: {in_one_line(str(error))}")
    return "went through"


def _on_group(rank: int, function: Callable, dp: int, tp: int) -> str:
    group = build_mesh({"dp": dp, "tp": tp}).get_group("dp")
    return _said_of(lambda: function(torch.ones(2, 3), group))


def _uneven(rank: int, function: Callable, seed: int) -> str:
    ranks = dist.get_world_size()
    rows = bad_rows(ranks)
    mine = rows_at(whole_matrix((rows, 6), seed), rank, ranks)
    return _said_of(lambda: function(mine, three_functions.rows_of(rows, ranks)))


def distance(update: Tensor, right: Tensor) -> float:
    """The relative error of an update: the norm of the difference over the norm of the right update."""
    return float((update.float() - right.float()).norm() / right.float().norm())


def _partial(rank: int, seed: int) -> list[str]:
    mesh = build_mesh({"dp": dist.get_world_size()})
    mine = whole_matrix((SIDE, SIDE), seed, rank)
    mean = torch.stack(gather_objects(mine)).mean(0)
    off = distance(zeropower_via_newtonschulz(mine), zeropower_via_newtonschulz(mean))
    said = f"one rank's own sum, orthogonalized: {off:.2f} away from the right update"
    param = torch.nn.Parameter(DTensor.from_local(mine, mesh, [Partial()], run_check=False))
    try:
        Muon([param], lr=LR, distributed_config=create_dtensor_config())
    except TutorialError as error:
        return [said, f"the package says: {type(error).__name__}: {error}"]
    return [said, "the package says nothing"]


def _steps_off(rank: int, gather_fn: Callable, seed: int) -> list[float]:
    """The relative error of each step's update."""
    ranks, shape = dist.get_world_size(), (SIDE, SIDE)
    param = torch.nn.Parameter(rows_at(torch.zeros(shape), rank, ranks))
    whole = torch.nn.Parameter(torch.zeros(shape))
    state = {"group": dist.group.WORLD, "shapes": [shape], "params": [param]}
    config = DistributedConfig(three_functions.assign, gather_fn, three_functions.redistribute, state)
    options: dict[str, Any] = {"lr": LR, "weight_decay": 0.0}
    muon, alone, off = Muon([param], **options, distributed_config=config), Muon([whole], **options), []
    for step in range(STEPS):
        before = param.detach().clone(), whole.detach().clone()
        whole.grad = whole_matrix(shape, seed, 1 + step)
        param.grad = rows_at(whole.grad, rank, ranks)
        muon.step()
        alone.step()
        mine = torch.cat(gather_objects(param.detach() - before[0]))
        off.append(distance(mine, whole.detach() - before[1]))
    return off


def _several(rank: int, seed: int) -> list[str]:
    mesh, said = build_mesh({"dp": dist.get_world_size()}), []
    qkv = whole_matrix((3 * SIDE, SIDE), seed)
    experts = whole_matrix((dist.get_world_size(), SIDE * SIDE), seed).view(-1, SIDE, SIDE)
    rows: list[tuple[str, Tensor, Any]] = [
        ("fused QKV", qkv, (SIDE,) * 3),
        ("a stack of experts", experts, "stack"),
    ]
    for name, grad, parts in rows:
        pieces = grad.reshape(-1, SIDE).split(SIDE)
        right = torch.cat([zeropower_via_newtonschulz(piece) for piece in pieces])
        as_one = zeropower_via_newtonschulz(grad.flatten(1)).reshape(-1, SIDE)
        same = _same_with_parts(grad, parts, mesh)
        said.append(f"{name}, as one matrix: {distance(as_one, right):.2f} away from the right update")
        said.append(f"    with Muon(…, parts={parts!r}), cut over all ranks: {same}")
    return said


def _same_with_parts(grad: Tensor, parts: Any, mesh: DeviceMesh) -> str:
    """Whether a sharded step, part by part, has the bits of a single process's."""
    position, ranks = mesh.get_local_rank(), mesh.size()

    def held(tensor: Tensor) -> DTensor:
        mine = rows_at(tensor, position, ranks)
        return DTensor.from_local(
            mine, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    whole, param = (
        torch.nn.Parameter(torch.zeros_like(grad)),
        torch.nn.Parameter(held(torch.zeros_like(grad))),
    )
    whole.grad, param.grad = grad, held(grad)
    Muon([whole], lr=LR, parts=parts).step()
    Muon([param], lr=LR, parts=parts, distributed_config=create_dtensor_config()).step()
    mine = rows_at(whole.detach(), position, ranks)
    same = torch.equal(param.detach().to_local(), mine)  # type: ignore[attr-defined]
    return "the single process' bits" if same else "other bits"
