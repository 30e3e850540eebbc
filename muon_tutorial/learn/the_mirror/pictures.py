"""Pictures of lesson 09: the film, the bytes of each phase, hops and their inverses, a reader's step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes

from ... import Coordinate, Grid, Hop, LocalWorld, Owned, Partial, Replicate, Shard
from ...engine.collective import Label, Walk
from ...engine.hops import take
from ...plan.layout import Placement, layout_text, shard_box
from ..pictures.colours import CARD, EMPTY, INK, MARKED, QUIET, RIGHT_FILL, WRONG, WRONG_FILL, rank_colour
from ..pictures.picture import Picture, blank, centred, finish, rectangle, tile, write
from . import replay
from .compare import StepDifference
from .recording import LAST, PHASES, Recording, load

_WIDTH = 900
HOPS: tuple[tuple[Placement, Placement], ...] = (
    (Shard(0), Replicate()),
    (Shard(0), Owned(1)),
    (Replicate(), Owned(1)),
    (Partial(), Replicate()),
    (Partial(), Owned(1)),
    (Partial(), Shard(0)),
)
"""Changes of placement. The reverse change undoes each of them, except those from ``Partial``."""
NO_WAY_BACK = "no way back: the summands are gone"


def hero() -> Picture:
    return replay.film(load())


def bytes_sent(recording: Recording, rank: int, phase: int) -> int:
    """Bytes that a rank sends in one phase on a ring. In a gather, it sends its share ranks − 1 times."""
    total = 0
    for each in (each for each in recording.diaries[rank].sent if each.phase == phase):
        ranks = recording.grid.size(each.axis)
        total += (ranks - 1) * each.size // (ranks if each.kind == "reduce_scatter" else 1)
    return total


def draw_sent(recording: Recording) -> Picture:
    """The bytes that rank 0 sends in each of the seven phases, as bars, with the mirror's axis."""
    amounts = [bytes_sent(recording, 0, phase) for phase in range(1, LAST + 1)]
    figure, axes = blank(_WIDTH, 268)
    write(axes, 16, 20, "Bytes that rank 0 sends in each phase, on a ring", 12)
    each, most = (_WIDTH - 40) / LAST, max(1, *amounts)
    for number, amount in enumerate(amounts):
        x, high = 20 + number * each, 130 * amount / most
        if amount:
            rectangle(axes, x + 14, 190 - high, each - 28, high, rank_colour(0))
        said = f"{amount:,}" if amount else "nothing"
        centred(axes, x + each / 2, 190 - high - 13, said)
        name = PHASES[number].replace(" ", "\n", 1)
        centred(axes, x + each / 2, 232, f"{number + 1} {name}", linespacing=1.15)
    axes.plot([20, _WIDTH - 20], [190, 190], color=INK, linewidth=1.0)
    axes.plot([_WIDTH / 2] * 2, [40, 164], color=INK, linewidth=1.2, dashes=(4, 3), zorder=0)
    sent = [f"{amount:,} bytes" if amount else "nothing" for amount in amounts]
    words = [f"phase {number} ({PHASES[number - 1]}) {said}" for number, said in enumerate(sent, 1)]
    return finish(figure, "sent-0", f"What rank 0 sends on a ring: {'; '.join(words)}.")


def asks_for(src: Placement, dst: Placement) -> str:
    """The collective that a hop asks for on two ranks, found by running it; "nothing" if there is none."""
    if isinstance(src, Partial) and isinstance(dst, Owned):
        return "reduce"
    hop, grid, kinds = Hop("dp", src, dst, (4, 4)), Grid.of(dp=2), list[str]()

    def walk(at: Coordinate) -> Walk:
        whole = isinstance(src, Replicate | Partial) or src == Owned(at.rank)
        held = torch.ones(4 if whole else 2, 4)
        return (yield from take(held, hop, torch.float32, at, Label("hop")))

    world = LocalWorld(grid, observers=[lambda request, at: kinds.append(request.kind)])
    world.run([walk(grid.at(rank)) for rank in grid.ranks])
    return kinds[0] if kinds else "nothing"


