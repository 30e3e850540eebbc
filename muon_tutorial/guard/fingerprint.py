"""What ranks that step together must have alike, as texts: hyperparameters, dimensions, counts of calls.

``step/agreement.py`` compares them over ranks, and names what differs, and where. A new check is a function
here with a line in ``facts``; it costs no message more, since all texts travel as one hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..plan.grid import Grid
from .check_groups import plain_number

HYPERPARAMETERS = (
    *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    *("orthogonalize", "parts", "transposed", "betas", "amsgrad", "maximize", "decoupled_weight_decay"),
)
"""Those of Muon's groups, and of an AdamW's beside it, that all ranks must have alike."""

Groups = Sequence[Mapping[str, Any]]
States = Sequence[Mapping[str, Any]]


def facts(groups: Groups, states: States, beside: Iterable[Tensor], grid: Grid | None) -> dict[str, str]:
    """What ranks compare of groups, of the matrices' states, and of gradients that are averaged beside."""
    return {
        **hyperparameters(groups),
        **dimensions(groups, grid),
        "what is averaged beside the matrices": str([_looks(it, it.dtype, grid) for it in beside]),
        **momentum_dtypes(states),
    }


def hyperparameters(groups: Groups) -> dict[str, str]:
    """Each hyperparameter, group by group."""
    return {key: ", ".join([str(plain_number(it.get(key))) for it in groups]) for key in HYPERPARAMETERS}


def dimensions(groups: Groups, grid: Grid | None) -> dict[str, str]:
    """How many parameters each group has, and of which shapes, as far as ranks must have them alike."""
    found = [sorted(_looks(param, None, grid) for param in group["params"]) for group in groups]
    return {"the parameters' dimensions, group by group,": str(found)}


def momentum_dtypes(states: States) -> dict[str, str]:
    """Of which dtypes the momentum is: loaded or set by itself, one rank's could round otherwise."""
    found = {str(it["momentum_buffer"].dtype) for it in states if it.get("momentum_buffer") is not None}
    return {"the momentum's dtypes": ", ".join(sorted(found))}


def _looks(param: Tensor, dtype: torch.dtype | None, grid: Grid | None) -> str:
    """A parameter's shape where all ranks have it alike: a DTensor's is the whole one's, and a plain
    parameter's is a piece's unless nothing but dp divides ranks. Else how many dimensions it has."""
    whole = grid is not None and all(grid.size(axis) == 1 for axis in grid.axes if axis != "dp")
    shape = tuple(param.shape) if whole or isinstance(param, DTensor) else param.ndim
    return f"{shape}" if dtype is None else f"{dtype} {shape}"


_MADE: Counter[DeviceMesh] = Counter()


def count_on(mesh: DeviceMesh) -> int:
    """Which Muon of this mesh the one is that is being made: all its ranks make them in one order."""
    _MADE[mesh] += 1
    return _MADE[mesh]
