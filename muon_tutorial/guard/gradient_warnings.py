"""Warns if gradients are missing, or if another optimizer's gradients are not averaged."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import UsageError
from ..parameters.describe_matrices import FLATTENED
from ..step.agreement import checksum
from ..step.parameter_state import local_part
from ..worlds.live import LiveWorld, gather_objects
from .compare_replicas import is_dense


def warn_of_no_gradients(params: Sequence[Tensor], beside: Sequence[Tensor], is_first: bool) -> None:
    """Warn if a step would do nothing, perhaps because the model's parameters were replaced.

    A later step than the first may do nothing on purpose. There, this warns only if DTensors of the same
    shapes have gradients and are in no optimizer.

    Raises:
        UsageError: the gradients belong to flat parameters of FSDP1.
    """
    trained = [param for param in params if param.requires_grad] or [*params, *beside]
    if trained and not any(param.grad is not None for param in trained):
        if not is_first:
            gc.collect()  # models that were deleted should not count
        shapes, things = {param.shape for param in trained}, gc.get_objects()
        if not is_first and not shapes <= {it.shape for it in _unstepped_shards(things)}:
            return
        flat = [it for it in things if type(it) is torch.nn.Parameter and it.grad is not None]
        if shapes <= {it for one in flat for it in getattr(one, "_shapes", ())}:
            raise UsageError(
                f"a flat parameter has the gradients, and this Muon's parameters have none: {FLATTENED}"
            )
        warnings.warn(
            "no parameter of this Muon has a gradient: if the model was wrapped, sharded or loaded after "
            "the optimizer was made, make the optimizer afterwards, over the model's current parameters",
            stacklevel=4,
        )


def warn_of_others_gradients(params: Sequence[Tensor], world: LiveWorld) -> None:
    """Warn if an optimizer beside this Muon has gradients that nothing has averaged over dp.

    Nothing in a parameter names its optimizers, so this searches all live objects once. DTensors that dp may
    cut are left out. All ranks must call it.
    """
    from .guard import Guard, without

    things, dp = gc.get_objects(), world.mesh.mesh.flatten()[list(world.at.group("dp"))]
    guards = [it for it in things if issubclass(type(it), Guard)]
    own = [*params, *(param for it in guards for param in (*it.used.params, *it.companions_params()))]
    total = 0
    for param in without(own, _params_of_optimizers(things)):
        cut = isinstance(param, DTensor) and torch.isin(dp, param.device_mesh.mesh).sum() > 1
        grad = param.grad
        known = grad is not None and type(grad) in (Tensor, DTensor) and not grad.is_meta
        if grad is not None and known and is_dense(grad) and not cut:
            total += int(checksum(local_part(grad)))
    if len({*gather_objects(total, world.group(("dp",)))}) > 1:
        warnings.warn(
            "another optimizer's gradients are not the same on all ranks along dp, and this Muon averages "
            "only its own. Put both optimizers into one MuonWithAdamW(muon, adamw), or call "
            "muon.ready_gradients(rest=…) before each step. If you average them after muon.step(), or each "
            "rank has parameters of its own, ignore this",
            stacklevel=4,
        )


def _params_of_optimizers(things: Sequence[Any]) -> list[Tensor]:
    optimizers = [it for it in things if issubclass(type(it), torch.optim.Optimizer)]
    groups = [group for it in optimizers for group in getattr(it, "param_groups", ())]
    return [param for group in groups for param in group["params"]]


def _unstepped_shards(things: Sequence[Any]) -> list[DTensor]:
    """Return the DTensors that have a gradient and are in no optimizer."""
    known = {id(param) for param in _params_of_optimizers(things)}
    shards = [it for it in things if issubclass(type(it), DTensor) and id(it) not in known]
    return [it for it in shards if it.is_leaf and it.grad is not None]
