"""All ranks agree on gradients, hyperparameters and the step's number before anything changes.

Every rank sends nine numbers, whatever its parameters, so even ranks with different parameters can be
compared, and the error says what differs. If the sums show a problem, ranks exchange a few more numbers per
gradient. At that point all ranks are known to have the same number of gradients, so their messages have equal
lengths.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engine.collective import Walk
from ..errors import GradientError, MismatchError, NotFiniteError, TutorialError


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The ranks that step together: this rank's number, how many there are, and how to sum numbers over them.

    ``total(numbers, phase)`` is a generator that returns the sum of the ranks' numbers, with the same bits on
    every rank. The numbers lie on ``device``.
    """

    rank: int
    size: int
    device: torch.device
    total: Callable[[Tensor, str], Walk]


def _keep(numbers: Tensor, phase: str) -> Walk:
    return numbers
    yield  # never reached, but makes this function a generator


ALONE = Ranks(0, 1, torch.device("cpu"), _keep)
"""A single process."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Texts that must be the same on all ranks in a step, such as hyperparameters. All ranks use equal keys.

    If this rank cannot step, ``error`` says why. Ranks compare the texts, and then all refuse the step.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    error: TutorialError | None = None

    def raise_error(self, rank: int) -> None:
        """Raise the error, if there is one, with the rank's number in its message."""
        if self.error is not None:
            raise type(self.error)(f"rank {rank}: {self.error}")


@dataclass(frozen=True, slots=True, eq=False)
class OwnGradients:
    """One rank's gradients, for ranks to compare before a step.

    ``remedy`` ends the error message about a gradient that only some ranks have; None if the step averages
    gradients and counts a missing gradient as zero.

    ``together`` returns the groups of ranks over which nothing is averaged. In such a group, all ranks or
    none must have a gradient; ranks whose piece is ``empty`` do not count. Each rank has a number ``torn``;
    these numbers add up to 0 over a whole group, but not over a part of it.

    If the step sums gradients, ``limits`` are the largest numbers that the dtype of each sum can hold.
    """

    tensors: Sequence[Tensor | None] = ()
    names: Sequence[str] = ()
    remedy: str | None = None
    limits: Sequence[float] | None = None
    together: Callable[[], Sequence[Sequence[int]]] = tuple
    empty: Sequence[bool] = ()
    torn: float = 0.0


NOTHING_TO_COMPARE = Fingerprint()
_ERROR = "what keeps this rank from stepping"


def agree_on_gradients(
    own: OwnGradients, ranks: Ranks, fingerprint: Fingerprint = NOTHING_TO_COMPARE
) -> Walk:
    """Return, for each gradient, whether any rank has it. All ranks must run this; their answers are equal.

    Each rank sends a hash of its fingerprint, a hash of which gradients it has, and the largest ratio of an
    element to its limit. The ratio is infinite if an element is not finite. On the meta device, where tensors
    have no values, all gradients are assumed to exist.

    Raises:
        GradientError: a gradient or a sum of gradients is not finite, or a gradient is missing on some ranks
            although that is not allowed. Every rank raises it.
        MismatchError: the fingerprints differ. Every rank raises it.
    """
    there = [grad is not None for grad in own.tensors]
    largest = largest_elements(own, ranks.device)  # [gradients]
    texts = {**fingerprint.values, _ERROR: str(fingerprint.error or "")}
    crcs = zlib.crc32(str(texts).encode()), zlib.crc32(bytes(there))
    halves = [half for crc in crcs for half in divmod(crc, 1 << 16)]
    hashes = [number for half in halves for number in (half, half * half)]  # [8]
    share = largest * 0 if own.limits is None else largest / largest.new_tensor(own.limits)
    worst = share.nan_to_num(math.inf).amax().view(1) if there else largest.new_zeros(1)
    numbers = yield from ranks.total(torch.cat([largest.new_tensor(hashes), worst]), "gradient flags")
    if numbers.is_meta:
        return [True] * len(there)
    *sums, shares = numbers.tolist()
    pairs = zip(sums[::2], sums[1::2], strict=True)  # n·Σv² = (Σv)² if all v are equal
    same = [ranks.size * int(squares) == int(total) ** 2 for total, squares in pairs]
    if not all(same[:2]):
        yield from _refuse_other_fingerprints(fingerprint, texts, ranks)
    if fingerprint.error is not None:
        fingerprint.raise_error(ranks.rank)
    if not all(same[2:]) or not shares <= 1:
        there = yield from _agree_one_by_one(own, largest, ranks)
    return there


