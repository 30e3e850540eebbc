"""Checks that a strategy fits parameters and recipes; ``plan/supported_shardings.py`` checks shardings."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import StrategyError
from ..parameters.describe_matrices import all_named
from ..plan.matrix import Matrix
from ..plan.strategies import Plan
from ..step.parameter_state import local_part
from ..worlds.live import LiveWorld
from .current_steps import Groups

if TYPE_CHECKING:
    from ..worlds.local import LocalMesh


def check_all_once(plan: Plan, matrices: Sequence[Matrix]) -> None:
    """Refuse a user's plan that leaves out a matrix, repeats one, or does not number its buckets 0, 1, …."""
    times = Counter(entry.matrix.index for bucket in plan.buckets for entry in bucket.entries)
    wrong = ", ".join(f"{it.name} is in {times[it.index]}" for it in matrices if times[it.index] != 1)
    if wrong or any(bucket.index != number for number, bucket in enumerate(plan.buckets)):
        raise StrategyError(
            f"the plan of strategy {plan.strategy!r} must number its buckets 0, 1, …, and have each matrix "
            f"in one of them{wrong and f': {wrong}'}"
        )


def check_no_tp_left_out(world: LiveWorld | LocalMesh, groups: Groups) -> None:
    """Refuse parameters with a ``partition_dim`` for tp, if the mesh leaves out its root's tp."""
    find_root = getattr(world.mesh, "_get_root_mesh", None) if isinstance(world, LiveWorld) else None
    root = find_root() if find_root else None  # torch's private name, which may go
    sizes = dict(zip(root.mesh_dim_names or (), root.shape, strict=False)) if root else {}
    for name, param, _ in all_named(groups) if sizes.get("tp", 1) > world.grid.size("tp") else ():
        dim = getattr(param, "partition_dim", None)
        if dim in range(param.ndim) and not isinstance(param, DTensor):
            raise StrategyError(
                f"{name} has partition_dim={dim}, but the optimizer's mesh ({world.grid}) leaves out the tp "
                "of the mesh that it is a part of: pass both axes, or set partition_dim to -1"
            )


def check_own_memory(strategy: str, groups: Groups) -> None:
    """Refuse parameters that share memory, such as a transposed view: one update would be lost."""
    first: dict[int, str] = {}
    for name, param, _ in all_named(groups):
        local = local_part(param.detach())
        other = first.setdefault(local.data_ptr(), name) if local.numel() and not local.is_meta else name
        if other != name:
            raise StrategyError(
                f"{name} and {other} share memory, so strategy {strategy!r} would lose one of the two "
                "updates: give each its own memory, or make them one parameter"
            )


def check_no_ddp(strategy: str, groups: Groups) -> None:
    """Refuse parameters of a DistributedDataParallel module for a plan that averages gradients itself.

    Nothing in a parameter shows that DDP wraps it. So once per plan this function searches all live Python
    objects for DDP modules. It compares types, because ``isinstance`` would take 0.2 s.
    """
    if not dist.is_initialized():
        return
    kinds = _subclasses(DistributedDataParallel)
    modules = [thing for thing in gc.get_objects() if type(thing) in kinds]
    wrapped = {id(param) for module in modules for param in module.parameters()}
    for name, param, _ in all_named(groups):
        if id(param) in wrapped:
            raise StrategyError(
                f"{name} belongs to a DistributedDataParallel module, which averages its gradient; "
                f"strategy {strategy!r} would average it again: leave DDP out, or take 'round_robin'"
            )


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, type.__subclasses__(kind)))


def check_gram_recipes(plan: Plan, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``UsageError`` if a matrix stays cut, but its group's recipe has no Gram form."""
    if plan.strategy == "gram":
        from ..orthogonalizers.gram import gram_recipe

        entries = (entry for bucket in plan.buckets for entry in bucket.entries)
        for number in {entry.matrix.group for entry in entries if entry.gram is not None}:
            gram_recipe(groups[number])
