"""Ranks compare their plans, as lines of text, before they use the plans. A difference raises an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist

from ..errors import PlanMismatchError, TutorialError
from ..plan.exchange import Exchange
from ..plan.matrix import Matrix
from ..plan.strategies import Plan
from .live import gather_objects

T = TypeVar("T")


def describe_plan(plan: Plan) -> list[str]:
    """Return lines that must be the same on all ranks: one for the plan, one per bucket, one per matrix."""
    routes = [
        f"bucket {bucket.index}, round {bucket.round}, routes: "
        f"gradient {bucket.gradient}; compute {bucket.compute}; parameter {bucket.parameter}"
        for bucket in plan.buckets
    ]
    layouts = [
        f"bucket {bucket.index} exchanges {type(move.src).__name__} for {type(move.dst).__name__}"
        for bucket in plan.buckets
        for route in (bucket.gradient, bucket.compute, bucket.parameter)
        for move in route.hops
        if isinstance(move, Exchange)
    ]
    return [f"strategy {plan.strategy} on {plan.grid}", *routes, *layouts] + [
        f"{entry.matrix.name}: shape {entry.matrix.shape}, {entry.matrix.dtype}, "
        f"cut {_cut_text(entry.matrix)}, in bucket {bucket.index} at {entry.offset}, "
        f"worked on by {'×'.join(bucket.axes)} positions {entry.workers.start} to {entry.workers.stop - 1}"
        f"{'' if entry.gram is None else ', by its Gram matrix'}"
        for bucket in plan.buckets
        for entry in bucket.entries
    ]


def _cut_text(matrix: Matrix) -> str:
    cuts = (f"{axis} along {cut.dim} {cut.sizes or ''}".strip() for axis, cut in matrix.cuts)
    return ", ".join(cuts) or "nowhere"


def check_lines(found: Mapping[int, Sequence[str]]) -> None:
    """Compare the ranks' plans, and raise ``PlanMismatchError`` with the first line that differs."""
    for row in zip_longest(*found.values(), fillvalue="<end of plan>"):
        if len(set(row)) > 1:
            said: dict[str, list[int]] = {}
            for rank, line in zip(found, row, strict=True):
                said.setdefault(line, []).append(rank)
            detail = "\n".join(f"  rank {', '.join(map(str, who))}: {line}" for line, who in said.items())
            raise PlanMismatchError(
                f"ranks made different plans; the first difference:\n{detail}\n"
                "give every rank the same parameters, in the same order, with the same settings"
            )


def check_same(
    make: Callable[[], T],
    lines: Callable[[T], list[str]],
    group: dist.ProcessGroup | None,
    agreed: Sequence[str] = (),
) -> tuple[T, list[str]]:
    """Make a plan and lines about it, and compare the lines over a group. All its ranks must call this.

    ``agreed`` are lines that all ranks have compared before. If this plan's lines are equal to ``agreed``,
    nothing is compared.

    Raises:
        TutorialError: the error that ``make`` raised on this rank.
        PlanMismatchError: ``make`` raised on another rank, or the lines differ.
    """
    try:
        made, mine, error = make(), [], None
        mine = lines(made)
    except TutorialError as caught:
        error, mine = caught, [f"{type(caught).__name__}: {caught}"]
    if error is None and mine == list(agreed):
        return made, mine
    found = {0: (error is not None, mine)}
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        ranks = dist.get_process_group_ranks(group)
        found = dict(zip(ranks, gather_objects(found[0], group), strict=True))
    if error is not None:
        raise error
    failed = {rank: text[0] for rank, (wrong, text) in found.items() if wrong}
    if failed:
        rank, text = next(iter(failed.items()))
        raise PlanMismatchError(f"rank {rank} could not make its plan: {text}")
    check_lines({rank: text for rank, (_, text) in found.items()})
    return made, mine
