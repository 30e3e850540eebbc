"""Lesson 04 on real ranks: updates shared through one flat buffer, and the bytes and seconds of steps.

Each rank fills the buffer with the updates of the matrices that it owns, and leaves zeros elsewhere. An
all_reduce adds the buffers up. Bytes and seconds are measured on steps of ``Muon(strategy="round_robin")``.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ... import Ledger, LiveWorld, Muon, build_mesh, round_robin
from ...errors import MismatchError, RankFailedError
from ...evidence.formulas import ddp_adamw
from ...evidence.ledger import LedgerRow
from ...launching.launch import launch
from ...newton_schulz import zeropower_via_newtonschulz
from ...worlds.live import sum_counts
from ..exercises.on_real_ranks import check_alike, handed_over, is_stub, ring_sent, say_failure, watching
from ..inputs import measure
from ..my_muon.reference import gathered_share as gathered  # noqa: F401  (the exercise's reference)

WIRE = torch.bfloat16
PATIENCE = 8.0
_NOTED = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")
Share = Callable[[list[torch.nn.Parameter], int, int], Any]
Lacking = tuple[tuple[int, str], ...]
"""Missing gradients, as (rank, matrix)."""


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where a matrix's update belongs in the flat buffer."""

    number: int
    name: str
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def owner(self, ranks: int) -> int:
        """The rank that orthogonalizes the matrix; ranks take turns."""
        return self.number % ranks


def gpt_shapes(layers: int, width: int) -> dict[str, tuple[int, int]]:
    """The hidden matrices of a GPT in order, by name: q, k, v, o, up and down of each layer."""
    square, up, down = (width, width), (4 * width, width), (width, 4 * width)
    layer = {"q": square, "k": square, "v": square, "o": square, "up": up, "down": down}
    return {f"{kind}{number}": shape for number in range(1, layers + 1) for kind, shape in layer.items()}


SHAPES = gpt_shapes(layers=2, width=32)

_STOPS = accumulate(rows * columns for rows, columns in SHAPES.values())
PLACES = tuple(
    BufferPlace(number, name, stop - rows * columns, stop)
    for number, ((name, (rows, columns)), stop) in enumerate(zip(SHAPES.items(), _STOPS, strict=True))
)
LENGTH = PLACES[-1].stop


def place_of(name: str) -> BufferPlace:
    return next(place for place in PLACES if place.name == name)


def parameters(
    seed: int, lacking: Sequence[str] = (), *, shapes: Mapping[str, tuple[int, int]] = SHAPES
) -> list[torch.nn.Parameter]:
    """The matrices in order, with their averaged gradients; those in ``lacking`` have no gradient."""
    generator, made = torch.Generator().manual_seed(seed), []
    for name, shape in shapes.items():
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator) / shape[1])
        gradient = torch.randn(shape, generator=generator)
        parameter.grad = None if name in lacking else gradient
        made.append(parameter)
    return made


def share(parameters: list[torch.nn.Parameter], rank: int, ranks: int) -> Tensor:
    """The exercise's reference: owners fill their places, and ranks sum the buffers. All ranks must call."""
    return sum_counts(fill(parameters, rank, ranks))


def fill(parameters: Sequence[torch.nn.Parameter], rank: int, ranks: int, *, skips: bool = False) -> Tensor:
    """A rank's own updates in their places, zeros elsewhere; ``skips`` repeats the early code's mistake."""
    flat, offset = torch.zeros(sum(each.numel() for each in parameters), dtype=WIRE), 0
    for number, parameter in enumerate(parameters):
        mine = number % ranks == rank
        if mine and parameter.grad is not None:
            flat[offset : offset + parameter.numel()] = zeropower_via_newtonschulz(parameter.grad).flatten()
        if not (skips and mine and parameter.grad is None):
            offset += parameter.numel()
    return flat


@functools.cache
def updates(seed: int) -> dict[str, Tensor]:
    """Each matrix's update, flat, computed in one process."""
    with measure.one_thread():
        grads = [parameter.grad for parameter in parameters(seed)]
        found = [zeropower_via_newtonschulz(grad).flatten() for grad in grads if grad is not None]
    return dict(zip(SHAPES, found, strict=True))


@dataclass(frozen=True, slots=True)
class BufferReport:
    """A rank's report: buffers handed to all_reduces, what its function returned, bytes sent on rings."""

    handed: tuple[Tensor, ...]
    returned: Any
    sent: int = 0


