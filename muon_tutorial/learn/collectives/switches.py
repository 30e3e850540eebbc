"""Lesson 03: a switch for each rank of a ring, send first or receive first, and which settings deadlock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ...errors import RankFailedError
from .messages import content_of
from .on_ranks import CollectiveRun, my_piece, play_on_ranks

First = Literal["send", "receive"]
Setting = tuple[First, ...]
Exchange = Callable[[Any, int, int, Sequence[First]], Any]
SWITCHES = 4
PATIENCE, AMPLE = 3.0, 60.0
EVERY: tuple[Setting, ...] = tuple(itertools.product(("send", "receive"), repeat=SWITCHES))


def moments_of(setting: Setting) -> list[list[int]]:
    """For each moment, the ranks whose message passes; it ends when no message can pass.

    >>> moments_of(("send", "receive", "send", "receive")), moments_of(("send",) * 4)
    ([[0, 2], [1, 3]], [])
    """
    ranks = len(setting)
    left = [["send", "receive"] if first == "send" else ["receive", "send"] for first in setting]
    found = []
    while passing := [
        rank
        for rank in range(ranks)
        if left[rank][:1] == ["send"] and left[(rank + 1) % ranks][:1] == ["receive"]
    ]:
        for rank in passing:
            left[rank].pop(0)
            left[(rank + 1) % ranks].pop(0)
        found.append(passing)
    return found


@dataclass(frozen=True, slots=True)
class SettingRuns:
    """Which settings of the switches real ranks finished, and the seconds after which the others gave up."""

    arrived: dict[Setting, bool]
    patience: float

    @property
    def stuck(self) -> int:
        """The number of settings in which a rank gave up waiting."""
        return sum(not arrived for arrived in self.arrived.values())


def run_every_setting(exchange: Exchange, backend: str = "gloo", patience: float = PATIENCE) -> SettingRuns:
    """Run ``exchange(mine, rank, ranks, first)`` on real ranks for every setting of the switches."""
    runs = {
        setting: run_setting(exchange, setting, backend, AMPLE)
        if moments_of(setting)
        else _run_in_vain(exchange, setting, backend, patience)
        for setting in EVERY
    }
    return SettingRuns({setting: has_arrived(run) for setting, run in runs.items()}, patience)


def _run_in_vain(exchange: Exchange, setting: Setting, backend: str, patience: float) -> CollectiveRun:
    """As ``run_setting``, but if a busy machine could not start the ranks in time, it tries once more."""
    try:
        return run_setting(exchange, setting, backend, patience)
    except RankFailedError:
        return run_setting(exchange, setting, backend, 5 * patience)


def run_setting(
    exchange: Exchange, setting: Setting, backend: str = "gloo", patience: float = PATIENCE
) -> CollectiveRun:
    """Run ``exchange`` on real ranks with one setting of the switches."""
    play = partial(_with_switches, exchange, setting)
    return play_on_ranks(play, my_piece, len(setting), backend, patience)


def _with_switches(exchange: Exchange, setting: Setting, mine: Tensor, rank: int, ranks: int) -> Any:
    return exchange(mine, rank, ranks, setting)


def has_arrived(run: CollectiveRun) -> bool:
    """Whether every rank has the piece of the rank before it."""
    return all(
        isinstance(report.returned, Tensor)
        and (content := content_of(report.returned, run.ranks)) is not None
        and content.piece == (rank - 1) % run.ranks
        for rank, report in enumerate(run.reports)
    )
