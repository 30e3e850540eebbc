"""Ranks arranged in named axes. This is arithmetic on ranks, without process groups or devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..errors import GridError


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks in named axes, in row-major order: the last axis varies fastest, as in a ``DeviceMesh``.

    >>> grid = Grid(("dp", "tp"), (2, 2))
    >>> [dict(grid.at(rank)) for rank in grid.ranks]
    [{'dp': 0, 'tp': 0}, {'dp': 0, 'tp': 1}, {'dp': 1, 'tp': 0}, {'dp': 1, 'tp': 1}]
    >>> grid.at(1).group("dp"), grid.at(1).group("tp")
    ((1, 3), (0, 1))
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise GridError(
                f"a grid needs axes with different names, and one size for each axis; "
                f"got axes {self.axes} and sizes {self.sizes}"
            )
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if not isinstance(size, int) or size < 1:
                raise GridError(f"axis {axis!r} needs a whole number of ranks, at least 1; got {size!r}")

    @classmethod
    def of(cls, **sizes: int) -> Grid:
        """Make a grid with these axes, in this order: ``Grid.of(dp=2, tp=2)``."""
        return cls(tuple(sizes), tuple(sizes.values()))

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``: 1 for an axis that the grid does not have."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def stride(self, axis: str) -> int:
        """Return the difference between the ranks of two neighbours along ``axis``."""
        return math.prod(self.sizes[self.axes.index(axis) + 1 :])

    def at(self, rank: int) -> Coordinate:
        if rank not in self.ranks:
            raise GridError(f"rank {rank} is not on a grid of {self.world_size} ranks ({self})")
        return Coordinate(self, rank)

    def rank(self, positions: Mapping[str, int]) -> int:
        """Return the rank at ``positions``; the position along missing axes is 0."""
        for axis, position in positions.items():
            if not 0 <= position < self.size(axis):
                raise GridError(
                    f"axis {axis!r} has {self.size(axis)} positions on the grid {self}; got {position}"
                )
        rank = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank = rank * size + positions.get(axis, 0)
        return rank

    def __str__(self) -> str:
        sizes = zip(self.axes, self.sizes, strict=True)
        return " × ".join(f"{axis}={size}" for axis, size in sizes) or "1 rank"


@dataclass(frozen=True, slots=True)
class Coordinate(Mapping[str, int]):
    """One rank's coordinate on a grid, readable as a mapping from axis to position."""

    grid: Grid
    rank: int

    def __getitem__(self, axis: str) -> int:
        """Return the position along ``axis``: 0 for an axis that the grid does not have."""
        stride, size = _strides(self.grid.axes, self.grid.sizes).get(axis, (1, 1))
        return self.rank // stride % size

    def __contains__(self, axis: object) -> bool:
        return axis in self.grid.axes

    def __iter__(self) -> Iterator[str]:
        return iter(self.grid.axes)

    def __len__(self) -> int:
        return len(self.grid.axes)

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group over ``axes``."""
        sizes = zip(self.grid.axes, self.grid.sizes, strict=True)
        return math.prod(size for axis, size in sizes if axis in axes)

    def position(self, *axes: str) -> int:
        """Return this rank's position in its group over ``axes``."""
        place = 0
        for axis in axes:
            place = place * self.grid.size(axis) + self[axis]
        return place

    def group(self, *axes: str) -> tuple[int, ...]:
        """Return this rank and those that differ from it only along ``axes``, in order of position."""
        ranks = [self.rank]  # extended axis by axis, because a group may have thousands of ranks
        for axis in axes:
            if axis in self.grid.axes:
                stride = self.grid.stride(axis)
                first, last = -self[axis] * stride, (self.grid.size(axis) - self[axis]) * stride
                ranks = [rank + step for rank in ranks for step in range(first, last, stride)]
        return tuple(ranks)

    def peer(self, position: int, *axes: str) -> Coordinate:
        """Return the member at ``position`` in this rank's group over ``axes``.

        >>> Grid.of(dp=2, tp=3).at(4).peer(0, "dp").rank
        1
        """
        rank = self.rank
        for axis in reversed([axis for axis in axes if axis in self.grid.axes]):
            position, place = divmod(position, self.grid.size(axis))
            rank += (place - self[axis]) * self.grid.stride(axis)
        return Coordinate(self.grid, rank)

    def __str__(self) -> str:
        return f"rank {self.rank} ({', '.join(f'{axis}={at}' for axis, at in self.items())})"


@lru_cache(maxsize=256)  # a plan asks for the same few grids millions of times
def _strides(axes: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Return each axis's stride and size."""
    return {axis: (math.prod(sizes[i + 1 :]), sizes[i]) for i, axis in enumerate(axes)}
