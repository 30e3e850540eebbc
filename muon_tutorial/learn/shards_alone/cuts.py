"""Lesson 08: a real gradient cut into pieces, each orthogonalized alone, compared with the right update.

All updates are exact UVᵀ in float64, so every difference comes from the cut.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...plan.layout import Shard, shard_box
from ..inputs.recordings import real_gradient
from ..why_muon.updates import svd_muon as orthogonal

SHAPE = (64, 256)
CUTS = (1, 2, 4, 8)
DIMS = {"columns": 1, "rows": 0}


def my_piece(matrix: Tensor, dim: int, place: int, tp: int) -> Tensor:
    """A copy of one tp position's piece of a matrix that is cut along ``dim``."""
    return matrix[shard_box(tuple(matrix.shape), Shard(dim), place, tp).slices].clone()


def pieces_alone(matrix: Tensor, dim: int, tp: int) -> Tensor:
    """Orthogonalize every piece by itself, and join the results."""
    return torch.cat([orthogonal(my_piece(matrix, dim, place, tp)) for place in range(tp)], dim=dim)


@dataclass(frozen=True, slots=True)
class Comparison:
    """An update compared with the UVᵀ that it should be. ``values`` are its singular values, largest first.

    ``cosine`` is 1 if both point the same way. ``distance`` is the difference's norm over that of UVᵀ, and
    ``at_best`` is the distance left after the best possible rescaling.
    """

    cosine: float
    distance: float
    at_best: float
    values: tuple[float, ...]

    def __str__(self) -> str:
        return (
            f"singular values    {self.values[-1]:.3f} to {self.values[0]:.3f}\n"
            f"cosine to UVᵀ      {self.cosine:.3f}\n"
            f"distance to UVᵀ    {self.distance:.3f}   ({self.at_best:.3f})"
        )


def nearness(update: Tensor, right: Tensor) -> tuple[float, float]:
    """The exercise's reference: cosine and distance of an update to the right one."""
    cosine = (update * right).sum() / (update.norm() * right.norm())
    return cosine.item(), ((update - right).norm() / right.norm()).item()


def compare(update: Tensor, matrix: Tensor) -> Comparison:
    cosine, distance = nearness(update, orthogonal(matrix))
    values = torch.linalg.svdvals(update).tolist()
    return Comparison(cosine, distance, max(0.0, 1 - cosine**2) ** 0.5, tuple(values))


def in_directions(update: Tensor, matrix: Tensor) -> Tensor:
    """Uᵀ · update · V, from the full SVD of a wide matrix: entry (i, j) is the part of input j in output i.

    The gradient itself becomes diagonal, so other entries join directions that the gradient keeps apart.

    >>> whole = gradient()
    >>> bool((in_directions(orthogonal(whole), whole) - torch.eye(64, 256)).abs().max() < 1e-9)
    True
    """
    u, _, vt = torch.linalg.svd(matrix, full_matrices=True)
    return u.T @ update @ vt.T


def energy_shares(turned: Tensor) -> tuple[float, ...]:
    """The exercise's reference: shares of the energy on the diagonal, beside it, and outside the square."""
    squares, rows = turned**2, len(turned)
    diagonal, inside = squares.diagonal().sum(), squares[:, :rows].sum()
    parts = (part / squares.sum() for part in (diagonal, inside - diagonal, squares[:, rows:].sum()))
    return tuple(part.item() for part in parts)


def gradient() -> Tensor:
    """A real gradient, 64 × 256, recorded in training."""
    return real_gradient("down").matrix


@functools.cache
def matrices() -> dict[str, Tensor]:
    """The real gradient, and two made-up matrices: independent entries, and a few loud directions."""
    entries = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(entries, full_matrices=False)
    loud = torch.arange(1, SHAPE[0] + 1, dtype=torch.float64) ** -1.5
    return {"real": gradient(), "Gaussian": entries, "power law": u @ torch.diag(loud) @ vt}
