"""Lesson 00: a step as a film. A piece of the matrix has the colour of the rank that keeps its momentum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ... import Plan
from ...plan.layout import Box
from ..pictures.holdings import compute_holdings, momentum_holdings, weight_holdings

Letters = Literal["", "before", "momentum", "after"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the matrix, and the rank whose colour it has."""

    box: Box
    keeper: int


@dataclass(frozen=True, slots=True)
class Flight:
    """A piece on its way from one rank to another."""

    piece: Piece
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class FilmMoment:
    """What every rank holds once all ``flights`` have landed, and which reports of the run show it."""

    title: str
    what: str
    held: tuple[tuple[Piece, ...], ...]
    flights: tuple[Flight, ...] = ()
    letters: Letters = ""


def moments_of(plan: Plan) -> list[FilmMoment]:
    """The moments of one step, from the weight before it to the weight after it."""
    grid = plan.grid
    weight = tuple(_pieces(held.boxes, held.rank) for held in weight_holdings(plan))
    kept = tuple(_pieces(held.boxes, held.rank) for held in momentum_holdings(plan))
    columns = tuple(_of(kept, grid.at(rank).group("dp")) for rank in grid.ranks)
    whole = tuple(
        _of(columns, grid.at(held.rank).group("tp")) if held.boxes else columns[held.rank]
        for held in compute_holdings(plan)
    )
    down, across = _sent(plan, "dp", kept), _sent(plan, "tp", columns)
    towards = tuple(
        Flight(Piece(piece.box, peer), peer, rank)
        for rank in grid.ranks
        for peer in grid.at(rank).group("dp")
        if peer != rank
        for piece in kept[rank]
    )
    return [
        FilmMoment("The weight", "tp cuts its columns, dp copies it", weight, (), "before"),
        FilmMoment("The gradient", "from each rank's own data", weight),
        FilmMoment("The momentum", "averaged over dp, and cut over dp", kept, towards, "momentum"),
        FilmMoment("Gather over dp", "each rank has its columns again", columns, down),
        FilmMoment("Gather over tp", "each rank has the whole matrix", whole, across),
        FilmMoment("Orthogonalize", "on each rank, with equal results", whole),
        FilmMoment("Cut again", "each rank keeps its own part", kept),
        FilmMoment("The new weight", "gathered over dp: copies again", columns, down, "after"),
    ]


def _pieces(boxes: Sequence[Box], keeper: int) -> tuple[Piece, ...]:
    return tuple(Piece(box, keeper) for box in boxes if box.numel)


def _of(held: Sequence[tuple[Piece, ...]], ranks: Sequence[int]) -> tuple[Piece, ...]:
    return tuple(piece for rank in ranks for piece in held[rank])


def _sent(plan: Plan, axis: str, held: Sequence[tuple[Piece, ...]]) -> tuple[Flight, ...]:
    """What each rank receives when all ranks along an axis exchange what they hold."""

    def arriving(rank: int) -> Iterator[Flight]:
        for peer in plan.grid.at(rank).group(axis):
            if peer != rank:
                yield from (Flight(piece, peer, rank) for piece in held[peer])

    return tuple(flight for rank in plan.grid.ranks for flight in arriving(rank))