def compare_fingerprints(ranks: Ranks, fingerprint: Fingerprint) -> Walk:
    """Compare only fingerprints. All ranks must run it, and all raise ``MismatchError`` if they differ."""
    yield from agree_on_gradients(OwnGradients(), ranks, fingerprint)


def largest_elements(own: OwnGradients, device: torch.device) -> Tensor:
    """Return each gradient's largest absolute value, [gradients], float64; 0 for a missing gradient.

    This uses ``aminmax``, because a norm of infinite order takes thirty times as long on a CPU.
    """
    peaks = torch.zeros(len(own.tensors), dtype=torch.float64, device=device)
    held: dict[torch.dtype, list[int]] = {}
    for index, grad in enumerate(own.tensors):
        if grad is not None and grad.numel():
            held.setdefault(grad.dtype, []).append(index)
    for places in held.values():
        grads = [grad.detach() for place in places if (grad := own.tensors[place]) is not None]
        grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
        ends = [torch.stack(each) for each in zip(*map(torch.aminmax, grads), strict=True)]
        peaks[places] = torch.maximum(-ends[0], ends[1]).to(device, torch.float64)
    return peaks


def _agree_one_by_one(own: OwnGradients, largest: Tensor, ranks: Ranks) -> Walk:
    """Do what ``agree_on_gradients`` does, but with separate numbers for each gradient, so that the faulty
    one can be named."""
    there = largest.new_tensor([grad is not None for grad in own.tensors])
    finite = largest.isfinite()
    flags = torch.cat([there, (~finite).double(), largest.where(finite, 0.0), there * own.torn])
    summed = yield from ranks.total(flags, "gradient flags")  # [4 × gradients]
    holders, wrong, largest_sums, torn = summed.view(4, len(there)).tolist()
    guilty = [index for index, found in enumerate(wrong) if found]
    if guilty:
        on = yield from _ranks_where(not bool(finite[guilty[0]]), ranks)
        others = f", as do {len(guilty) - 1} others" if len(guilty) > 1 else ""
        raise NotFiniteError(
            f"the gradient of {own.names[guilty[0]]} holds NaN or infinity {on}{others}; nothing was "
            "changed: skip this step, or fix the loss"
        )
    for index, (total, limit) in enumerate(zip(largest_sums, own.limits or (), strict=False)):
        if total > limit:
            column = (yield from rank_table([float(largest[index])], ranks))[:, 0].tolist()
            raise NotFiniteError(
                f"the gradient of {own.names[index]} may overflow where the step sums it: the ranks' largest "
                f"elements add up to {total:.3g} (largest: rank {column.index(max(column))}), but its "
                f"dtype holds only {limit:.3g}; nothing was changed: lower the loss scale, or skip this step"
            )
    missing = [index for index, found in enumerate(holders) if 0 < found < ranks.size]
    if missing and own.remedy is not None:
        on = yield from _ranks_where(own.tensors[missing[0]] is None, ranks)
        raise GradientError(f"the gradient of {own.names[missing[0]]} is missing {on}{own.remedy}")
    if any(torn):
        yield from _refuse_torn_groups(own, [index for index, found in enumerate(torn) if found], ranks)
    return [found > 0 for found in holders]


def _refuse_torn_groups(own: OwnGradients, torn: Sequence[int], ranks: Ranks) -> Walk:
    """Raise ``GradientError`` if some ranks of a group lack one of these gradients and others have it."""
    row = [-1.0 if own.empty[index] else float(own.tensors[index] is not None) for index in torn]
    table = (yield from rank_table(row, ranks)).T.tolist()  # [torn, ranks]
    for index, found in zip(torn, table, strict=True):
        for group in own.together():
            lacking, having = ([rank for rank in group if found[rank] == value] for value in (0, 1))
            if lacking and having:
                raise GradientError(
                    f"the gradient of {own.names[index]} is missing on {say_ranks(lacking)}, but not on "
                    f"{say_ranks(having)} of the same tp group, over which nothing is averaged; nothing was "
                    "changed: give it to all ranks of the group or to none"
                )


def _ranks_where(here: bool, ranks: Ranks) -> Walk:
    """Say on which ranks ``here`` is true. All ranks must run it."""
    column = (yield from rank_table([float(here)], ranks))[:, 0]
    guilty = [rank for rank, found in enumerate(column.tolist()) if found]
    return f"on {len(guilty)} of {ranks.size} ranks ({say_ranks(guilty)})"


