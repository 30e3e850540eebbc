"""Checks what a user's ``assign_fn``, ``gather_fn`` and ``redistribute_fn`` return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, TutorialError
from ..plan.strategies import WIRE
from ..step.parameter_state import ParameterState, local_part
from ..worlds.live import global_rank
from .config import DistributedConfig


def checked_assignments(config: DistributedConfig, params: list[Tensor]) -> dict[int, int]:
    """Call ``assign_fn``, and check that it assigns every parameter to a rank that shares it.

    Raises:
        ConfigError: an entry is wrong, or ``assign_fn`` raised an error.
    """
    try:
        answer = config.assign_fn(params, config.state)
    except TutorialError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise ConfigError(f"assign_fn raised {kind} on rank {global_rank()}: {error}") from error
    if not isinstance(answer, Mapping):
        raise ConfigError(f"assign_fn must return a dict from parameter index to rank, got {answer!r}")
    missing = [index for index in range(len(params)) if index not in answer]
    strange = [index for index in answer if index not in range(len(params))]
    if missing or strange:
        raise ConfigError(
            f"assign_fn must return an entry for each of {len(params)} parameters; "
            f"missing: {missing or 'none'}, unknown: {strange or 'none'}"
        )
    group = config.state.get("agree_group")
    ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
    for index, rank in answer.items():
        if not isinstance(rank, int) or rank not in ranks:
            raise ConfigError(f"assign_fn gives parameter {index} to rank {rank!r}; its ranks are {ranks}")
    return {index: answer[index] for index in range(len(params))}


BARE_WORK = (
    "a bare Work, whose wait() returns no tensor: return the tensor after waiting, or a handle whose wait() "
    "returns it"
)
"""Replaces a ``dist.Work`` that a user's function returned, and names it in complaints."""


def complaint_about_full(answer: Any, where: str, owner: int, state: ParameterState) -> str:
    """Say what is wrong with an answer of ``gather_fn``, beginning with ``where``; empty if it is right."""
    if global_rank() != owner:
        complaint = f"{where} must return None on every rank except {owner}, got {_kind(answer)}"
        return "" if answer is None else complaint
    if not isinstance(answer, Tensor) or isinstance(answer, DTensor):
        return f"{where} must return the full plain tensor on its owner, got {_kind(answer)}"
    if answer.dtype != WIRE:
        return f"{where} must return the matrix in {WIRE}, as state['wire_dtype'] says, got {answer.dtype}"
    param, due = state.param, tuple(state.data.shape)
    if isinstance(param, DTensor) and answer.shape != param.shape:
        return f"{where} must return shape {tuple(param.shape)}, got {tuple(answer.shape)}"
    if answer.ndim != len(due) or any(mine > all_ for mine, all_ in zip(due, answer.shape, strict=True)):
        return f"{where} returned shape {tuple(answer.shape)}, which cannot hold this rank's part, {due}"
    return ""


def complaint_about_part(answer: Any, where: str, state: ParameterState) -> str:
    """Say what is wrong with an answer of ``redistribute_fn``; empty if it is right."""
    due = f"must return this rank's part of the update, shape {tuple(state.data.shape)}"
    if not isinstance(answer, Tensor):
        return f"{where} {due}; got {_kind(answer)}"
    if isinstance(answer, DTensor):
        own, placed = state.param, (answer.device_mesh, answer.placements)
        if not isinstance(own, DTensor) or (own.device_mesh, own.placements) != placed:
            return f"{where} {due}; got a DTensor with placements {answer.placements}"
    part = local_part(answer)
    if part.dtype != WIRE:
        return f"{where} {due}, in {WIRE}, as state['wire_dtype'] says; got {part.dtype}"
    fits = part.shape == state.data.shape or not (part.numel() or state.data.numel())
    return "" if fits else f"{where} {due}; got shape {tuple(part.shape)}"


def _kind(answer: Any) -> str:
    if answer is None or answer is BARE_WORK:
        return str(answer)
    return f"a {type(answer).__name__}"
