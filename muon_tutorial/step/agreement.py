"""All ranks agree, before anything changes, on gradients, hyperparameters and the step's number."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import torch
from torch import Tensor

from ..engine.collective import Label, Walk
from ..engine.travel import sum_over_grid
from ..errors import GradientError, MismatchError, NotFiniteError, TutorialError
from ..plan.grid import Coordinate


@dataclass(frozen=True, slots=True)
class Stamp:
    """What ranks must have alike in a step, as text: hyperparameters, the step's number. All have these keys.

    A ``complaint`` keeps this rank from stepping, and so all of them: it is raised once all know of it.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    complaint: TutorialError | None = None

    @property
    def texts(self) -> dict[str, str]:
        """All there is to compare; the complaint last."""
        return {**self.values, _COMPLAINT: str(self.complaint or "")}

    def raise_complaint(self, rank: int) -> None:
        """Raise the complaint, if there is one, as that of a rank.

        Raises:
            TutorialError: of the complaint's class.
        """
        if self.complaint is not None:
            raise type(self.complaint)(f"rank {rank}: {self.complaint}")


NO_STAMP = Stamp()
_COMPLAINT = "what keeps this rank from stepping"


def agree_on_gradients(
    gradients: Sequence[Tensor | None],
    names: Sequence[str],
    device: torch.device,
    at: Coordinate,
    torn: str | None,
    limits: Sequence[float] | None = None,
    stamp: Stamp = NO_STAMP,
) -> Walk:
    """Which gradients any rank has, the same answer on every rank: one tiny sum.

    ``torn`` says what to do about a gradient that only some ranks have; None where that is allowed, since
    local gradients are averaged and a missing one counts as zero. ``limits`` are the largest numbers that the
    sum of each gradient may hold, where the step will sum them. Must be walked by all ranks of the grid.

    Raises:
        GradientError: on every rank: a gradient is not finite, or would not be once summed, or torn where
            that is not allowed.
        MismatchError: on every rank: their stamps differ.
    """
    counts = step_flags(gradients, stamp, device)
    counts = yield from sum_over_grid(counts, at, Label("gradient flags"))
    ranks = at.size(*at.grid.axes)
    trouble = find_trouble(counts, ranks, torn is None, limits)
    if trouble is not None:
        table = rank_table(own_evidence(trouble, gradients, stamp), at.rank, ranks, device)
        table = (yield from sum_over_grid(table.view(-1), at, Label("which rank"))).view_as(table)
        refuse_step(trouble, table, names, torn or "", stamp, at.rank)
    stamp.raise_complaint(at.rank)
    return present_gradients(counts, len(gradients))


