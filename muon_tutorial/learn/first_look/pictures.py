"""Pictures of lesson 00: a matrix on a grid of ranks, and a step as a film. Colours show who keeps what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from matplotlib.axes import Axes

from ... import Grid, Plan
from ...plan.layout import Box
from ..pictures import picture
from ..pictures.colours import EMPTY, QUIET, rank_colour
from ..pictures.holdings import Boxes, Piece, momentum_holdings, name_contents, say_held, weight_holdings
from ..pictures.picture import GridFrame, Picture, Point, blank, centred, finish, rectangle, write
from ..widgets.shell import Shell, play
from .on_ranks import SHAPE, WeightReport, differing_bits, plan_of

Letters = Literal["", "before", "momentum", "after"]


@dataclass(frozen=True, slots=True)
class MovingPiece:
    piece: Piece
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class FilmMoment:
    """What every rank holds once ``flights`` have landed; ``letters`` names the reports that show this."""

    title: str
    what: str
    held: tuple[tuple[Piece, ...], ...]
    flights: tuple[MovingPiece, ...] = ()
    letters: Letters = ""


def moments_of(plan: Plan) -> list[FilmMoment]:
    """The moments of one step, from the weight before it to the weight after it."""
    grid = plan.grid
    weight, kept = _pieces(weight_holdings(plan)), _pieces(momentum_holdings(plan))
    columns = tuple(tuple(each for r in grid.at(rank).group("dp") for each in kept[r]) for rank in grid.ranks)
    joined = [tuple(each for r in grid.at(rank).group("tp") for each in columns[r]) for rank in grid.ranks]
    whole = tuple(joined[rank] if rank in plan.workers(0) else columns[rank] for rank in grid.ranks)
    down, across = _sent(plan, "dp", kept), _sent(plan, "tp", columns)
    pairs = ((rank, peer) for rank in grid.ranks for peer in grid.at(rank).group("dp") if peer != rank)
    towards = tuple(MovingPiece(Piece(each.box, p), p, rank) for rank, p in pairs for each in kept[rank])
    return [
        FilmMoment("The weight", "tp cuts its columns, dp copies it", weight, (), "before"),
        FilmMoment("The gradient", "from each rank's own data", weight),
        FilmMoment("The momentum", "takes up the mean gradient; dp cuts it", kept, towards, "momentum"),
        FilmMoment("Gather over dp", "each rank has its columns again", columns, down),
        FilmMoment("Gather over tp", "each rank has the whole matrix", whole, across),
        FilmMoment("Orthogonalize", "on each rank, with equal results", whole),
        FilmMoment("Cut again", "each rank keeps its own part", kept),
        FilmMoment("The new weight", "gathered over dp: copies again", columns, down, "after"),
    ]


def _pieces(held: Sequence[Boxes]) -> tuple[tuple[Piece, ...], ...]:
    return tuple(tuple(Piece(box, rank) for box in mine if box.numel) for rank, mine in enumerate(held))


def _sent(plan: Plan, axis: str, held: Sequence[tuple[Piece, ...]]) -> tuple[MovingPiece, ...]:
    """The flights of an exchange along an axis: each rank receives what the others hold."""
    pairs = ((rank, peer) for rank in plan.grid.ranks for peer in plan.grid.at(rank).group(axis))
    return tuple(MovingPiece(each, peer, rank) for rank, peer in pairs if peer != rank for each in held[peer])


_BETWEEN = 3
"""Frames drawn while pieces are in flight."""
_GAP = 22


def _place(grid: Grid, left: float, top: float, room: float, most: float = 190.0) -> GridFrame:
    """Where the matrices of all ranks are drawn, within a width of ``room`` pixels."""
    width = min(most, room / grid.size("tp") - _GAP, 460 / grid.size("dp") / SHAPE[0] * SHAPE[1])
    return GridFrame(grid, left, top, width, width * SHAPE[0] / SHAPE[1], (_GAP, 34))


def hero() -> Picture:
    """The first picture of the lesson: one weight on a grid of ranks, each with what it holds."""
    plan = plan_of(2, 2)
    title = f"One weight matrix, {SHAPE[0]} rows × {SHAPE[1]} columns"
    what = "colour: held by this rank · grey: not here"
    return draw_grid(plan.grid, weight_holdings(plan), title, what, "first_look-hero")


def picture_of_momentum(plan: Plan) -> Picture:
    held = momentum_holdings(plan)
    return draw_grid(plan.grid, held, "The momentum", "grey: not here", "first_look-momentum")


def draw_grid(grid: Grid, held: Sequence[Boxes], title: str, what: str, name: str) -> Picture:
    """One matrix per rank of a grid, coloured where the rank holds it, with the grid's axes."""
    place = _place(grid, 84, 108, 780)
    figure, axes = blank(round(max(place.right, 500)), round(place.bottom + 4))
    picture.heading(axes, title, what)
    _write_axes(axes, place)
    for rank, boxes in enumerate(held):
        label = f"rank {rank}"
        if boxes and place.wide >= 180:
            last = max(box.offset[1] + box.shape[1] for box in boxes) - 1
            label += f": columns {min(box.offset[1] for box in boxes)}–{last}"
        _draw_rank(axes, place, rank, [Piece(box, rank) for box in boxes], label)
    said = "; ".join(f"{grid.at(rank)} holds {say_held(boxes, SHAPE)}" for rank, boxes in enumerate(held))
    return finish(figure, name, f"{title}, on a grid of {grid.size('dp')} × {grid.size('tp')} ranks. {said}.")


