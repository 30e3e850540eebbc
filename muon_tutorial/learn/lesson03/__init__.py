"""What notebook 03 imports: a collective played message by message on real ranks, its ladder, its checks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.collective import Collective, Kind, Label
from ...errors import RankFailedError
from ...evidence.ledger import ring_bytes
from ...launching.launch import launch
from ...plan.grid import Grid
from ..checks.exercise import Exercise, MistakeError, OpenAnswerError, numbers
from ..inputs import measure
from ..pictures.picture import INK, QUIET, Picture, finish
from ..pictures.spectra import BLUE, card, style
from ..widgets.shell import Shell, show, slider
from . import ladder, messages
from .ladder import Story
from .messages import Held, Message, Note
from .ring import ring_all_gather, ring_reduce_scatter

__all__ = ["ring_all_gather", "ring_reduce_scatter"]

Algorithm = Callable[[Any, int, int], Any]
Bring = Callable[[int, int], Any]
NUMEL = 1024
ITEM = 4
PATIENCE = 8.0
_CELL = re.compile(r"Cell In\[\d+\], line")


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank sends back: what its function returned, its notes, and whom it waited for in vain."""

    returned: Any
    notes: tuple[Note, ...]
    stuck: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """One collective, as all ranks played it."""

    ranks: int
    start: tuple[Held, ...]
    reports: tuple[RankReport, ...]

    @property
    def is_open(self) -> bool:
        """Whether the function was a stub still."""
        return all(report.returned is ... for report in self.reports)

    @property
    def messages(self) -> list[Message]:
        """All messages, in order."""
        return messages.match_messages([report.notes for report in self.reports])

    def bytes_sent(self, rank: int, first: int = 1, last: int = 10**6) -> int:
        """Bytes that a rank sent in some of the rounds."""
        mine = (m for m in self.messages if m.sender == rank and first <= m.round <= last)
        return sum(message.nbytes for message in mine)

    def messages_sent(self, rank: int) -> int:
        """How many messages a rank sent."""
        return sum(message.sender == rank for message in self.messages)


def my_piece(rank: int, ranks: int) -> Tensor:
    """What a rank brings to an all_gather: one piece."""
    return messages.fill(rank, rank, ranks, NUMEL)


def my_pieces(rank: int, ranks: int) -> list[Tensor]:
    """What a rank brings to a sum: all pieces, with numbers of its own."""
    return [messages.fill(piece, rank, ranks, NUMEL) for piece in range(ranks)]


def run_gather(algorithm: Algorithm, ranks: int, backend: str = "gloo", timeout: float = PATIENCE) -> Run:
    """Play ``algorithm(my piece, rank, ranks)`` on real ranks; the reference, where it is still a stub."""
    run = _run(algorithm, my_piece, ranks, backend, timeout)
    if not run.is_open:
        return run
    print("No answer yet: this is the reference.")
    return _run(ring_all_gather, my_piece, ranks, backend, timeout)


def run_sum(algorithm: Algorithm, ranks: int, backend: str = "gloo", timeout: float = PATIENCE) -> Run:
    """Play ``algorithm(my pieces, rank, ranks)`` on real ranks."""
    return _run(algorithm, my_pieces, ranks, backend, timeout)


def _run(algorithm: Algorithm, bring: Bring, ranks: int, backend: str, timeout: float) -> Run:
    reports = launch(play, ranks, args=(algorithm, bring, ranks), backend=backend, timeout=timeout)
    return Run(ranks, tuple(_held(bring(rank, ranks), ranks) for rank in range(ranks)), tuple(reports))


def _held(brought: Tensor | list[Tensor], ranks: int) -> Held:
    pieces = brought if isinstance(brought, list) else [brought]
    contents = (messages.content_of(piece, ranks) for piece in pieces)
    return {content.piece: content.ranks for content in contents if content}


def play(rank: int, algorithm: Algorithm, bring: Bring, ranks: int) -> RankReport:
    """One rank's part, noted. Waiting in vain is reported; any other error is the caller's."""
    mine, stuck, returned = bring(rank, ranks), None, None
    dist.barrier()
    with messages.noting(ranks) as notebook:
        try:
            returned = algorithm(mine, rank, ranks)
        except RuntimeError as error:
            if all(note.stop is not None for note in notebook.notes):
                raise
            stuck = str(error).splitlines()[0]
    return RankReport(returned, tuple(notebook.notes), stuck)


