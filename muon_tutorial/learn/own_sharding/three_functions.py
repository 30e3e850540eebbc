"""Lesson 11: the reference's three functions for ``Shard(0)``. Every rank imports this, so it is light."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...plan.layout import Shard
from ..my_muon.reference import assign, gather, redistribute

State = dict[str, Any]


def rows_of(rows: int, ranks: int) -> list[int]:
    """The number of rows that each rank holds of a matrix cut by ``Shard(0)``."""
    return list(Shard(0).lengths(rows, ranks))


@dataclass(frozen=True, slots=True)
class ThreeFunctions:
    """The three functions that a reader writes; the reference's by default."""

    assign: Callable[..., Any] = assign
    gather: Callable[..., Any] = gather
    redistribute: Callable[..., Any] = redistribute
