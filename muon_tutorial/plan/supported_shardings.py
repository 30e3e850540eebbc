"""Decides which strategies support FSDP2 and other shardings, and which support only tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..errors import StrategyError
from .grid import Grid
from .matrix import Matrix

ANY_SHARDING = ("owner", "owner_per_replica")
"""The strategies whose matrices any axis may cut."""


def check_sharding(
    strategy: str, matrices: Sequence[Matrix], grid: Grid, expects: Literal["local", "averaged"]
) -> None:
    """Raise ``StrategyError`` if the strategy cannot step matrices that are cut in this way on this grid."""
    cut = [(matrix.name, axis) for matrix in matrices for axis in matrix.axes if axis != "tp"]
    if cut and strategy not in ANY_SHARDING:
        raise StrategyError(
            f"{cut[0][0]} is sharded along {cut[0][1]!r}: strategy {strategy!r} needs parameters that only "
            "'tp' cuts. Strategy \"owner\" supports FSDP2 and any other sharding"
        )
    others = [axis for axis in grid.axes if axis not in ("dp", "tp") and grid.size(axis) > 1]
    if others and expects == "local":
        raise StrategyError(
            f"strategy {strategy!r} averages gradients over 'dp' and gathers pieces over 'tp', but would not "
            f"average over {others[0]!r} of the grid {grid}. Name the mesh's axes 'dp' and 'tp'"
        )