@dataclass(frozen=True, slots=True)
class SharingRun:
    seed: int
    lacking: Lacking
    reports: tuple[BufferReport, ...]

    @property
    def ranks(self) -> int:
        return len(self.reports)

    def filled(self, rank: int) -> Tensor:
        """The last whole buffer that a rank gave to an all_reduce or, if it called none, what it returned."""
        handed = self.reports[rank].handed
        whole = [tensor.flatten() for tensor in handed if tensor.numel() == LENGTH]
        found = whole[-1] if whole else None if handed else self.reports[rank].returned
        return _as_buffer(found).to(WIRE)

    def after(self, rank: int) -> Tensor:
        return _as_buffer(self.reports[rank].returned)

    @property
    def sent(self) -> int:
        return max(report.sent for report in self.reports)

    def zeros(self, rank: int) -> int:
        return int((self.filled(rank) == 0).sum())

    def expected(self) -> Tensor:
        """All updates in their places. An update whose owner has no gradient is zero."""
        flat, found = torch.zeros(LENGTH, dtype=WIRE), updates(self.seed)
        for place in PLACES:
            if (place.owner(self.ranks), place.name) not in self.lacking:
                flat[place.slice] = found[place.name]
        return flat

    def wrong_places(self, rank: int) -> list[BufferPlace]:
        differs = self.after(rank) != self.expected()
        return [place for place in PLACES if bool(differs[place.slice].any())]

    def wrong(self) -> list[str]:
        """The matrices whose places are wrong on any rank."""
        wrong = {place for rank in range(self.ranks) for place in self.wrong_places(rank)}
        return [place.name for place in PLACES if place in wrong]

    def agree(self) -> bool:
        """Whether all ranks ended with buffers of the same bits."""
        return not any(bool((self.after(0) != self.after(rank)).any()) for rank in range(self.ranks))

    def writers(self) -> Tensor:
        """For each entry of the buffer, which ranks wrote it before the sum: bit r is set for rank r."""
        buffers = (self.filled(rank) for rank in range(self.ranks))
        flags = ((buffer != 0) & ~buffer.isnan() for buffer in buffers)
        return torch.stack([flag.long() << rank for rank, flag in enumerate(flags)]).sum(0)

    def found(self, rank: int) -> dict[str, int]:
        """Where each update begins in the buffer that a rank handed over; missing updates are left out."""
        buffer, starts = self.filled(rank), dict[str, int]()
        for name, update in updates(self.seed).items():
            for at in (buffer[: len(buffer) - len(update) + 1] == update[0]).nonzero().flatten().tolist():
                if torch.equal(buffer[at : at + len(update)], update):
                    starts.setdefault(name, at)
        return starts


def is_buffer(value: Any) -> bool:
    """Whether ``value`` is a tensor of the flat buffer's shape."""
    return isinstance(value, Tensor) and tuple(value.shape) == (LENGTH,)


def _as_buffer(value: Any) -> Tensor:
    """A buffer as it is; for anything else, a buffer of NaN, which equals no other buffer."""
    return value.detach() if is_buffer(value) else torch.full((LENGTH,), torch.nan, dtype=WIRE)


def owner_lacks(name: str, ranks: int) -> Lacking:
    """The case in which one matrix's gradient is missing on its owner."""
    return ((place_of(name).owner(ranks), name),)


def run_cases(
    function: Share, ranks: int, cases: Sequence[Lacking], *, backend: str = "gloo", seed: int = 0
) -> list[SharingRun]:
    """Run ``function(parameters, rank, ranks)`` on real ranks, once for each case of missing gradients."""
    reports = launch(play, ranks, args=(function, ranks, cases, seed), backend=backend, timeout=PATIENCE)
    cases_of_ranks = zip(*reports, strict=True)
    return [SharingRun(seed, case, mine) for case, mine in zip(cases, cases_of_ranks, strict=True)]


def play(rank: int, share: Share, ranks: int, cases: Sequence[Lacking], seed: int) -> list[BufferReport]:
    reports = []
    for case in cases:
        mine = parameters(seed, [name for lacker, name in case if lacker == rank])
        handed, sent = list[Tensor](), list[int]()
        with noting_traffic(handed, sent):
            returned = share(mine, rank, ranks)
        check_alike(None)
        reports.append(BufferReport(tuple(handed), returned, sum(sent)))
    return reports


def imitate(ranks: int, seed: int = 0, lacking: Lacking = (), *, skips: bool = False) -> SharingRun:
    """What ``share`` does on all ranks, computed here. ``skips`` repeats the early code's mistake."""
    filled = []
    with measure.one_thread():
        for rank in range(ranks):
            absent = [name for lacker, name in lacking if lacker == rank]
            filled.append(fill(parameters(seed, absent), rank, ranks, skips=skips))
    total = torch.stack(filled).sum(0)
    return SharingRun(seed, lacking, tuple(BufferReport((flat,), total) for flat in filled))


@contextmanager
def noting_traffic(handed: list[Tensor], sent: list[int]) -> Iterator[None]:
    """Note buffers handed to all_reduces, and bytes sent; MismatchError if ranks' sizes or dtypes differ."""

    def note(original: Callable[..., Any], *given: Any, **more: Any) -> Any:
        kind, tensor = original.__name__, handed_over(original, *given, **more)
        check_alike(tensor)
        if kind == "all_reduce":
            handed.append(tensor.detach().clone())
        sent.append(ring_sent(kind, tensor.nbytes, dist.get_world_size()))
        return original(*given, **more)

    with watching(note, *_NOTED):
        yield


