"""What ranks that step together must have alike, as texts: hyperparameters, dimensions, counts of calls.

``step/agreement.py`` compares them over ranks, and names what differs, and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..plan.grid import Grid
from .check_groups import plain_number

HYPERPARAMETERS = (
    *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    *("orthogonalize", "parts", "transposed", "betas", "amsgrad", "maximize"),
)
"""Those of Muon's groups, and of an AdamW's beside it, that all ranks must have alike."""

Groups = Sequence[Mapping[str, Any]]


def hyperparameters(groups: Groups) -> dict[str, str]:
    """Each hyperparameter, group by group."""
    return {key: ", ".join(str(plain_number(it.get(key))) for it in groups) for key in HYPERPARAMETERS}


def dimensions(groups: Groups) -> dict[str, str]:
    """How many parameters each group has, of how many dimensions.

    Not their shapes: what tensor parallelism cut unevenly has others on each rank.
    """
    found = [[param.ndim for param in group["params"]] for group in groups]
    return {"the parameters' dimensions, group by group,": str(found)}


def gradients_beside(rest: Iterable[Tensor], grid: Grid | None) -> dict[str, str]:
    """What is averaged beside the matrices, in order: shapes too, where nothing but dp divides ranks."""
    whole = grid is not None and all(grid.size(axis) == 1 for axis in grid.axes if axis != "dp")
    found = [(str(it.dtype), tuple(it.shape) if whole else it.ndim) for it in rest]
    return {"what is averaged beside the matrices": str(found)}


def moves_of_momentum(params: Iterable[Tensor], state: Mapping[Tensor, Any]) -> dict[str, str]:
    """How often the momentum of which this rank keeps a slice has moved: states say so."""
    counts = {entry["steps"] for param in params if "steps" in (entry := state.get(param, {}))}
    return {"the number of steps behind the momentum": ", ".join(map(str, sorted(counts)))}


_MADE: Counter[DeviceMesh] = Counter()


def count_on(mesh: DeviceMesh) -> int:
    """Which Muon of this mesh the one is that is being made: all its ranks make them in one order."""
    _MADE[mesh] += 1
    return _MADE[mesh]
