"""The hard exercise of lesson 16: clip gradients on a mesh of two axes by one factor for their total norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from ... import build_mesh
from ...launching.launch import launch
from ...worlds.live import gather_objects
from ..exercises.judge import Diagnosis, Exercise, Par
from ..exercises.on_real_ranks import judge_on_ranks
from .port import MAX_NORM

Clip = Callable[[list[DTensor], float], Any]
CASES: dict[str, float] = {"long": 8 * MAX_NORM, "short": MAX_NORM / 2}
"""The total norm of all gradients in the two cases that are tried."""
LAID_OUT: tuple[tuple[tuple[int, ...], tuple[Placement, Placement]], ...] = (
    ((24, 16), (Shard(0), Shard(1))),
    ((24, 8), (Shard(0), Replicate())),
    ((16, 16), (Replicate(), Shard(1))),
    ((48,), (Replicate(), Replicate())),
)
"""Shape and placements of each gradient."""


@dataclass(frozen=True, slots=True)
class ClipReport:
    """One rank's result: each gradient's factor in both cases, and the larger number of collectives.

    The last three are wrong norms in the long case: ``alone`` is the norm of the rank's own part, ``copies``
    counts every copy of an entry, and ``added`` adds the ranks' norms instead of their squares.
    """

    is_open: bool
    factors: dict[str, tuple[float, ...]]
    calls: int = 0
    alone: float = 0.0
    copies: float = 0.0
    added: float = 0.0


def try_clip(rank: int, function: Clip, ranks: int) -> ClipReport:
    """One rank's part. All ranks must call."""
    second = 2 if ranks % 2 == 0 else 1
    mesh = build_mesh({"dp": ranks // second, "tp": second})
    factors, calls = {}, 0
    for case, norm in CASES.items():
        gradients = gradients_of(norm, mesh)
        before = [gradient.to_local().clone() for gradient in gradients]
        with CommDebugMode() as seen:
            if function(gradients, MAX_NORM) is ...:
                return ClipReport(True, {})
        calls = max(calls, seen.get_total_counts())
        after = [gradient.to_local() for gradient in gradients]
        factors[case] = tuple(_factor(*pair) for pair in zip(before, after, strict=True))
    parts = [_squares(gradient.to_local()) for gradient in gradients_of(CASES["long"], mesh)]
    everybody = gather_objects(parts)
    copies = math.sqrt(sum(map(sum, everybody)))
    added = sum(math.sqrt(sum(each)) for each in everybody)
    return ClipReport(False, factors, calls, math.sqrt(sum(parts)), copies, added)


def gradients_of(norm: float, mesh: DeviceMesh) -> list[DTensor]:
    """Gradients with the lesson's placements and a total norm of ``norm``, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for shape, _ in LAID_OUT]
    scale = norm / math.sqrt(sum(map(_squares, wholes)))
    return [
        distribute_tensor(whole * scale, mesh, placements, src_data_rank=None)
        for whole, (_, placements) in zip(wholes, LAID_OUT, strict=True)
    ]


def _squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _factor(before: Tensor, after: Tensor) -> float:
    """The factor that leads from ``before`` to ``after``. NaN if neither is a multiple of the other."""
    factor = float((before * after).sum() / before.square().sum())
    return factor if torch.allclose(after, before * factor, rtol=1e-3, atol=1e-7) else math.nan


def clip(gradients: Sequence[DTensor], limit: float) -> None:
    """Scale gradients in place, by one factor, to a total norm of ``limit``. All ranks must call."""
    total = torch.zeros(())
    for gradient in gradients:
        placed = enumerate(gradient.placements)
        copies = math.prod(gradient.device_mesh.size(axis) for axis, how in placed if how.is_replicate())
        total += gradient.to_local().square().sum() / copies
    torch.distributed.all_reduce(total)
    factor = (limit / total.sqrt()).clamp(max=1)
    for gradient in gradients:
        gradient.to_local().mul_(factor)


def check_clip(ranks: int, backend: str = "gloo") -> Exercise:
    """The exercise: clip by the total norm and by one factor, for any placements."""
    seen: dict[str, int] = {}

    def play(function: Any) -> list[ClipReport]:
        arguments = (function, ranks)
        reports = launch(try_clip, ranks, args=arguments, backend=backend, output="quiet", timeout=20.0)
        seen["calls"] = max(report.calls for report in reports)
        return reports

    praise = "Every rank used the same factor, and the whole gradient has the norm that is allowed."
    par = Par("collectives", 1, lambda function: seen["calls"])
    return Exercise(judge_on_ranks(play, judge_clip), praise=praise, par=par)


_LOCAL = "gradient.to_local() is this rank's part. Changing it in place changes the gradient."
_COPIES = (
    "Some entries lie on several ranks, and the sum has counted every copy.",
    "Along an axis where a placement is_replicate(), device_mesh.size(axis) ranks hold the same.",
    "Divide a gradient's squares by its number of copies before the all_reduce.",
)
_SUM = "Squares of norms add. Sum them over ranks by dist.all_reduce, then take the root."


def judge_clip(reports: list[ClipReport]) -> str | Diagnosis | None:
    first, *others = reports
    long, short = first.factors["long"], first.factors["short"]
    due = MAX_NORM / CASES["long"]
    if any(math.isnan(factor) for factor in (*long, *short)):
        return Diagnosis("A gradient is no multiple of what it was.", ("One factor for all entries.", _LOCAL))
    if all(math.isclose(factor, 1) for factor in long):
        return Diagnosis("The gradients are as long as before.", ("Change them in place: mul_.", _LOCAL))
    if max(long) > 1.001 * min(long):
        factors = ", ".join(f"{factor:.4f}" for factor in long)
        said = f"The gradients of rank 0 were multiplied by {factors}: each by a factor of its own."
        return Diagnosis(said, ("The norm is that of all gradients together, as one long vector.", _SUM))
    for rank, other in enumerate(others, 1):
        if not math.isclose(other.factors["long"][0], long[0], rel_tol=1e-3):
            said = f"Rank 0 multiplied by {long[0]:.4f}, rank {rank} by {other.factors['long'][0]:.4f}."
            own = math.isclose(long[0], MAX_NORM / first.alone, rel_tol=1e-3)
            apart = "Now the copies of a gradient are no longer the same."
            return Diagnosis(f"{said} {'Each used the norm of its own part.' if own else apart}", (_SUM,))
    if not math.isclose(long[0], due, rel_tol=1e-3):
        factor = long[0]
        over = f"the norm of the whole gradient is {factor / due:.2f} × limit."
        said = f"All multiplied by {factor:.4f}, and {over}"
        if math.isclose(factor, MAX_NORM / first.copies, rel_tol=1e-3):
            return Diagnosis(said, _COPIES)
        if math.isclose(factor, MAX_NORM / first.added, rel_tol=1e-3):
            return Diagnosis(said, ("Norms do not add.", _SUM))
        if math.isclose(factor, MAX_NORM / CASES["long"] ** 2, rel_tol=1e-3):
            return Diagnosis(said, ("That is the square of the norm: a root is missing.",))
        return Diagnosis(said, (_SUM, "Which entries are counted more than once, or not at all?"))
    if max(short) > 1.001:
        return Diagnosis("A gradient that was short enough was lengthened.", ("The factor is at most 1.",))
    if min(short) < 0.999:
        return Diagnosis("A gradient that was short enough was shortened.", ("Compare with limit first.",))
    return None