def _write_axes(axes: Axes, place: GridFrame) -> None:
    write(axes, 16, place.top - 20, "dp↓ tp→", color=QUIET)
    for position in range(place.grid.size("tp")):
        x, _ = place.cell(position)
        centred(axes, x + place.wide / 2, place.top - 20, f"tp {position}", 12, weight="bold")
    for position in range(place.grid.size("dp")):
        _, y = place.cell(position * place.grid.size("tp"))
        write(axes, 16, y + place.high / 2, f"dp {position}", 12, weight="bold")


def _draw_rank(axes: Axes, at: GridFrame, rank: int, held: Sequence[Piece], label: str, **look: Any) -> None:
    """One rank's matrix with a label below. Its pieces have their keepers' colours, and the rest is grey."""
    x, y = at.cell(rank)
    rectangle(axes, x, y, at.wide, at.high, EMPTY, **{"linewidth": 1.4, "zorder": 2, **look})
    for piece in held:
        _draw_piece(axes, at, (x, y), piece)
    write(axes, x, y + at.high + 13, label)


def _draw_piece(axes: Axes, place: GridFrame, corner: Point, piece: Piece, order: int = 3) -> None:
    down, across = place.high / SHAPE[0], place.wide / SHAPE[1]
    (row, column), (rows, columns) = piece.box.offset, piece.box.shape
    where = corner[0] + column * across, corner[1] + row * down, columns * across, rows * down
    rectangle(axes, *where, rank_colour(piece.keeper), linewidth=0.9, zorder=order)


@dataclass(frozen=True, slots=True)
class StepFilm:
    """A step that ran: its moments, a letter for each report's bytes, and how many bits differ."""

    plan: Plan
    moments: tuple[FilmMoment, ...]
    letters: dict[str, tuple[str, ...]]
    differ: int
    bits: int

    @property
    def frames(self) -> list[tuple[int, float]]:
        """For each frame, the number of its moment, and how far its flights have gone, as a fraction."""
        stops = []
        for number, moment in enumerate(self.moments):
            parts = range(1, _BETWEEN + 1) if moment.flights else ()
            stops += [(number, part / (_BETWEEN + 1)) for part in parts] + [(number, 1.0)]
        return [*stops, (len(self.moments), 1.0)]

    @property
    def verdict(self) -> str:
        return f"{self.differ} of {self.bits:,} bits differ"

    def label(self, rank: int, moment: FilmMoment) -> str:
        """A rank's number, and a letter for its bytes if it reported them."""
        letters = self.letters.get(moment.letters)
        return f"rank {rank} · bytes {letters[rank]}" if letters else f"rank {rank}"


def play_step(plan: Plan, reports: Sequence[WeightReport], alone: Any, live: bool = True) -> Shell | Picture:
    """The film of a step on real ranks; it ends with a comparison with one process's weight."""
    film = film_of(plan, reports, alone)
    return play(partial(_draw_frame, film), len(film.frames) - 1, draw_story(film), live, interval=500)


def film_of(plan: Plan, reports: Sequence[WeightReport], alone: Any) -> StepFilm:
    """The film, made from the ranks' reports and from the weight that a single process computed."""
    names, count = ("before", "momentum", "after"), len(reports)
    named = name_contents([getattr(report, name) for name in names for report in reports])
    letters = {name: tuple(named[n * count : (n + 1) * count]) for n, name in enumerate(names)}
    differ = max(differing_bits([report.after for report in reports], alone, plan.grid.size("tp")))
    return StepFilm(plan, tuple(moments_of(plan)), letters, differ, alone.numel() * alone.itemsize * 8)


