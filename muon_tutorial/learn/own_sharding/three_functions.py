"""Lesson 11: the reference's three functions for ``Shard(0)``. Light to import: every rank does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...plan.layout import Shard
from ..my_muon.reference import assign, gather, redistribute

State = dict[str, Any]


def rows_of(rows: int, ranks: int) -> list[int]:
    """How many rows each rank holds of a matrix that ``Shard(0)`` cuts.

    >>> rows_of(8, 4)
    [2, 2, 2, 2]
    """
    return list(Shard(0).lengths(rows, ranks))


@dataclass(frozen=True, slots=True)
class ThreeFunctions:
    """What a reader writes; the reference's, unless given."""

    assign: Callable[..., Any] = assign
    gather: Callable[..., Any] = gather
    redistribute: Callable[..., Any] = redistribute
