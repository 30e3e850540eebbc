"""Pictures of lesson 11: layouts side by side, wrong rows, loads. Fills show ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from ...plan.grid import Grid
from ...plan.layout import Shard
from ...plan.matrix import Cut, held_box
from ..pictures.colours import CARD, EMPTY, INK, QUIET, WRONG, rank_colour
from ..pictures.holdings import Piece
from ..pictures.picture import Picture, blank, centred, finish, rectangle, write
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
    journeys = [journey_of(layout) for layout in LAYOUTS]
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
            for rank, held in enumerate(journey.moments[name].held):
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
    said = " ".join(say_moment(journey, name) for journey in journeys for name in _HERO_ROWS)
    return finish(figure, "own_sharding-hero", f"One parameter, three functions, four layouts. {said}")


def _hero_line(journey: Journey, name: str) -> str:
    if name == "assign":
        return "each its own" if journey.layout == "EP" else f"rank {journey.owners[0]}, for all"
    now = journey.moments[name]
    if crossing := sum(map(journey.crosses, now.sent)):
        return f"{len(now.sent)} travel, {crossing} across"
    return _say_pieces(len(now.sent))


def _say_pieces(count: int) -> str:
    return {0: "nothing travels", 1: "1 piece travels"}.get(count, f"{count} pieces travel")


def _draw_matrix(axes: Axes, x: float, y: float, size: float, side: int, held: Sequence[Piece]) -> None:
    rectangle(axes, x, y, size, size, EMPTY, edgecolor=QUIET, linewidth=0.8)
    unit = size / side
    for each in held:
        (top, left), (high, wide) = each.box.offset, each.box.shape
        frame = (x + left * unit, y + top * unit, wide * unit, high * unit)
        rectangle(axes, *frame, rank_colour(each.keeper), linewidth=0.8)


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


LAYOUTS = {
    "FSDP2": "rows cut over all ranks",
    "HSDP": "rows cut within a replica, replicas alike",
    "TP": "columns cut over all ranks",
    "EP": "every rank has an expert of its own",
}
_SIZES = {"FSDP2": {"shard": 4}, "HSDP": {"replicate": 2, "shard": 2}, "TP": {"tp": 4}, "EP": {"ep": 4}}
GRIDS = {layout: Grid.of(**sizes) for layout, sizes in _SIZES.items()}
"""The four ranks of each layout."""
_ROWS: tuple[Cut, ...] = (("shard", Shard(0)),)
CUTS: dict[str, tuple[Cut, ...]] = {"FSDP2": _ROWS, "HSDP": _ROWS, "TP": (("tp", Shard(1)),), "EP": ()}
OWNER = 1


@dataclass(frozen=True, slots=True)
class JourneyMoment:
    """What every rank holds at one moment, and what was just sent. ``said`` has a line per rank."""

    held: tuple[tuple[Piece, ...], ...]
    sent: tuple[Transfer, ...]
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Journey:
    """A parameter's journey under one layout. ``owners`` has, for each rank, the owner of its matrix.

    There is a moment after each of the three functions, by its name.
    """

    layout: str
    grid: Grid
    side: int
    owners: tuple[int, ...]
    moments: Mapping[str, JourneyMoment]

    def crosses(self, sent: Transfer) -> bool:
        """Whether the bytes go from one replica to another."""
        replica, other = (self.grid.at(rank)["replicate"] for rank in (sent.sender, sent.receiver))
        return replica != other


def journey_of(layout: str) -> Journey:
    """The journey of one square matrix; under EP, of one expert per rank."""
    grid = GRIDS[layout]
    ranks, side = grid.ranks, 2 * len(grid.ranks)
    boxes = [held_box((side, side), CUTS[layout], grid.at(rank)) for rank in ranks]
    owners = tuple(ranks) if layout == "EP" else (OWNER,) * len(ranks)
    near = [rank for rank in ranks if grid.at(rank)["replicate"] == grid.at(OWNER)["replicate"]]
    kept = tuple((Piece(box, rank),) for rank, box in enumerate(boxes))
    joined = tuple(Piece(boxes[rank], rank) for rank in near)
    full = {rank: kept[rank] if layout == "EP" else joined for rank in set(owners)}
    gathered = tuple(full.get(rank, ()) for rank in ranks)
    parts = tuple((Piece(boxes[rank], owners[rank]),) for rank in ranks)
    others = [] if layout == "EP" else [rank for rank in ranks if rank != OWNER]
    back = [Transfer(OWNER, rank, 2 * boxes[rank].numel) for rank in others]  # in bfloat16
    out = [Transfer(each.receiver, OWNER, each.nbytes) for each in back if each.receiver in near]

    def told(of_owner: str, of_others: str) -> tuple[str, ...]:
        return tuple(of_owner if rank in full else of_others for rank in ranks)

    gets = tuple(f"gets {box.shape[0]}×{box.shape[1]}" for box in boxes)
    moments = {
        "assign": JourneyMoment(kept, (), told("is the owner", "is not")),
        "gather": JourneyMoment(gathered, tuple(out), told(f"gets {side}×{side}", "gets None")),
        "redistribute": JourneyMoment(parts, tuple(back), gets),
    }
    return Journey(layout, grid, side, owners, moments)


def say_moment(journey: Journey, name: str) -> str:
    now = journey.moments[name]
    sent, crossing = _say_pieces(len(now.sent)), sum(map(journey.crosses, now.sent))
    sent += f", {crossing} of them to another replica" if crossing else ""
    ranks = "; ".join(f"rank {rank} {said}" for rank, said in enumerate(now.said))
    return f"{journey.layout}, {LAYOUTS[journey.layout]}. {name}: {sent}; {ranks}."
