"""All ranks agree, before anything changes, on which gradients exist and whether they are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.collective import Label, Walk
from ..engine.travel import all_reduce
from ..errors import GradientError
from ..plan.grid import Coordinate


def agree_on_gradients(
    gradients: Sequence[Tensor | None],
    names: Sequence[str],
    device: torch.device,
    at: Coordinate,
    torn: str | None,
) -> Walk:
    """Which gradients any rank has, the same answer on every rank: one tiny sum an axis.

    ``torn`` says what to do about a gradient that only some ranks have; None where that is allowed, since
    local gradients are averaged and a missing one counts as zero. Must be walked by all ranks of the grid.

    Raises:
        GradientError: on every rank: a gradient is not finite, or torn where that is not allowed.
    """
    counts = gradient_flags(gradients, device)
    for axis in at.grid.axes:
        counts = yield from all_reduce(counts, axis, at, Label("gradient flags"))
    return agreed(counts, names, at.size(*at.grid.axes), torn)


def agree_on_overflow(found_inf: Tensor, at: Coordinate) -> Walk:
    """Whether ``GradScaler`` found infinity in this step's gradients, the same answer on every rank.

    Must be walked by all ranks of the grid.

    Raises:
        GradientError: on every rank: only some found it.
    """
    count = overflow_flag(found_inf)
    for axis in at.grid.axes:
        count = yield from all_reduce(count, axis, at, Label("overflow flag"))
    return agreed_overflow(count, at.size(*at.grid.axes))


def overflow_flag(found_inf: Tensor) -> Tensor:
    """One rank's flag, to be summed over ranks, [1]."""
    return (found_inf > 0).to(torch.float32).reshape(1)


def agreed_overflow(count: Tensor, ranks: int) -> bool:
    """Whether all ranks found infinity, from the flags summed over them.

    Raises:
        GradientError: only some did.
    """
    found = int(count)
    if 0 < found < ranks:
        raise GradientError(
            f"GradScaler found infinity on {found} of {ranks} ranks, and would scale their losses "
            "differently from now on; nothing was changed: use torch.distributed.fsdp.sharded_grad_scaler."
            "ShardedGradScaler, which asks all ranks, and call its unscale_(optimizer) before step"
        )
    return found > 0


def gradient_flags(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """One rank's flags, to be summed over ranks: is each gradient there; then, is it not finite?"""
    there = [grad is not None for grad in gradients]
    return torch.tensor(
        [*there, *(not _is_finite(grad) for grad in gradients)], dtype=torch.float32, device=device
    )


def agreed(counts: Tensor, names: Sequence[str], ranks: int, torn: str | None) -> list[bool]:
    """For each gradient whether any rank has it, from the flags summed over all ranks.

    On the meta device there are no values, and every gradient is taken to be there and finite.

    Raises:
        GradientError: as ``agree_on_gradients`` does.
    """
    if counts.is_meta:
        return [True] * len(names)
    holders, spoilt = (part.tolist() for part in counts.split(len(names)))
    wrong = [i for i, found in enumerate(spoilt) if found]
    if wrong:
        others = f", as do {len(wrong) - 1} others" if len(wrong) > 1 else ""
        raise GradientError(
            f"the gradient of {names[wrong[0]]} holds NaN or infinity on {int(spoilt[wrong[0]])} of {ranks} "
            f"ranks{others}; nothing was changed: skip this step, or fix the loss"
        )
    missing = [i for i, found in enumerate(holders) if 0 < found < ranks]
    if missing and torn is not None:
        raise GradientError(
            f"the gradient of {names[missing[0]]} is missing on {ranks - int(holders[missing[0]])} of "
            f"{ranks} ranks{torn}"
        )
    return [found > 0 for found in holders]


def _is_finite(grad: Tensor | None) -> bool:
    if grad is None or not grad.numel() or grad.is_meta:
        return True
    return bool(torch.linalg.vector_norm(grad, ord=math.inf).isfinite())