def step_flags(gradients: Sequence[Tensor | None], stamp: Stamp, device: torch.device) -> Tensor:
    """One rank's flags of a step, to be summed over ranks: of its gradients, and of its stamp.

    Of a rank with a complaint only that counts: its gradients may be what it complains of.
    """
    if stamp.complaint is not None:
        gradients = [None] * len(gradients)
    return torch.cat([gradient_flags(gradients, device), stamp_flags([str(stamp.texts)], device)])


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a step is refused, as the summed flags tell it: of which gradient, and of how many others.

    ``amount`` is the sum of the ranks' largest elements where that is too large.
    """

    kind: Literal["stamp", "spoilt", "overflow", "missing"]
    index: int = 0
    others: int = 0
    amount: float = 0.0
    limit: float = 0.0


def find_trouble(
    counts: Tensor, ranks: int, torn_allowed: bool, limits: Sequence[float] | None = None
) -> Trouble | None:
    """What is wrong with a step, from the flags summed over all ranks; the same on each of them.

    On the meta device there are no values, and nothing is wrong.
    """
    if counts.is_meta:
        return None
    if differ(counts[-2:], ranks):
        return Trouble("stamp")
    holders, spoilt, peaks = _parts(counts)
    wrong = [i for i, found in enumerate(spoilt) if found]
    if wrong:
        return Trouble("spoilt", wrong[0], len(wrong) - 1)
    for i, (peak, limit) in enumerate(zip(peaks, limits or (), strict=limits is not None)):
        if peak > limit:
            return Trouble("overflow", i, amount=peak, limit=limit)
    missing = [i for i, found in enumerate(holders) if 0 < found < ranks]
    return Trouble("missing", missing[0], len(missing) - 1) if missing and not torn_allowed else None


def present_gradients(counts: Tensor, gradients: int) -> list[bool]:
    """For each gradient whether any rank has it; on the meta device, all are taken to be there."""
    return [True] * gradients if counts.is_meta else [found > 0 for found in _parts(counts)[0]]


def _parts(counts: Tensor) -> list[list[float]]:
    """Holders, not finite, largest elements: each a number a gradient."""
    gradients = counts[:-2]
    return [part.tolist() for part in gradients.split(len(gradients) // 3 or 1)] or [[], [], []]


def own_evidence(trouble: Trouble, gradients: Sequence[Tensor | None], stamp: Stamp) -> list[float]:
    """What this rank has to say about a trouble: numbers, as many on every rank."""
    if trouble.kind == "stamp":
        return [float(_hash(text)) for text in stamp.texts.values()]
    gradient = gradients[trouble.index]
    if trouble.kind == "missing":
        return [float(gradient is None)]
    peak = max(abs(float(end)) for end in _ends(gradient, torch.device("cpu")))
    return [peak if trouble.kind == "overflow" and math.isfinite(peak) else float(not math.isfinite(peak))]


def rank_table(row: Sequence[float], rank: int, ranks: int, device: torch.device) -> Tensor:
    """A row a rank, [ranks, numbers], with this rank's alone: the sum over ranks holds all."""
    table = torch.zeros(ranks, len(row), dtype=torch.float64, device=device)
    table[rank] = torch.tensor(row, dtype=torch.float64, device=device)
    return table


def refuse_step(
    trouble: Trouble, table: Tensor, names: Sequence[str], torn: str, stamp: Stamp, rank: int
) -> NoReturn:
    """Say what is wrong and on which rank, from all ranks' evidence.

    Raises:
        GradientError: a gradient is not finite (``NotFiniteError``), or missing.
        MismatchError: stamps differ.
        TutorialError: this rank's own complaint.
    """
    if trouble.kind == "stamp":
        stamp.raise_complaint(rank)
        _refuse_other_stamps(stamp, table)
    name, ranks, column = names[trouble.index], len(table), table[:, 0].tolist()
    guilty = [its for its, found in enumerate(column) if found]
    where = f"on {len(guilty)} of {ranks} ranks ({_say_ranks(guilty)})"
    if trouble.kind == "missing":
        raise GradientError(f"the gradient of {name} is missing {where}{torn}")
    if trouble.kind == "spoilt":
        others = f", as do {trouble.others} others" if trouble.others else ""
        raise NotFiniteError(
            f"the gradient of {name} holds NaN or infinity {where}{others}; nothing was changed: skip this "
            "step, or fix the loss"
        )
    raise NotFiniteError(
        f"the gradient of {name} may overflow where the step sums it: the ranks' largest elements add up to "
        f"{trouble.amount:.3g}, most of it on rank {column.index(max(column))}, and its dtype holds "
        f"{trouble.limit:.3g}; nothing was changed: lower the loss scale, or skip this step"
    )


def _refuse_other_stamps(stamp: Stamp, table: Tensor) -> NoReturn:
    columns = dict(zip(stamp.texts, table.T.tolist(), strict=True))
    guilty = [rank for rank, found in enumerate(columns.pop(_COMPLAINT)) if found != _hash("")]
    if guilty:
        raise MismatchError(
            f"{_say_ranks(guilty)} cannot take this step, and an error of its own there says why; nothing "
            "was changed on any rank"
        )
    found = [
        f"{key} (here {stamp.values[key]}) is not the same on all {len(table)} ranks: {say_outliers(column)}"
        for key, column in columns.items()
        if len(set(column)) > 1
    ]
    raise MismatchError(
        f"ranks would step differently: {'; '.join(found)}. Nothing was changed: set it alike on all of them"
    )