def draw_hops() -> Picture:
    """Hops of two ranks in both directions, and the collective that each direction asks for."""
    figure, axes = blank(_WIDTH, 36 + 92 * len(HOPS))
    said = []
    for number, (src, dst) in enumerate(HOPS):
        y, out = 26 + 92 * number, asks_for(src, dst)
        back = NO_WAY_BACK if isinstance(src, Partial) else asks_for(dst, src)
        for x, side in ((20, src), (560, dst)):
            write(axes, x, y, f"{_name(side)}   {layout_text((4, 4), {'dp': side})}", 12, weight="bold")
            _draw_placement(axes, x, y + 14, side)
        for offset, text, start, stop in ((22, out, 352, 540), (52, back, 540, 352)):
            if text == NO_WAY_BACK:
                centred(axes, 446, y + offset + 14, text.replace(": ", ":\n"), color=WRONG)
                continue
            look = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2}
            axes.annotate("", (stop, y + offset), (start, y + offset), arrowprops=look)
            centred(axes, 446, y + offset + (-11 if start < stop else 12), text)
        said.append(f"From {_name(src)} to {_name(dst)}: {out}; back: {back}")
    return finish(figure, "hops", f"The collectives for placement changes on two ranks. {'. '.join(said)}.")


def _draw_placement(axes: Axes, x: float, y: float, side: Placement) -> None:
    for rank in (0, 1):
        left, box = x + rank * 156, shard_box((2, 1), side, rank, 2)
        write(axes, left, y + 22, f"rank {rank}", color=QUIET)
        rectangle(axes, left + 58, y, 84, 44, EMPTY, linewidth=0.8)
        if box.numel:
            word, fill = "half" if box.numel == 1 else "whole", MARKED
            word, fill = ("summand", rank_colour(rank)) if isinstance(side, Partial) else (word, fill)
            tile(axes, (left + 58, y + 22 * box.offset[0], 84, 22 * box.shape[0]), fill, word, linewidth=0.8)


def _name(side: Placement) -> str:
    number = side.dim if isinstance(side, Shard) else side.rank if isinstance(side, Owned) else ""
    return f"{type(side).__name__}({number})"


def draw_difference(difference: StepDifference) -> Picture:
    """A reader's step compared with the reference: one row per rank, one column per phase."""
    ranks = difference.grid.ranks
    figure, axes = blank(_WIDTH, 76 + 40 * len(ranks))
    write(axes, 16, 20, f"Your step on {difference.grid}, beside the package's", 12)
    first, each, words = difference.first, (_WIDTH - 110) / LAST, []
    for phase in range(1, LAST + 1):
        centred(axes, 92 + (phase - 0.5) * each, 50, f"phase {phase}")
    for rank in ranks:
        y = 66 + 40 * rank
        tile(axes, (16, y, 66, 32), rank_colour(rank), f"rank {rank}", linewidth=0.8)
        row = [_state(difference, rank, phase) for phase in range(1, LAST + 1)]
        words.append(f"rank {rank}: {', '.join(row)}")
        for phase, word in enumerate(row, 1):
            is_first = first is not None and (first.rank, first.phase) == (rank, phase)
            fill = {"same": RIGHT_FILL, "wrong": WRONG_FILL, "missing": WRONG_FILL}.get(word, CARD)
            look = {"edgecolor": WRONG if is_first else QUIET, "linewidth": 3.0 if is_first else 0.6}
            rectangle(axes, 92 + (phase - 1) * each, y, each - 8, 32, fill, **look)
            centred(axes, 92 + (phase - 0.5) * each - 4, y + 16, "first wrong" if is_first else word)
    return finish(figure, "difference", f"Your step, phase by phase. {'. '.join(words)}.")


def _state(difference: StepDifference, rank: int, phase: int) -> str:
    """A rank's result in a phase; phases after its first mistake do not count."""
    own, first = [mark for mark in difference.marks if mark.rank == rank], difference.first
    broken = min((mark.phase for mark in own if mark.how != "same"), default=LAST + 1)
    broken = first.phase if first and first.rank == rank else broken
    if phase > broken:
        return "–"
    hows: Sequence[str] = [mark.how for mark in own if mark.phase == phase]
    order = ("wrong", "missing", "same") if phase == broken else ("same",)
    return next((how for how in order if how in hows), "–")