def _draw_frame(film: StepFilm, moment: int) -> Picture:
    number, gone = film.frames[moment]
    ended = number == len(film.moments)
    now = film.moments[min(number, len(film.moments) - 1)]
    place = _place(film.plan.grid, 84, 108, 780)
    figure, axes = blank(round(max(place.right, 500)), round(place.bottom + 44))
    picture.heading(axes, f"{number + 1 - ended} · {now.title}", now.what)
    _write_axes(axes, place)
    held = now.held if gone == 1 else film.moments[number - 1].held
    for rank in film.plan.grid.ranks:
        bold = {"linewidth": 3.2} if now.title == "Orthogonalize" else {}
        label = film.label(rank, now) if gone == 1 else f"rank {rank}"
        _draw_rank(axes, place, rank, held[rank], label, **bold)
    for flight in now.flights if gone < 1 else ():
        at = picture.between(place.cell(flight.source), place.cell(flight.target), gone)
        _draw_piece(axes, place, at, flight.piece, 5)
    if ended:
        box = (84, place.bottom + 2, place.right - _GAP - 84, 36)
        picture.verdict(axes, box, film.verdict, not film.differ)
    return finish(figure, "first_look-film", _say_frame(film, moment))


def _say_frame(film: StepFilm, moment: int) -> str:
    number, gone = film.frames[moment]
    if number == len(film.moments):
        return f"The end. Compared with one process, {film.verdict}. {_say_letters(film, film.moments[-1])}"
    now = film.moments[number]
    said = f"{number + 1} · {now.title}: {now.what}."
    if gone < 1:
        return f"{said} {len(now.flights)} pieces have gone {gone:.0%} of their way, all at once."
    parts = (f"rank {rank} holds {_say_pieces(pieces)}" for rank, pieces in enumerate(now.held))
    return f"{said} {'; '.join(parts)}. {_say_letters(film, now)}".strip()


def _say_pieces(pieces: Sequence[Piece]) -> str:
    """What a rank holds, in words. Pieces that form whole columns, or the whole matrix, count as one."""
    boxes = tuple(piece.box for piece in pieces)
    left = min((box.offset[1] for box in boxes), default=0)
    right = max((box.offset[1] + box.shape[1] for box in boxes), default=0)
    if boxes and sum(box.numel for box in boxes) == SHAPE[0] * (right - left):
        boxes = (Box((0, left), (SHAPE[0], right - left)),)
    return say_held(boxes, SHAPE)


def _say_letters(film: StepFilm, moment: FilmMoment) -> str:
    letters = film.letters.get(moment.letters)
    said = ", ".join(f"rank {rank} {letter}" for rank, letter in enumerate(letters or ()))
    return f"Equal letters mean equal bytes: {said}." if said else ""


_TOLD = (0, 2, 4, 5, 6, 7)
"""The moments that the still picture shows."""


def draw_story(film: StepFilm) -> Picture:
    grid = film.plan.grid
    columns = 3 if grid.size("tp") < 4 else 2 if grid.size("tp") < 7 else 1
    room = 888 / columns
    first = _place(grid, 12, 0, room - 8, 138)
    down, rows = first.bottom + 92, -(-len(_TOLD) // columns)
    figure, axes = blank(900, round(rows * down + 56))
    for number, chosen in enumerate(_TOLD):
        now = film.moments[chosen]
        left, top = 14 + number % columns * room, number // columns * down
        place = _place(grid, left, top + 72, room - 8, 138)
        write(axes, left, top + 24, f"{chosen + 1} · {now.title}", 13, weight="bold")
        write(axes, left, top + 48, now.what, color=QUIET)
        for rank in grid.ranks:
            label = film.label(rank, now) if place.wide > 40 else ""
            label = label.replace("bytes ", "") if place.wide < 150 else label
            _draw_rank(axes, place, rank, now.held[rank], label)
    picture.verdict(axes, (14, rows * down + 8, 872, 36), film.verdict, not film.differ)
    told = (film.frames.index((chosen, 1.0)) for chosen in _TOLD)
    words = " ".join(_say_frame(film, moment) for moment in told)
    return finish(figure, "first_look-step", f"{words} Compared with one process, {film.verdict}.")
