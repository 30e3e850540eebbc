"""All ranks agree, before anything changes, on gradients, hyperparameters and the step's number."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ..engine.collective import Label, Walk
from ..engine.travel import all_reduce
from ..errors import GradientError, MismatchError, NotFiniteError
from ..plan.grid import Coordinate

Stamp = Mapping[str, str]
"""What ranks must have alike in a step, as text: hyperparameters, the step's number. All have these keys."""

NO_STAMP: Stamp = MappingProxyType({})


def agree_on_gradients(
    gradients: Sequence[Tensor | None],
    names: Sequence[str],
    device: torch.device,
    at: Coordinate,
    torn: str | None,
    limits: Sequence[float] | None = None,
    stamp: Stamp = NO_STAMP,
) -> Walk:
    """Which gradients any rank has, the same answer on every rank: one tiny sum an axis.

    ``torn`` says what to do about a gradient that only some ranks have; None where that is allowed, since
    local gradients are averaged and a missing one counts as zero. ``limits`` are the largest numbers that the
    sum of each gradient may hold, where the step will sum them. Must be walked by all ranks of the grid.

    Raises:
        GradientError: on every rank: a gradient is not finite, or would not be once summed, or torn where
            that is not allowed.
        MismatchError: on every rank: their stamps differ.
    """
    counts = torch.cat([gradient_flags(gradients, device), stamp_flags([str(stamp)], device)])
    for axis in at.grid.axes:
        counts = yield from all_reduce(counts, axis, at, Label("gradient flags"))
    ranks = at.size(*at.grid.axes)
    if differ(counts[-2:], ranks):
        yield from _refuse_other_stamps(stamp, device, at)
    return agreed(counts[:-2], names, ranks, torn, limits)


def _refuse_other_stamps(stamp: Stamp, device: torch.device, at: Coordinate) -> Walk:
    """Find out which values differ, and raise. Must be walked by all ranks of the grid."""
    counts = stamp_flags(stamp.values(), device)
    for axis in at.grid.axes:
        counts = yield from all_reduce(counts, axis, at, Label("hyperparameter flags"))
    refuse_other_stamps(stamp, counts, at.size(*at.grid.axes))


HASHES = 1 << 19
"""How many hashes there are: so few that float64 holds the sum of their squares over 16,384 ranks exactly."""


def stamp_flags(texts: Iterable[str], device: torch.device) -> Tensor:
    """Numbers that, summed over ranks, tell whether all ranks have the same texts: a hash v, and v²."""
    hashes = [zlib.crc32(text.encode()) % HASHES for text in texts]
    return torch.tensor([part for v in hashes for part in (v, v * v)], dtype=torch.float64, device=device)


def checksum_flags(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The same for tensors, [tensors, 2]: the sum of their bits, read as integers, and its square."""
    sums = [_bits(tensor).sum(dtype=torch.int64) % HASHES for tensor in tensors]
    hashes = torch.stack(sums).to(device, torch.float64) if sums else torch.zeros(0, dtype=torch.float64)
    return torch.stack([hashes, hashes.square()], dim=1)


def _bits(tensor: Tensor) -> Tensor:
    whole_numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().reshape(-1).view(whole_numbers[tensor.element_size()])


def differ(sums: Tensor, ranks: int) -> bool:
    """Whether the texts behind a pair of sums differ: n·Σv² = (Σv)² where all v are equal, and only there."""
    if sums.is_meta:
        return False
    total, squares = (int(part) for part in sums.tolist())
    return ranks * squares != total * total


def refuse_other_stamps(stamp: Stamp, sums: Tensor, ranks: int) -> None:
    """Say which values differ, from their flags summed over all ranks.

    Raises:
        MismatchError: always.
    """
    pairs = zip(stamp.items(), sums.split(2), strict=True)
    found = [f"{key} (here {value})" for (key, value), pair in pairs if differ(pair, ranks)]
    raise MismatchError(
        f"ranks would step differently: {' and '.join(found)} is not the same on all {ranks} ranks, group by "
        "group; nothing was changed: set it alike on all of them"
    )


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
    """One rank's flags, to be summed: is each gradient there; is it not finite; its largest element."""
    peaks = [_peak(grad) for grad in gradients]
    there = [float(grad is not None) for grad in gradients]
    spoilt = [float(not math.isfinite(peak)) for peak in peaks]
    finite = [peak if math.isfinite(peak) else 0.0 for peak in peaks]
    return torch.tensor([*there, *spoilt, *finite], dtype=torch.float64, device=device)


def agreed(
    counts: Tensor,
    names: Sequence[str],
    ranks: int,
    torn: str | None,
    limits: Sequence[float] | None = None,
) -> list[bool]:
    """For each gradient whether any rank has it, from the flags summed over all ranks.

    On the meta device there are no values, and every gradient is taken to be there and finite.

    Raises:
        GradientError: as ``agree_on_gradients`` does.
    """
    if counts.is_meta:
        return [True] * len(names)
    holders, spoilt, peaks = (part.tolist() for part in counts.split(len(names) or 1))
    wrong = [i for i, found in enumerate(spoilt) if found]
    if wrong:
        others = f", as do {len(wrong) - 1} others" if len(wrong) > 1 else ""
        raise NotFiniteError(
            f"the gradient of {names[wrong[0]]} holds NaN or infinity on {int(spoilt[wrong[0]])} of {ranks} "
            f"ranks{others}; nothing was changed: skip this step, or fix the loss"
        )
    for name, peak, limit in zip(names, peaks, limits or (), strict=limits is not None):
        if peak > limit:
            raise NotFiniteError(
                f"the gradient of {name} may overflow where the step sums it: the ranks' largest elements "
                f"add up to {peak:.3g}, and its dtype holds {limit:.3g}; nothing was changed: lower the loss "
                "scale, or skip this step"
            )
    missing = [i for i, found in enumerate(holders) if 0 < found < ranks]
    if missing and torn is not None:
        raise GradientError(
            f"the gradient of {names[missing[0]]} is missing on {ranks - int(holders[missing[0]])} of "
            f"{ranks} ranks{torn}"
        )
    return [found > 0 for found in holders]


def _peak(grad: Tensor | None) -> float:
    """The largest absolute value; NaN or infinity where there is one."""
    if grad is None or not grad.numel() or grad.is_meta:
        return 0.0
    return float(torch.linalg.vector_norm(grad, ord=math.inf))