def rank_table(row: Sequence[float], ranks: Ranks) -> Walk:
    """Gather every rank's row of numbers, [ranks, numbers], on all ranks. All ranks must run it."""
    table = torch.zeros(ranks.size, len(row), dtype=torch.float64, device=ranks.device)
    table[ranks.rank] = table.new_tensor(row)
    return (yield from ranks.total(table.view(-1), "which rank")).view_as(table)


def _refuse_other_fingerprints(fingerprint: Fingerprint, texts: Mapping[str, str], ranks: Ranks) -> Walk:
    """Compare a hash of each text. Raise this rank's error, or an error that says what differs, and where."""
    row = [float(_hash(text)) for text in texts.values()]
    table = yield from rank_table(row, ranks)
    fingerprint.raise_error(ranks.rank)
    columns = dict(zip(texts, table.T.tolist(), strict=True))
    guilty = [rank for rank, found in enumerate(columns.pop(_ERROR)) if found != _hash("")]
    if guilty:
        raise MismatchError(
            f"{say_ranks(guilty)} cannot take this step, and raised an error that says why; nothing "
            "was changed on any rank"
        )
    found = [
        f"{key} (here {fingerprint.values[key]}) is not the same on all {ranks.size} ranks: "
        f"{say_outliers(column)}"
        for key, column in columns.items()
        if len(set(column)) > 1
    ]
    raise MismatchError(
        f"ranks would step differently: {'; '.join(found)}. Nothing was changed: "
        "set the same value on all ranks"
    )


def say_outliers(values: Sequence[object], ranks: Sequence[int] | None = None) -> str:
    """Say which ranks' values differ from the rest. ``ranks`` are the ranks' numbers.

    >>> say_outliers([7, 7, 3, 7]), say_outliers([7, 3])
    ('rank 2 differs from the others', 'ranks 0 and 1 differ')
    """
    ranks = range(len(values)) if ranks is None else ranks
    value, times = Counter(values).most_common(1)[0]
    others = [rank for rank, held in zip(ranks, values, strict=True) if held != value]
    if 2 * times > len(values):
        return f"{say_ranks(others)} differ{'s' if len(others) == 1 else ''} from the others"
    first = next(rank for rank, held in zip(ranks, values, strict=True) if held == value)
    return f"ranks {first} and {others[0]} differ"


def say_ranks(ranks: Sequence[int]) -> str:
    """List the numbers of ranks, eight at most."""
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


HASHES = (1 << 19) - 1
"""How many different hashes there are. Float64 holds the sum of 16,384 ranks' squared hashes exactly.

The number is a prime. Hashes modulo a power of two would not change with a flipped high bit (sign, exponent).
"""

_COLUMNS = 1021
_ROWS = 256  # per pass: 2 MB of int64
_WEIGHTS = 1 + torch.arange(_COLUMNS, dtype=torch.int64)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode()) % HASHES


def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 hash of a tensor's bits and their positions, with shape [].

    A single flipped bit always changes the hash. One in half a million other changes goes unnoticed.
    """
    integers = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)  # sums of int64 wrap
    words = tensor.detach().contiguous().reshape(-1).view(integers)
    whole = len(words) // _COLUMNS * _COLUMNS
    sums = torch.zeros(_COLUMNS, dtype=torch.int64, device=words.device)
    for rows in words[:whole].view(-1, _COLUMNS).split(_ROWS):  # sum(dtype=…) takes twelve times as long
        sums += rows.to(torch.int64).sum(0)
    sums[: len(words) - whole] += words[whole:]
    return (sums % HASHES * _WEIGHTS.to(sums.device)).sum() % HASHES


def agree_on_overflow(found_inf: Tensor | int, ranks: Ranks) -> Walk:
    """Return whether ``GradScaler`` found infinity. All ranks must run it.

    ``found_inf`` is a plain 0 if there are no gradients. If the scaler found infinity only on some ranks,
    every rank raises ``GradientError``.
    """
    flag = torch.as_tensor(found_inf > 0, dtype=torch.float32, device=ranks.device).reshape(1)
    found = int((yield from ranks.total(flag, "overflow flag")))
    if 0 < found < ranks.size:
        raise GradientError(
            f"GradScaler found infinity on {found} of {ranks.size} ranks, and would scale their losses "
            "differently from now on; nothing was changed: use torch.distributed.fsdp.sharded_grad_scaler."
            "ShardedGradScaler, which asks all ranks, and call its unscale_(optimizer) before step"
        )
    return found > 0
