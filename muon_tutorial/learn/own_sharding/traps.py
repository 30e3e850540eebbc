"""Lesson 11: six traps, each as the few lines that somebody wrote, and what real ranks made of them.

It calls collectives as readers do, wrongly. Light to import: every rank does.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from ... import DistributedConfig, Muon, TutorialError, build_mesh, create_dtensor_config
from ...errors import RankFailedError
from ...launching.launch import launch
from ...newton_schulz import zeropower_via_newtonschulz
from ...worlds.live import gather_objects
from . import three_functions
from .on_ranks import LR, bad_rows, rows_at, whole_matrix
from .three_functions import State

SHORT = 2.0
SIDE = 24
STEPS = 3


@dataclass(frozen=True, slots=True)
class TrapReport:
    """One trap: the lines that somebody wrote, and what became of them."""

    source: str
    told: tuple[str, ...]


def gather_at_place_0(mine: Tensor, group: Any) -> None:
    """0 is a place in the group. ``dst`` wants a rank."""
    pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    is_owner = dist.get_rank(group) == 0
    dist.gather(mine, pieces if is_owner else None, dst=0, group=group)


def gather_uneven(mine: Tensor, lengths: list[int]) -> None:
    """Each piece as long as it is."""
    pieces = [mine.new_empty(length, mine.shape[1]) for length in lengths]
    dist.gather(mine, pieces if dist.get_rank() == 0 else None, dst=0)


def gather_gradient(momentum_buffer: Tensor, dst_rank: int, state: State) -> Tensor | None:
    """Muon orthogonalizes gradients, so that is what we gather?"""
    gradient = state["params"][state["param_idx"]].grad.bfloat16()
    return three_functions.gather(gradient, dst_rank, state)


def run_traps(dp: int, tp: int, seed: int, backend: str = "gloo") -> dict[str, TrapReport]:
    """All traps, by name."""
    found = launch(_spring_all, dp * tp, args=(dp, tp, seed), backend=backend, output="quiet")
    return {
        "global rank": TrapReport(_source(gather_at_place_0), _by_rank([mine["place"] for mine in found])),
        "uneven": _spring_uneven(dp * tp, seed, backend),
        "partial": TrapReport("", tuple(found[0]["partial"])),
        "gradient": TrapReport(_source(gather_gradient), tuple(found[0]["gradient"])),
        "several in one": TrapReport("", tuple(found[0]["several"])),
    }


def say_trap(traps: dict[str, TrapReport], name: str) -> str:
    """A trap's lines, and below them what became of them."""
    trap = traps[name]
    return "\n".join(([trap.source] if trap.source else []) + list(trap.told))


def _source(function: Callable) -> str:
    """The function without its docstring, and a blank line."""
    lines = inspect.getsource(function).splitlines()
    return "\n".join([lines[0], *lines[2:], ""])


def _by_rank(told: list[str]) -> tuple[str, ...]:
    """What each rank says; ranks that say the same share a line."""
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(told):
        ranks.setdefault(said, []).append(rank)
    return tuple(
        textwrap.fill(f"rank {', '.join(map(str, those))}: {said}", 98, subsequent_indent="    ")
        for said, those in ranks.items()
    )