def story_of(run: Run, title: str, what: str, phases: Sequence[tuple[str, int]] = ()) -> Story:
    """A run as its picture tells it; the first message that brings nothing new is marked."""
    found = run.messages
    wrong = messages.first_repeat(run.start, found)
    return Story(title, what, run.start, tuple(found), tuple(phases), wrong)


def gather_story(run: Run) -> Story:
    """An all_gather, to be drawn."""
    what = "a strip shows what a rank holds: grey is nothing yet, 0 is what rank 0 brought, and so on"
    return story_of(run, "all_gather, message by message", what)


def sum_story(run: Run) -> Story:
    """An all_reduce, to be drawn: its two halves are named."""
    rounds = max((message.round for message in run.messages), default=0)
    half = run.ranks - 1
    what = "on an arrow, which piece travels; in a strip, one cell a piece: how many ranks are in its sum"
    phases = (("reduce_\nscatter", half), ("all_\ngather", half)) if rounds == 2 * half else ()
    return story_of(run, "all_reduce, message by message", what, phases)


def picture_of_gather(run: Run, name: str = "lesson03-gather") -> Picture:
    """The ladder of an all_gather."""
    return ladder.draw_ladder(gather_story(run), name=name)


def picture_of_clock(run: Run) -> Picture:
    """The same messages against the clock."""
    return ladder.draw_clock(gather_story(run), "lesson03-clock")


def explore_sum(run: Run, live: bool = True) -> Shell | Picture:
    """A slider through the rounds of an all_reduce."""
    story = sum_story(run)

    def draw(last: int) -> Picture:
        return ladder.draw_ladder(story, last, f"lesson03-sum-{last}")

    still = ladder.draw_ladder(story, name="lesson03-sum")
    return show(draw, still, live, last=slider("round", last=story.rounds))


def say_failure(error: RankFailedError) -> str:
    """A failed launch in a few lines: its name, its first line, your own line, and the other ranks."""
    report = str(error).splitlines()
    own = [place for place, line in enumerate(report) if line.strip().startswith("Cell In")]
    yours = report[own[-1] : own[-1] + 2] if own else []
    start = report.index("The other ranks:") if "The other ranks:" in report else len(report)
    lines = [type(error).__name__, report[0], *yours, *report[start:]]
    shown = (_CELL.sub("your cell, line", line) for line in lines)
    return "\n".join(textwrap.fill(line, 96, subsequent_indent="    ") for line in shown)


def predict(ranks: int) -> Exercise:
    """The guess: how many messages, and how many bytes, does one rank send in an all_gather?"""
    piece = NUMEL * ITEM

    def judge(count: object, size: object) -> str | None:
        if not isinstance(count, int) or not isinstance(size, int):
            return "Give two whole numbers."
        if count != ranks - 1:
            return f"messages: {_why_not_so_many(count, ranks)}"
        if size != count * piece:
            unit = " That counts numbers, and each takes 4 bytes." if size == count * NUMEL else ""
            return f"bytes: a message carries one piece, {piece} bytes; {size} is not {count} of them.{unit}"
        return None

    hints = ("Each rank lacks all pieces but its own, and one arrives in a message.",)
    return Exercise(judge, hints, "Everybody lacks all pieces but one, and sends as many as it receives.")


def _why_not_so_many(count: int, ranks: int) -> str:
    if count == ranks:
        return f"{count} would bring every piece home again; the last one is not needed."
    if count == 1:
        return "after one message each, everybody holds its own piece and a neighbour's, no more."
    most = "less than what everybody lacks" if count < ranks - 1 else "more than anybody lacks"
    return f"{count} is {most}."


def check_ring(ranks: int, backend: str = "gloo", timeout: float = PATIENCE) -> Exercise:
    """The exercise: an all_gather in which each rank passes on to the next what came last, on real ranks."""

    def judge(algorithm: Algorithm) -> str | None:
        try:
            run = _run(algorithm, my_piece, ranks, backend, timeout)
        except RankFailedError as error:
            raise MistakeError(say_failure(error)) from None
        if run.is_open:
            raise OpenAnswerError
        return judge_ring(run)

    hints = (
        "In the first round pass on your own piece; then always the one that has just come.",
        "In round `step` (from 0) rank r sends piece (r - step) % ranks and receives (r - step - 1) % ranks.",
        "isend first, then recv, then wait() for the isend.",
    )
    praise = "Every rank holds every piece, in order, after sending one fewer than there are."
    return Exercise(judge, hints, praise)


def judge_ring(run: Run) -> str | None:
    """What is wrong with a run of an all_gather, or None."""
    judges = (
        _judge_stuck,
        _judge_returned,
        _judge_shared,
        _judge_messages,
        _judge_pieces,
        _judge_ring,
        _judge_waits,
    )
    return next((wrong for judge in judges if (wrong := judge(run))), None)