def say_outliers(values: Sequence[object], ranks: Sequence[int] | None = None) -> str:
    """Which ranks differ from the rest, by what each of them holds; ``ranks`` are their numbers.

    >>> say_outliers([7, 7, 3, 7])
    'rank 2 differs from the others'
    >>> say_outliers([7, 3])
    'ranks 0 and 1 differ'
    """
    ranks = range(len(values)) if ranks is None else ranks
    value, times = Counter(values).most_common(1)[0]
    others = [rank for rank, held in zip(ranks, values, strict=True) if held != value]
    if 2 * times > len(values):
        return f"{_say_ranks(others)} differ{'s' if len(others) == 1 else ''} from the others"
    first = next(rank for rank, held in zip(ranks, values, strict=True) if held == value)
    return f"ranks {first} and {others[0]} differ"


def _say_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


HASHES = (1 << 19) - 1
"""How many hashes there are: so few that float64 holds the sum of their squares over 16,384 ranks exactly.

A prime: modulo a power of two, a flip of one of an element's high bits (a sign's, an exponent's) adds zero.
"""

_COLUMNS = 1021
_ROWS = 256  # at once, 2 MB of int64
_WEIGHTS = 1 + torch.arange(_COLUMNS, dtype=torch.int64)


def stamp_flags(texts: Iterable[str], device: torch.device) -> Tensor:
    """Numbers that, summed over ranks, tell whether all ranks have the same texts: a hash v, and v²."""
    hashes = [_hash(text) for text in texts]
    return torch.tensor([part for v in hashes for part in (v, v * v)], dtype=torch.float64, device=device)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode()) % HASHES


def checksum(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits and where they stand, [], int64: other bits give another, but for one case in
    half a million, and any single flipped bit does."""
    words = _bits(tensor)
    whole = len(words) // _COLUMNS * _COLUMNS
    sums = torch.zeros(_COLUMNS, dtype=torch.int64, device=words.device)  # a word counts by its column
    for rows in words[:whole].view(-1, _COLUMNS).split(_ROWS):  # sum(dtype=…) takes twelve times as long
        sums += rows.to(torch.int64).sum(0)
    sums[: len(words) - whole] += words[whole:]
    return (sums % HASHES * _WEIGHTS.to(sums.device)).sum() % HASHES


def _bits(tensor: Tensor) -> Tensor:
    words = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)  # of 64 bits, sums wrap
    return tensor.detach().contiguous().reshape(-1).view(words)


def differ(sums: Tensor, ranks: int) -> bool:
    """Whether the texts behind a pair of sums differ: n·Σv² = (Σv)² where all v are equal, and only there."""
    if sums.is_meta:
        return False
    total, squares = (int(part) for part in sums.tolist())
    return ranks * squares != total * total


def agree_on_overflow(found_inf: Tensor, at: Coordinate) -> Walk:
    """Whether ``GradScaler`` found infinity in this step's gradients, the same answer on every rank.

    Must be walked by all ranks of the grid.

    Raises:
        GradientError: on every rank: only some found it.
    """
    count = overflow_flag(found_inf)
    count = yield from sum_over_grid(count, at, Label("overflow flag"))
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
    """One rank's flags, to be summed: is each gradient there; is it not finite; its largest element.

    By ``aminmax``: a norm of infinite order reads a gradient thirty times more slowly on a CPU.
    """
    there = torch.tensor([grad is not None for grad in gradients], dtype=torch.float64, device=device)
    if not gradients:
        return there
    ends = [_ends(grad, device) for grad in gradients]
    smallest, largest = (torch.stack(side) for side in zip(*ends, strict=True))
    peaks = torch.maximum(-smallest, largest)
    return torch.cat([there, (~peaks.isfinite()).double(), peaks.nan_to_num(0.0, 0.0, 0.0)])


def _ends(grad: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element, [], float64; both NaN where there is one."""
    if grad is None or not grad.numel():
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return zero, zero
    grad = torch.view_as_real(grad.detach()) if grad.is_complex() else grad.detach()
    smallest, largest = torch.aminmax(grad)
    return smallest.to(device, torch.float64), largest.to(device, torch.float64)