TIMED = gpt_shapes(layers=2, width=384)
BACKS: tuple[Literal["all_reduce", "all_gather"], ...] = ("all_reduce", "all_gather")


def run_share(
    function: Share, ranks: int, backend: str = "gloo", seed: int = 0, *, lacking: str = ""
) -> SharingRun:
    """Run ``function(parameters, rank, ranks)``. If it is a stub or fails, say so and run the reference.

    ``lacking`` names a matrix whose gradient is missing on its owner.
    """
    cases = [owner_lacks(lacking, ranks) if lacking else ()]
    try:
        [run] = run_cases(function, ranks, cases, backend=backend, seed=seed)
        trouble = "No answer yet" if is_stub(run) else ""
    except RankFailedError as error:
        trouble = f"{say_trouble(error).rstrip('.')}. Your function left no buffers to show"
    if trouble:
        print(textwrap.fill(f"{trouble}: this is the reference.", 100))
        [run] = run_cases(share, ranks, cases, backend=backend, seed=seed)
    return run


def part_of_zeros(run: SharingRun) -> float:
    """The fraction of zeros in all buffers together, before the sum."""
    return round(sum(run.zeros(rank) for rank in range(run.ranks)) / (LENGTH * run.ranks), 4)


def say_outcome(run: SharingRun) -> str:
    """What a test would see of a run, and in the last line what it would miss."""
    rights = [place.name for place in PLACES if place.name not in run.wrong()]
    same = "yes" if run.agree() else "no"
    return (
        f"ranks that returned without an error   {run.ranks}\n"
        f"all of them end with the same bits     {same}\n"
        f"updates the same as in one process     {len(rights)} of {len(PLACES)}"
    )


def say_trouble(error: RankFailedError) -> str:
    """Why a run failed: what the ranks did differently, or the first error."""
    if isinstance(error.original, MismatchError):
        said = str(error.original)
        return said[0].upper() + said[1:]
    lines = say_failure(error).partition("The other ranks:")[0].splitlines()
    return "A run failed: " + " ".join(line.strip() for line in lines[1:])


def named_parameters(seed: int, lacking: Sequence[str] = ()) -> list[tuple[str, torch.nn.Parameter]]:
    return list(zip(SHAPES, parameters(seed, lacking), strict=True))


def say_refusal(error: RankFailedError) -> str:
    return textwrap.fill(f"{type(error.original).__name__}: {error.original}", 100)


def count_bytes(rank: int, ranks: int, seed: int) -> list[LedgerRow]:
    """What sharing one step's updates costs a rank, for both ways to share. Must be called by all ranks."""
    world, counted = LiveWorld(build_mesh({"dp": ranks})), []
    for back in BACKS:
        strategy = partial(round_robin, order="index", back=back)
        muon = Muon(named_parameters(seed), strategy=strategy, mesh=world)
        world.observers[:] = [ledger := Ledger()]
        muon.step()
        rows = {row.phase: row for row in ledger.rows(world.at.rank)}
        counted.append(rows.get(f"updates {back}", LedgerRow(f"updates {back}", 0, 0, 0)))
    return counted


def say_bytes(rows: Sequence[LedgerRow], ranks: int) -> str:
    """A table of one rank's bytes: averaging gradients, and both ways to share updates."""
    sent = {"gradients, all_reduce (float32, formula)": int(ddp_adamw(ranks, LENGTH, g=4))}
    sent |= {f"updates, {row.phase.split()[-1]} (bfloat16, counted)": row.ring for row in rows}
    lines = [f"{'':<44}{'sends, bytes':>14}", *(f"{name:<44}{size:>14,}" for name, size in sent.items())]
    if rows[0].ring:
        lines.append(f"{'all_gather / all_reduce':<44}{rows[1].ring / rows[0].ring:>14.2f}")
    return "\n".join(lines)


def time_steps(rank: int, ranks: int, seed: int, steps: int) -> list[float]:
    """Seconds of the fastest fp32 step, first replicated, then round robin. Must be called by all ranks."""
    world, seconds = LiveWorld(build_mesh({"dp": ranks})), []
    for strategy in ("replicated", "round_robin"):
        muon = Muon(parameters(seed, shapes=TIMED), strategy=strategy, mesh=world, orthogonalize="float32")
        seconds.append(measure.fastest(steps, muon.step))
    return seconds


def say_clock(alone: Sequence[Sequence[float]], pair: Sequence[Sequence[float]]) -> str:
    both, dealt = map(max, zip(*pair, strict=True))
    return (
        f"cores this notebook may use             {measure.cores()}\n"
        f"one process alone                       {alone[0][0] * 1e3:.0f} ms\n"
        f"a pair of ranks, both do everything     {both * 1e3:.0f} ms\n"
        f"a pair of ranks, round robin            {dealt * 1e3:.0f} ms"
    )


def predict_ring(ranks: int) -> int:
    """Bytes a rank sends in an all_gather of updates: all segments but one, each as long as the longest."""
    own = [sum(place.size for place in PLACES if place.owner(ranks) == rank) for rank in range(ranks)]
    return (ranks - 1) * max(own) * 2
