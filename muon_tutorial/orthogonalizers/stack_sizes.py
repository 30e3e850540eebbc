"""Decides how many matrices are stacked, so that each keeps the bits that it has alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..newton_schulz import DEFAULT_EPS
from .checked_recipe import Recipe
from .symmetric_products import LEAST_SYMMETRIC, symmetric_share
from .workspace import ALIGNMENT, Workspace

CPU = torch.device("cpu")

LEAST_STACKED = 8
"""Matrices whose smaller side is below this are not stacked."""

RUN_BYTES, MOST_STACKED = 2 * 1024**2, 16
"""A stack is iterated in runs of a few matrices. A run's buffers fit into ``RUN_BYTES`` (a core's cache). The
length of a run may decide which kernels are used, and so change the bits. So every length up to
``MOST_STACKED`` is tried out."""

TRIED = 2**18
"""How many elements of results are compared. If kernels differ, a few in 100,000 elements of a bf16 product
differ, and each result comes from a dozen products."""


Key = TypeVar("Key", bound=Hashable)


def runs_of_equals(keys: Sequence[Key], most: Callable[[Key], int]) -> list[list[int]]:
    """Return runs of indices: matrices with equal keys, at most ``most(key)`` of them in a run.

    >>> runs_of_equals("abaacb", lambda key: 2)
    [[0, 2], [3], [1, 5], [4]]
    """
    indices: dict[Key, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    runs = []
    for key, its in indices.items():
        size = most(key) if len(its) > 1 else 1
        runs += [its[begin : begin + size] for begin in range(0, len(its), size)]
    return runs


def run_length(rows: int, columns: int, recipe: Recipe, device: torch.device = CPU) -> int:
    """Return how many matrices of this shape can be stacked so that each gets the same bits as alone.

    The answer is 1 for large matrices, which gain nothing in a stack, and for shapes whose members would not
    be aligned in a stack, and so get other bits. This CPU's kernels are tried out once per shape, recipe and
    number of threads. The meta device is treated like the CPU; on other devices nothing is stacked.
    """
    most = _most_stacked(rows, columns, recipe)
    if most == 1 or device.type not in ("cpu", "meta"):
        return 1
    return most if _keeps_bits(rows, columns, recipe, torch.get_num_threads(), RUN_BYTES) else 1


def _most_stacked(rows: int, columns: int, recipe: Recipe) -> int:
    """How many matrices fit into a core's cache; 1 if stacking gains nothing or would not be aligned."""
    n, itemsize = min(rows, columns), recipe.dtype.itemsize
    aligned = all(size * itemsize % ALIGNMENT == 0 for size in (n * n, rows * columns))
    if not aligned or not LEAST_STACKED <= n < LEAST_SYMMETRIC:
        return 1
    elements = sum(math.prod(shape) for shape in buffer_shapes((rows, columns), recipe))
    return min(MOST_STACKED, max(1, RUN_BYTES // (elements * itemsize)))


@cache
def _keeps_bits(rows: int, columns: int, recipe: Recipe, threads: int, run_bytes: int) -> bool:
    """Whether stacks of every possible length give each member the bits that it has alone."""
    from .iterate import orthogonalize_into

    most, generator, workspace = _most_stacked(rows, columns, recipe), torch.Generator("cpu"), Workspace()
    sizes = range(1, most + 1)
    with _disable_current_modes():  # a PeakMemory does not count this
        for seed in range(max(1, -(-TRIED // (sum(sizes) * rows * columns)))):
            generator.manual_seed(seed)
            G = torch.randn((most, rows, columns), generator=generator, dtype=torch.float32, device="cpu")
            together, alone = (torch.empty_like(G, dtype=torch.bfloat16) for _ in range(2))
            for out, member in zip(alone, G, strict=True):
                orthogonalize_into(out, member, recipe, DEFAULT_EPS, workspace)
            for size in sizes:
                orthogonalize_into(together[:size], G[:size], recipe, DEFAULT_EPS, workspace)
                if not torch.equal(together[:size], alone[:size]):
                    return False
    return True


def buffer_shapes(shape: tuple[int, ...], recipe: Recipe) -> list[tuple[int, ...]]:
    """The shapes of an iteration's buffers: two like the matrix or stack, the others square."""
    *batch, rows, columns = shape
    n = min(rows, columns)
    gram = recipe.iterates_on_gram(rows, columns, symmetric_share(n))
    long_polynomials = any(len(polynomial) > 3 for polynomial in recipe.coefficients)
    count = 4 if gram or (recipe.dtype is torch.bfloat16 and long_polynomials) else 2
    # Rows are padded by a cache line: if their length were a power of two, a column would use few cache sets.
    pitch = n + ALIGNMENT // recipe.dtype.itemsize if n >= LEAST_SYMMETRIC else n
    return [shape] * 2 + [(*batch, n, pitch)] * count