def _judge_stuck(run: Run) -> str | None:
    if not any(report.stuck for report in run.reports):
        return None
    dropped = [sum(note.verb == "sent" and note.stop is None for note in r.notes) for r in run.reports]
    if max(dropped) > 1:
        many = f"Rank {dropped.index(max(dropped))} has not waited for {max(dropped)} of its isends."
        return f"{many} A handle dropped before its wait() may drop its message, too, and its receiver waits."
    last = {rank: report.notes[-1] for rank, report in enumerate(run.reports) if report.notes}
    if len(last) == run.ranks and all(note.verb == "sent" and note.stop is None for note in last.values()):
        return "The ranks wait for each other: all are in send(), and nobody receives. isend() does not wait."
    if len(last) == run.ranks and all(note.verb == "received" for note in last.values()):
        return f"The ranks wait for each other: {_say_waiting(last)}."
    rank = next(rank for rank, report in enumerate(run.reports) if report.stuck)
    return f"Rank {rank} waited in vain: {_say_waiting({rank: last[rank]})}."


def _say_waiting(last: Mapping[int, Note]) -> str:
    verbs = {"sent": "to send to", "received": "to receive from"}
    return ", ".join(f"rank {rank} waits {verbs[note.verb]} rank {note.peer}" for rank, note in last.items())


def _judge_returned(run: Run) -> str | None:
    for rank, report in enumerate(run.reports):
        pieces = report.returned
        if not isinstance(pieces, (list, tuple)) or len(pieces) != run.ranks:
            came = f"a list of {len(pieces)}" if isinstance(pieces, (list, tuple)) else type(pieces).__name__
            return f"Return a list of {run.ranks} pieces; rank {rank} returned {came}."
    return None


def _judge_shared(run: Run) -> str | None:
    for rank, report in enumerate(run.reports):
        first: dict[int, int] = {}
        for place, piece in enumerate(report.returned):
            twin = first.setdefault(id(piece), place)
            if twin != place:
                what = f"Rank {rank} returned one tensor at places {twin} and {place}"
                return f"{what}: what came last has overwritten the rest. Receive into a new one each round."
    return None


def _judge_messages(run: Run) -> str | None:
    for message in run.messages:
        if message.stop is None:
            return f"Round {message.round}: {message}, and nobody receives it."
    wrong = messages.first_repeat(run.start, run.messages)
    if wrong is None:
        return None
    if wrong.content is None:
        return f"Round {wrong.round}: rank {wrong.sender} sends a buffer that holds no piece yet."
    return f"Round {wrong.round}: {wrong}, who holds it already. What came last is what the next rank lacks."


def _judge_pieces(run: Run) -> str | None:
    for rank, report in enumerate(run.reports):
        for place, piece in enumerate(report.returned):
            content = messages.content_of(piece, run.ranks) if isinstance(piece, Tensor) else None
            if content is None:
                return f"Rank {rank} returned no piece at place {place}: that buffer was never filled."
            if content.piece != place:
                advice = "Pieces stand in the order of ranks, and each needs a tensor of its own."
                return f"Rank {rank} returned piece {content.piece} at place {place}. {advice}"
    return None


def _judge_ring(run: Run) -> str | None:
    if run.ranks > 1 and not run.messages:
        return "The pieces are right, but no message was seen. Send them yourself: dist.isend and dist.recv."
    for message in run.messages:
        if (message.receiver - message.sender) % run.ranks != 1:
            to = (message.sender + 1) % run.ranks
            return f"Round {message.round}: {message}. In a ring it sends to rank {to} only."
    return None


def _judge_waits(run: Run) -> str | None:
    for rank, report in enumerate(run.reports):
        if any(note.stop is None for note in report.notes):
            return f"Rank {rank} returns without wait() for its isend: the bytes may not have left yet."
    return None


def say_bytes(gather: Run, total: Run, rank: int = 0) -> str:
    """What one rank sent, counted, beside what the ring's formula says, and the halves of the all_reduce."""
    ranks, half = total.ranks, total.ranks - 1
    rows: list[tuple[str, int, Kind]] = [
        ("all_gather", gather.bytes_sent(rank), "all_gather"),
        ("all_reduce", total.bytes_sent(rank), "all_reduce"),
        ("  its reduce_scatter", total.bytes_sent(rank, last=half), "reduce_scatter"),
        ("  its all_gather", total.bytes_sent(rank, first=half + 1), "all_gather"),
    ]
    lines = [f"{name:<22}{counted:>12,}{ring_formula(kind, ranks):>12,}" for name, counted, kind in rows]
    return "\n".join([f"{f'bytes rank {rank} sends':<22}{'counted':>12}{'formula':>12}", *lines])


