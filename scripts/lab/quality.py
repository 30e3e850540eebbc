"""Measures how far from orthogonal a result is, in float64, on matrices of known singular values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1e-3
"""Singular values below this fraction of the largest do not count, because rounding spoils their vectors."""

TOLERANCE = 1.01
"""A drop-in's error may be this many times the error of ``torch.optim.Muon`` on the same matrix."""

RANK_DEFICIENT = 0.15
"""The limit of a drop-in's error on a matrix of low rank."""

LARGEST_VALUE = 1.45
"""The limit of a drop-in's largest singular value, on any matrix."""


@dataclass(frozen=True, slots=True)
class Spectrum:
    """``values`` maps indices k = 1 … n to singular values. If ``values`` is None, a Gaussian matrix is not
    changed.

    ``held_to`` names the limit for a drop-in: "stock" (stock's error), "constant" (a constant error) or
    "largest" (only a largest singular value).
    """

    held_to: str
    values: Callable[[Tensor], Tensor] | None = None
    scale: float = 1.0


SPECTRA: Mapping[str, Spectrum] = {
    "Gaussian": Spectrum("stock"),
    "k^-1": Spectrum("stock", lambda k: k**-1),
    "k^-1.5": Spectrum("stock", lambda k: k**-1.5),
    "k^-2": Spectrum("stock", lambda k: k**-2),
    "k^-3": Spectrum("stock", lambda k: k**-3),
    "rank 8": Spectrum("constant", lambda k: (k <= 8).double()),
    "cliff": Spectrum("largest", lambda k: torch.where(k <= len(k) / 2, 1.0, 1e-2)),
    "nearly zero": Spectrum("largest", scale=1e-12),
}
"""The spectra on which every recipe is measured. In "cliff", the second half of the singular values is a
hundredth of the first half. "nearly zero" is a Gaussian matrix whose norm is below ``eps``."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a result X: ``largest`` is ‖X‖₂; ``error`` is ‖UᵣᵀXVᵣ − I‖/√r for r singular vectors that count."""

    error: float
    largest: float


@dataclass(frozen=True, slots=True)
class Sample:
    """An fp32 matrix, and those of its singular vectors that count: [rows, r] and [columns, r], float64."""

    matrix: Tensor
    U: Tensor
    V: Tensor

    def quality_of(self, result: Tensor) -> Quality:
        X = result.double()
        r = self.U.size(1)
        off = self.U.T @ X @ self.V - torch.eye(r, dtype=torch.float64)
        return Quality(float(off.norm()) / math.sqrt(r), float(torch.linalg.matrix_norm(X, 2)))


def draw_samples(rows: int, columns: int, seed: int = 0) -> dict[str, Sample]:
    """Draw a matrix with each spectrum. All matrices have the same singular vectors, which are uniformly
    random.

    >>> sample = draw_samples(16, 12)["rank 8"]
    >>> sample.U.shape, sample.V.shape
    (torch.Size([16, 8]), torch.Size([12, 8]))
    """
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    U, gaussian, Vh = torch.linalg.svd(G, full_matrices=False)
    k = torch.arange(1, len(gaussian) + 1, dtype=torch.float64)
    return {
        name: _sample(U, gaussian if spectrum.values is None else spectrum.values(k), Vh, spectrum.scale)
        for name, spectrum in SPECTRA.items()
    }


def _sample(U: Tensor, S: Tensor, Vh: Tensor, scale: float) -> Sample:
    counted = SMALLEST * S.max() < S
    return Sample(((U * (S * scale)) @ Vh).float(), U[:, counted], Vh[counted].T)


def shortfall(spectrum: Spectrum, quality: Quality, stock: Quality) -> str:
    """Return why a result is too bad for a drop-in, or "" if it is good enough.

    >>> shortfall(SPECTRA["rank 8"], Quality(0.2, 1.1), Quality(0.2, 1.1))
    'error 0.200 on low rank, above 0.15'
    """
    if not quality.largest <= LARGEST_VALUE:
        return f"largest singular value {quality.largest:.3f}, above {LARGEST_VALUE}"
    if spectrum.held_to == "stock" and not quality.error <= TOLERANCE * stock.error:
        return f"error {quality.error:.3f}, above stock's {stock.error:.3f}"
    if spectrum.held_to == "constant" and not quality.error <= RANK_DEFICIENT:
        return f"error {quality.error:.3f} on low rank, above {RANK_DEFICIENT}"
    return ""
