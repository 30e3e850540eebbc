"""Texts that must be the same on ranks that step together: hyperparameters, dimensions, counts of calls.

``step/agreement.py`` compares them across ranks, and says what differs on which rank. To compare another
value in the groups, add its key to ``HYPERPARAMETERS``. To compare another text, add a line to
``compared_texts`` if the text never changes, or changes only with the groups or the state; otherwise add a
line to ``Guard.fingerprint``, which runs in every step. Ranks send one hash of all texts, so an error shows
only its own rank's text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..plan.grid import Grid
from .check_hyperparameters import plain_number

HYPERPARAMETERS = (
    *("lr", "initial_lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps"),
    *("adjust_lr_fn", "orthogonalize", "parts", "transposed", "betas", "amsgrad", "maximize"),
    "decoupled_weight_decay",
)
"""Hyperparameters of Muon and its AdamW that must be the same on all ranks."""

Groups = Sequence[Mapping[str, Any]]
States = Sequence[Mapping[str, Any]]


def compared_texts(
    groups: Groups, states: States, beside: Iterable[Tensor], grid: Grid | None
) -> dict[str, str]:
    """Describe the groups, the momenta, and the other gradients that are averaged, for ranks to compare."""
    # A rank with momentum of another dtype would round differently.
    dtypes = [str(getattr(it.get("momentum_buffer"), "dtype", "none")) for it in states]
    return {
        **{key: ", ".join([str(plain_number(it.get(key))) for it in groups]) for key in HYPERPARAMETERS},
        **dimensions(groups, grid),
        "the list of other averaged gradients": str([_looks(it, it.dtype, grid) for it in beside]),
        "the momentum's dtypes": ", ".join(f"{len([*its])} × {dtype}" for dtype, its in groupby(dtypes)),
    }


def dimensions(groups: Groups, grid: Grid | None) -> dict[str, str]:
    """Describe the number and shapes of each group's parameters, if they must be the same on all ranks."""
    found = [sorted(_looks(param, None, grid) for param in group["params"]) for group in groups]
    return {"the parameters' dimensions, group by group,": str(found)}


def _looks(param: Tensor, dtype: torch.dtype | None, grid: Grid | None) -> str:
    """Write a tensor's shape or, if ranks may hold different pieces of it, only its number of dimensions."""
    whole = grid is not None and all(grid.size(axis) == 1 for axis in grid.axes if axis != "dp")
    shape = tuple(param.shape) if whole or isinstance(param, DTensor) else param.ndim
    return f"{shape}" if dtype is None else f"{dtype} {shape}"


_MADE: Counter[DeviceMesh] = Counter()


def count_on(mesh: DeviceMesh) -> int:
    """Count a new Muon on this mesh and return its number. All ranks must make Muons in the same order."""
    _MADE[mesh] += 1
    return _MADE[mesh]