def _said_of(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "went through"


def _spring_uneven(ranks: int, seed: int, backend: str) -> TrapReport:
    """This one breaks the ranks' connections, so it has a launch of its own, and little patience."""
    try:
        told = launch(_uneven, ranks, args=(seed,), backend=backend, output="quiet", timeout=SHORT)
    except RankFailedError as error:
        told = [str(error).splitlines()[0]]
    return TrapReport(_source(gather_uneven), _by_rank(told))


def _uneven(rank: int, seed: int) -> str:
    ranks = dist.get_world_size()
    rows = bad_rows(ranks)
    mine = rows_at(whole_matrix((rows, 6), seed), rank, ranks)
    return _said_of(lambda: gather_uneven(mine, three_functions.rows_of(rows, ranks)))


def _spring_all(rank: int, dp: int, tp: int, seed: int) -> dict[str, Any]:
    group = build_mesh({"dp": dp, "tp": tp}).get_group("dp")
    place = _said_of(lambda: gather_at_place_0(torch.ones(2, 3), group))
    flat = build_mesh({"dp": dp * tp})
    return {
        "place": place,
        "partial": _partial(rank, seed, flat),
        "gradient": _gradient(rank, seed),
        "several": _several(seed, flat),
    }


def distance(update: Tensor, right: Tensor) -> float:
    """How far an update is off: the size of the difference over the size of what is right."""
    return float((update.float() - right.float()).norm() / right.float().norm())


def _partial(rank: int, seed: int, mesh: DeviceMesh) -> list[str]:
    mine = whole_matrix((SIDE, SIDE), seed, rank)
    mean = torch.stack(gather_objects(mine)).mean(0)
    off = distance(zeropower_via_newtonschulz(mine), zeropower_via_newtonschulz(mean))
    said = [f"this rank's own sum, orthogonalized: {off:.2f} away from the right update"]
    param = torch.nn.Parameter(DTensor.from_local(mine, mesh, [Partial()], run_check=False))
    try:
        Muon([param], lr=LR, distributed_config=create_dtensor_config())
    except TutorialError as error:
        said.append(
            textwrap.fill(f"the package: {type(error).__name__}: {error}", 98, subsequent_indent="    ")
        )
    return said


def _gradient(rank: int, seed: int) -> list[str]:
    """The updates of some steps with the trap, beside those of a process alone."""
    ranks, shape = dist.get_world_size(), (SIDE, SIDE)
    param = torch.nn.Parameter(rows_at(torch.zeros(shape), rank, ranks))
    whole = torch.nn.Parameter(torch.zeros(shape))
    state = {"group": dist.group.WORLD, "shapes": [shape], "params": [param]}
    functions = three_functions.assign, gather_gradient, three_functions.redistribute
    options: dict[str, Any] = {"lr": LR, "weight_decay": 0.0}
    muon = Muon([param], **options, distributed_config=DistributedConfig(*functions, state))
    alone, said = Muon([whole], **options), []
    for step in range(STEPS):
        before = param.detach().clone(), whole.detach().clone()
        whole.grad = whole_matrix(shape, seed, 1 + step)
        param.grad = rows_at(whole.grad, rank, ranks)
        muon.step()
        alone.step()
        mine = torch.cat(gather_objects(param.detach() - before[0]))
        off = distance(mine, whole.detach() - before[1])
        said.append(f"step {step + 1}: the update is {off:.2f} away from the right one")
    return said


def _several(seed: int, mesh: DeviceMesh) -> list[str]:
    """Weights that hold several matrices: as one, and part by part."""
    said = []
    rows: list[tuple[str, tuple[int, ...], Any, str]] = [
        ("fused QKV", (3 * SIDE, SIDE), (SIDE,) * 3, f"parts=({SIDE}, {SIDE}, {SIDE})"),
        ("a stack of experts", (mesh.size(), SIDE, SIDE), "stack", 'parts="stack"'),
    ]
    for name, shape, parts, words in rows:
        grad = whole_matrix((shape[0], SIDE * SIDE if len(shape) > 2 else SIDE), seed).view(shape)
        pieces = grad.split(SIDE) if len(shape) == 2 else grad.unbind()
        right = torch.cat([zeropower_via_newtonschulz(piece) for piece in pieces])
        as_one = zeropower_via_newtonschulz(grad.flatten(1) if len(shape) > 2 else grad)
        off = distance(as_one.reshape(-1, SIDE), right)
        same = _same_with_parts(grad, parts, mesh)
        said.append(f"{name:<20} as one matrix: {off:.2f} away.   Muon(…, {words}): {same}")
    return said


def _same_with_parts(grad: Tensor, parts: Any, mesh: DeviceMesh) -> str:
    """Whether a sharded step, part by part, has the single process' bits."""
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
