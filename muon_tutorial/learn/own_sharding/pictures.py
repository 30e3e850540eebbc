"""Pictures of lesson 11: layouts side by side and as a film, wrong rows, loads. Fills show ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from matplotlib.axes import Axes

from ...plan.grid import Grid
from ...plan.layout import Box, Shard
from ...plan.matrix import Cut, held_box
from ..pictures.colours import CARD, EMPTY, INK, MARKED, QUIET, WRONG, rank_colour
from ..pictures.holdings import Piece
from ..pictures.picture import Picture, arrow, blank, centred, finish, rectangle, tile, write
from ..widgets.shell import Shell, choice, play
from .shared_work import MixedModel, as_the_package
from .transfers import Transfer

_SHORT = {"FSDP2": "rows cut", "HSDP": "rows cut, replicas", "TP": "columns cut", "EP": "an expert each"}
_HERO_ROWS = {
    "assign": "who is to\northogonalize",
    "gather": "pieces →\nthe owner",
    "redistribute": "the update →\neverybody",
}


def hero() -> Picture:
    left, across, down, small = 152, 182, 100, 38
    figure, axes = blank(left + 4 * across + 4, 66 + 3 * down + 46)
    journeys = [journey_of(layout, 2, 2) for layout in LAYOUTS]
    for column, journey in enumerate(journeys):
        x = left + column * across
        write(axes, x, 20, journey.layout, 14, weight="bold")
        write(axes, x, 42, _SHORT[journey.layout], color=QUIET)
    for row, (name, says) in enumerate(_HERO_ROWS.items()):
        y = 66 + row * down
        rectangle(axes, 8, y - 6, left + 4 * across - 12, down - 6, CARD, edgecolor=EMPTY, linewidth=1.0)
        write(axes, 16, y + 16, f"{name}_fn", weight="bold")
        write(axes, 16, y + 50, says, color=QUIET, linespacing=1.25)
        for column, journey in enumerate(journeys):
            now = journey.moments[MOMENTS.index(name)]
            for rank, held in enumerate(now.held):
                x = left + column * across + rank * (small + 6)
                _draw_matrix(axes, x, y + 6, small, journey.side, held)
                if name == "assign" and rank in journey.owners:
                    centred(axes, x + small / 2, y + 25, "★", 15, zorder=6)
            write(axes, left + column * across, y + 66, _hero_line(journey, name))
    bottom = 66 + 3 * down + 20
    for rank in range(4):
        rectangle(axes, left + rank * 88, bottom - 8, 16, 16, rank_colour(rank), linewidth=0.8)
        write(axes, left + rank * 88 + 22, bottom, f"rank {rank}")
    write(axes, left + 4 * 88 + 4, bottom, "★ owner · colour: who brought it, or computed it", color=QUIET)
    said = " ".join(say_moment(journey, MOMENTS.index(name)) for journey in journeys for name in _HERO_ROWS)
    return finish(figure, "own_sharding-hero", f"One parameter, three functions, four layouts. {said}")


def _hero_line(journey: Journey, name: str) -> str:
    if name == "assign":
        return "each its own" if journey.layout == "EP" else f"rank {journey.owners[0]}, for all"
    now = journey.moments[MOMENTS.index(name)]
    if crossing := sum(map(journey.crosses, now.sent)):
        return f"{len(now.sent)} travel, {crossing} across"
    return _say_pieces(len(now.sent))


def _say_pieces(count: int) -> str:
    return {0: "nothing travels", 1: "1 piece travels"}.get(count, f"{count} pieces travel")


def _draw_matrix(
    axes: Axes, x: float, y: float, size: float, side: int, held: Sequence[Piece], look: float = 1.0
) -> None:
    rectangle(axes, x, y, size, size, EMPTY, edgecolor=QUIET, linewidth=0.8 * look)
    unit = size / side
    for each in held:
        (top, left), (high, wide) = each.box.offset, each.box.shape
        frame = (x + left * unit, y + top * unit, wide * unit, high * unit)
        rectangle(axes, *frame, rank_colour(each.keeper), linewidth=0.8 * look)


@cache
def draw_journey(layout: str, moment: int, dp: int = 2, tp: int = 2) -> Picture:
    """All ranks at one moment of a parameter's journey, with an arrow for each piece that was just sent."""
    journey = journey_of(layout, dp, tp)
    now, ranks = journey.moments[moment], journey.grid.world_size
    across = min(200, 860 // ranks)
    size = min(120, across - 24)
    width, top = max(560, across * ranks + 24), 112
    figure, axes = blank(width, top + size + 66, f"{layout}: {LAYOUTS[layout]}", 14, 22, 13)
    begin = 14.0
    for number, name in enumerate(MOMENTS):
        wide = 9.4 * len(name) + 18
        fill, line, weight = (MARKED, 1.4, "bold") if number == moment else (CARD, 0.5, "normal")
        tile(axes, (begin, 38, wide, 24), fill, name, linewidth=line, weight=weight)
        begin += wide + 6
    left = (width - across * ranks) / 2 + (across - size) / 2
    for rank, held in enumerate(now.held):
        x = left + rank * across
        _draw_matrix(axes, x, top, size, journey.side, held, 1.4)
        name, weight = f"rank {rank}", "normal"
        if moment > 0 and rank in journey.owners:
            rectangle(axes, x - 4, top - 4, size + 8, size + 8, "none", linewidth=2.6)
            name, weight = f"★ {name}", "bold"
        centred(axes, x + size / 2, top + size + 20, name, 12, weight=weight)
        centred(axes, x + size / 2, top + size + 44, now.said[rank])
    for each in now.sent:
        ends = [(left + rank * across + size / 2, top - 6) for rank in (each.sender, each.receiver)]
        curve = f"arc3,rad={-0.18 if ends[0][0] < ends[1][0] else 0.18}"
        look: dict[str, Any] = {"linestyle": "--" if journey.crosses(each) else "-", "connectionstyle": curve}
        arrow(axes, *ends, shrinkA=3, shrinkB=3, linewidth=1.7, zorder=8, mutation_scale=15, **look)
    return finish(figure, f"own_sharding-{layout}-{moment}-{dp}-{tp}", say_moment(journey, moment))


def explore_layouts(dp: int = 2, tp: int = 2, live: bool = True) -> Shell | Picture:
    """Choose a layout, and play a parameter's journey. Without a kernel, only FSDP2's gather is shown."""
    draw = partial(draw_journey, dp=dp, tp=tp)
    still = draw_journey("FSDP2", MOMENTS.index("gather"), dp, tp)
    return play(draw, len(MOMENTS) - 1, still, live, interval=1200, layout=choice("layout", list(LAYOUTS)))


def draw_rows(found: Sequence[int | None], lengths: list[int], group: Sequence[int], index: int) -> Picture:
    """The rows that a ``gather_fn`` returned and the correct ones, in the colours of their holders."""
    owners = [rank for rank, length in zip(group, lengths, strict=True) for _ in range(length)]
    high = min(26, 300 / len(owners))
    figure, axes = blank(560, round(78 + high * len(owners)), f"Matrix {index}, row by row", 14, 20)
    for x, title in ((90, "due"), (320, "yours")):
        write(axes, x, 48, title, color=QUIET)
    for row, rank in enumerate(owners):
        y, came = 62 + row * high, found[row]
        rectangle(axes, 90, y, 180, high - 3, rank_colour(rank), linewidth=0.7)
        write(axes, 96, y + high / 2 - 1, f"row {row} of rank {rank}", 11 if high > 18 else 8)
        fill = EMPTY if came is None else rank_colour(owners[came])
        mark, edge, line = ("✗", WRONG, 2.4) if came != row else ("", INK, 0.7)
        rectangle(axes, 320, y, 180, high - 3, fill, linewidth=line, edgecolor=edge)
        said = "no row of it" if came is None else f"row {came}"
        write(axes, 326, y + high / 2 - 1, said, 11 if high > 18 else 8)
        write(axes, 506, y + high / 2 - 1, mark, 12, color=WRONG)
    wrong = ((row, came) for row, came in enumerate(found) if came != row)
    bad = "; ".join(f"row {row} has {'nothing' if came is None else came}" for row, came in wrong)
    return finish(figure, f"own_sharding-rows-{index}", f"Your matrix {index}: {bad}.")


def draw_loads(model: MixedModel, owners: Mapping[int, int]) -> Picture:
    """Each rank's work as a bar of its matrices, and the package's makespan as a line."""
    loads, par = model.loads(dict(owners)), model.makespan(as_the_package(model))
    scale = 560 / max(*loads, par)
    figure, axes = blank(760, 74 + 34 * len(loads), "Work of each rank, in GFLOP", 14, 20)
    ends = [0.0] * len(loads)
    for index, owner in sorted(owners.items()):
        share = (model.loads({index: owner})[owner]) * scale
        rectangle(axes, 90 + ends[owner], 44 + 34 * owner, share, 26, rank_colour(owner), linewidth=0.8)
        ends[owner] += share
    for rank, load in enumerate(loads):
        write(axes, 14, 57 + 34 * rank, f"rank {rank}")
        write(axes, 96 + ends[rank], 57 + 34 * rank, f"{load:.1f}")
    x = 90 + par * scale
    axes.plot([x, x], [38, 46 + 34 * len(loads)], color=INK, linewidth=1.6, linestyle="--")
    centred(axes, x, 56 + 34 * len(loads), f"par {par:.1f}")
    said = ", ".join(f"rank {rank} {load:.1f}" for rank, load in enumerate(loads))
    return finish(figure, "own_sharding-loads", f"GFLOP: {said}; par is {par:.1f} on the busiest rank.")


MOMENTS = ("momentum", "assign", "gather", "Newton–Schulz", "redistribute", "done")
LAYOUTS = {
    "FSDP2": "rows cut over all ranks",
    "HSDP": "rows cut within a replica, replicas alike",
    "TP": "columns cut over all ranks",
    "EP": "every rank has an expert of its own",
}
OWNER = 1


@dataclass(frozen=True, slots=True)
class JourneyMoment:
    """What every rank holds at one moment, and what was just sent. ``said`` has a line per rank."""

    name: str
    held: tuple[tuple[Piece, ...], ...]
    sent: tuple[Transfer, ...]
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Journey:
    """A parameter's journey under one layout. ``owners`` has, for each rank, the owner of its matrix."""

    layout: str
    grid: Grid
    side: int
    owners: tuple[int, ...]
    moments: tuple[JourneyMoment, ...]

    def crosses(self, sent: Transfer) -> bool:
        """Whether the bytes go from one replica to another."""
        replica, other = (self.grid.at(rank)["replicate"] for rank in (sent.sender, sent.receiver))
        return replica != other


def grid_of(layout: str, dp: int, tp: int) -> Grid:
    """The grid of a layout; HSDP has ``tp`` replicas of ``dp`` ranks."""
    if layout == "HSDP":
        return Grid.of(replicate=tp, shard=dp)
    return Grid.of(**{{"FSDP2": "shard", "TP": "tp", "EP": "ep"}[layout]: dp * tp})


def cuts_of(layout: str) -> tuple[Cut, ...]:
    if layout == "EP":
        return ()
    return (("tp", Shard(1)),) if layout == "TP" else (("shard", Shard(0)),)


def journey_of(layout: str, dp: int, tp: int) -> Journey:
    """The journey of one square matrix; under EP, of one expert per rank."""
    grid = grid_of(layout, dp, tp)
    ranks, side = grid.ranks, 2 * len(grid.ranks)
    whole = Box((0, 0), (side, side))
    boxes = [held_box((side, side), cuts_of(layout), grid.at(rank)) for rank in ranks]
    owner = min(OWNER, ranks[-1])
    owners = tuple(ranks) if layout == "EP" else (owner,) * len(ranks)
    near = [rank for rank in ranks if grid.at(rank)["replicate"] == grid.at(owner)["replicate"]]
    kept = tuple((Piece(box, rank),) for rank, box in enumerate(boxes))
    joined = tuple(Piece(boxes[rank], rank) for rank in near)
    full = {rank: kept[rank] if layout == "EP" else joined for rank in set(owners)}
    gathered = tuple(full.get(rank, ()) for rank in ranks)
    computed = tuple((Piece(whole, rank),) if rank in full else () for rank in ranks)
    parts = tuple((Piece(boxes[rank], owners[rank]),) for rank in ranks)
    others = [] if layout == "EP" else [rank for rank in ranks if rank != owner]
    back = [Transfer(owner, rank, 2 * boxes[rank].numel) for rank in others]  # in bfloat16
    out = [Transfer(each.receiver, owner, each.nbytes) for each in back if each.receiver in near]
    shown = "×".join(map(str, whole.shape))

    def told(of_owner: str, of_others: str) -> tuple[str, ...]:
        return tuple(of_owner if rank in full else of_others for rank in ranks)

    has = tuple(f"has {box.shape[0]}×{box.shape[1]}" for box in boxes)
    moments = (
        JourneyMoment("momentum", kept, (), has),
        JourneyMoment("assign", kept, (), told("is the owner", "is not")),
        JourneyMoment("gather", gathered, tuple(out), told(f"gets {shown}", "gets None")),
        JourneyMoment("Newton–Schulz", computed, (), told("computes", "waits")),
        JourneyMoment("redistribute", parts, tuple(back), tuple(each.replace("has", "gets") for each in has)),
    )
    end = replace(moments[-1], name="done", sent=(), said=("adds its part",) * len(ranks))
    return Journey(layout, grid, side, owners, (*moments, end))


def say_moment(journey: Journey, moment: int) -> str:
    now = journey.moments[moment]
    sent, crossing = _say_pieces(len(now.sent)), sum(map(journey.crosses, now.sent))
    sent += f", {crossing} of them to another replica" if crossing else ""
    ranks = "; ".join(f"rank {rank} {said}" for rank, said in enumerate(now.said))
    return f"{journey.layout}, {LAYOUTS[journey.layout]}. Moment {moment}, {now.name}: {sent}; {ranks}."
