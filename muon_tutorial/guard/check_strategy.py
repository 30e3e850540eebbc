"""Checks that a strategy fits parameters and recipes; ``plan/supported_shardings.py`` checks shardings."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import StrategyError
from ..parameters.describe_matrices import all_named
from ..plan.strategies import Plan
from ..step.parameter_state import local_part
from .current_steps import Groups


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