def ring_formula(kind: Kind, ranks: int) -> int:
    """Bytes the ring model says each rank sends for a whole tensor of ``ranks`` pieces."""
    whole, piece = torch.empty(ranks * NUMEL), torch.empty(NUMEL)
    send, receive = {"all_gather": (piece, whole), "reduce_scatter": (whole, piece)}.get(kind, (whole, whole))
    request = Collective(kind, ("dp",), whole.dtype, send, receive.numel(), Label("lesson"))
    return ring_bytes(request, Grid.of(dp=ranks).at(0))


@dataclass(frozen=True, slots=True)
class Wire:
    """A message's time as ``latency + bytes / bandwidth``: seconds, and bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        """What the model says of a message."""
        return self.latency + nbytes / self.bandwidth


def fit_wire(sizes: Sequence[int], seconds: Sequence[float]) -> Wire:
    """The latency and bandwidth that fit measured messages best, by relative error; neither is negative."""
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    design = np.stack([np.ones_like(size), size], axis=1) / time[:, None]
    latency, slope = np.linalg.lstsq(design, np.ones_like(time), rcond=None)[0]
    if latency <= 0 or slope <= 0:
        latency, slope = time.min(), max(time[-1] - time.min(), 1e-12) / size[-1]
    return Wire(float(latency), float(1 / slope))


def say_wire(wire: Wire, sizes: Sequence[int], seconds: Sequence[float]) -> str:
    """A machine's latency and bandwidth, in words."""
    same = wire.latency * wire.bandwidth
    return (
        f"{f'a message of {sizes[0]} bytes':<29}{seconds[0] * 1e6:10,.0f} µs\n"
        f"{f'a message of {sizes[-1] / 1e6:.1f} MB':<29}{seconds[-1] * 1e6:10,.0f} µs\n"
        f"{'latency':<29}{wire.latency * 1e6:10,.0f} µs\n"
        f"{'bandwidth':<29}{wire.bandwidth / 1e9:10.2f} GB/s\n"
        f"{'bytes take as long as latency':<29}{same / 1e3:10,.0f} kB"
    )


def fastest(times: int, work: Callable[..., Any], *arguments: Any) -> float:
    """The shortest of ``times`` runs, in seconds: on a busy machine the others measure its other work."""
    work(*arguments)
    return min(measure.timed(lambda: work(*arguments))[1] for _ in range(times))


def picture_of_wire(wire: Wire, sizes: Sequence[int], seconds: Sequence[float]) -> Picture:
    """Time by bytes, both logarithmic: measured dots, and the model's line."""
    figure = card(760, 400)
    title = "One message between rank 0 and rank 1 of your machine"
    axes = style(figure.add_subplot(), title, "bytes of the message", "microseconds")
    grid = np.geomspace(sizes[0], sizes[-1], 80)
    model = [wire.seconds(size) * 1e6 for size in grid]
    axes.loglog(grid, model, color=INK, label="latency + bytes / bandwidth")
    axes.axhline(wire.latency * 1e6, linestyle="--", color=QUIET, linewidth=1, label="latency alone")
    axes.loglog(sizes, np.asarray(seconds) * 1e6, "o", color=BLUE, label="measured")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(lambda value, place: "")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    axes.legend(fontsize=8.5, frameon=False)
    figure.tight_layout()
    said = "; ".join(f"{size:,} bytes {time * 1e6:.0f} µs" for size, time in zip(sizes, seconds, strict=True))
    words = f"latency {wire.latency * 1e6:.0f} µs, bandwidth {wire.bandwidth / 1e9:.2f} GB/s"
    return finish(figure, "lesson03-wire", f"{title}: {said}. The model: {words}.")


def quiz(ranks: int) -> Exercise:
    """Three numbers that the notebook has measured."""
    half = ranks - 1
    expected = {"rounds": 2 * half, "share": 0.5, "bytes": 2 * half * NUMEL * ITEM}
    why = {
        "rounds": "Look at the last rung of the all_reduce's ladder, or ask total.messages_sent(0).",
        "share": "Divide what rank 0 sent in the all_gather by what it sent in the all_reduce.",
        "bytes": "Ask total.bytes_sent(0).",
    }
    return numbers(expected, why)
