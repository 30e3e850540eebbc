"""Formulas for the bytes that a rank sends in a step, strategy by strategy, and the paper's bound.

Symbols: D = data-parallel ranks, T = tensor-parallel ranks, N = Muon elements per tensor-parallel rank, g and
p = bytes per gradient and parameter element, b = bytes per sent momentum element (2, in bf16), and
ρ = (D−1)/D. All formulas except ``boundary_received`` count the bytes that one rank sends if collectives run
as rings. Formulas are exact if elements divide evenly; otherwise the plan's padding comes on top.

Source of the strategies: Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.3,
which says that Distributed Muon sends 1 to 1.25 times as many bytes as distributed AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from ..plan.grid import Coordinate
from ..plan.strategies import Plan

WIRE_BYTES = 2


def rho(D: int) -> Fraction:
    """(D−1)/D: the fraction of a tensor that each of D ranks in a ring sends."""
    return Fraction(D - 1, D)


def ddp_adamw(D: int, N: int, g: int) -> Fraction:
    """An all_reduce of the gradients: 2ρNg."""
    return 2 * rho(D) * N * g


def zero1_adamw(D: int, N: int, g: int, p: int) -> Fraction:
    """A reduce_scatter of the gradients and an all_gather of the parameters: ρN(g+p).

    ``layerwise``, which sends gradients to owners and parameters back, sends as much on average over ranks.
    """
    return rho(D) * N * (g + p)


def fsdp2_adamw(D: int, N: int, g: int, p: int) -> Fraction:
    """Two gathers of the parameters (for forward and for backward) and a reduction of gradients: ρN(g+2p)."""
    return rho(D) * N * (g + 2 * p)


def zero1_gather_all(D: int, N: int, g: int, p: int, b: int = WIRE_BYTES) -> Fraction:
    """Moonshot's ZeRO-1, which gathers whole buckets: ρN(g+p+b). Tensor-parallel gathers are not counted."""
    return rho(D) * N * (g + p + b)


def boundary_received(wholes_and_own: Iterable[tuple[int, int]], b: int = WIRE_BYTES) -> int:
    """Bytes received with ``gather="boundary"``: b·(elements − own elements), summed over ``straddled``."""
    return sum(b * (whole - own) for whole, own in wholes_and_own)


def straddled(plan: Plan, at: Coordinate) -> list[tuple[int, int]]:
    """For each matrix that several dp positions share: how many elements it has, and how many are on this
    rank."""
    return [
        (held.entry.matrix.box(at).numel, held.numel)
        for bucket in plan.buckets
        for held in bucket.stored_shards(at)
        if bucket.works_on(held.entry, at)
    ]
