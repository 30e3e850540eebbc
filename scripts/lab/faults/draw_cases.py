"""Draws cases. Each family gets its share, and its kinds are equally frequent; the seed decides the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random

from . import broken_saves, job, strikes, tampering
from .case import Case, Starter
from .data_faults import FAULTS

GRIDS = ((4, 1), (2, 2), (1, 4), (2, 1), (3, 1))

SHARES: Mapping[str, float] = {
    "data": 0.45,
    "LocalWorld": 0.08,
    "process": 0.26,
    "spawn": 0.01,
    "files": 0.14,
    "saving": 0.06,
}
"""Each family's share of a campaign."""


def draw(seed: int, size: int, only: str = "") -> list[Case]:
    """The cases of a campaign with this seed and size. A longer campaign does not begin with the cases of a
    shorter one.

    ``only``: only cases of kinds with these words in their name.
    """
    sizes = {family: max(1, round(share * size)) for family, share in SHARES.items()}
    sizes["data"] += size - sum(sizes.values())
    dice = Random(seed)
    found: list[Case] = []
    for family, many in sizes.items():
        cases = _FAMILIES[family](seed, Random(dice.getrandbits(32)), only)
        found += [case for case, _ in zip(cases, range(many), strict=False)]
    return [replace(case, number=number) for number, case in enumerate(found[:size])]


def _in_turn(kinds: list[str], dice: Random, only: str) -> Iterator[str]:
    """Yield every kind once, in random order, before any kind is repeated."""
    chosen = [kind for kind in kinds if only in kind]
    while chosen:
        yield from dice.sample(chosen, len(chosen))


def _data(seed: int, dice: Random, only: str, starter: Starter = "launch") -> Iterator[Case]:
    local = starter == "LocalWorld"
    names = [
        name for name, fault in FAULTS.items() if not (local and (fault.out_of_step or fault.needs_guard))
    ]
    for kind in _in_turn(names, dice, only):
        fault = FAULTS[kind]
        strategies = tuple(job.PLANNED) if local else job.STRATEGIES
        fitting = [
            (name, dp, tp)
            for name in strategies
            for dp, tp in GRIDS
            if fault.fits(name, dp, tp) and (tp == 1 or name != job.OWN_FUNCTIONS)
        ]
        strategy, dp, tp = dice.choice(fitting)
        rank = None if fault.everywhere or kind == "nothing" else dice.randrange(dp * tp)
        phase = "construction" if fault.build else "a step"
        yield Case(seed, 0, kind, phase, rank, strategy, dp, tp, starter, dice.getrandbits(32))


def _process(seed: int, dice: Random, only: str, starter: Starter = "launch") -> Iterator[Case]:
    phases = _in_turn(list(strikes.PHASES), dice, "")
    for kind in _in_turn(list(strikes.STRIKES), dice, only):
        phase = next(phases)
        if kind in strikes.FROM_OUTSIDE and dice.random() < 0.25:
            phase = strikes.STARTING
        strategy = dice.choice(job.STRATEGIES)
        dp, tp = dice.choice([grid for grid in GRIDS if grid[1] == 1 or strategy != job.OWN_FUNCTIONS])
        rank = dice.randrange(dp * tp)
        yield Case(seed, 0, kind, phase, rank, strategy, dp, tp, starter, dice.getrandbits(32))


def _files(seed: int, dice: Random, only: str) -> Iterator[Case]:
    for kind in _in_turn(list(tampering.TAMPERINGS), dice, only):
        yield Case(seed, 0, kind, "loading", None, "zero1 all", 1, 1, "one process", dice.getrandbits(32))


def _saving(seed: int, dice: Random, only: str) -> Iterator[Case]:
    for kind in _in_turn(list(broken_saves.SAVING), dice, only):
        rank = None if kind == broken_saves.TWO_SAVERS else dice.randrange(2)
        strategy = dice.choice(["zero1 all", "owner", "replicated", job.FSDP2])
        if kind == broken_saves.OTHER_VALUES and strategy == job.FSDP2:
            strategy = "owner"  # under FSDP2, no two ranks hold copies
        yield Case(seed, 0, kind, "saving", rank, strategy, 2, 1, "launch", dice.getrandbits(32))


_FAMILIES: Mapping[str, Callable[[int, Random, str], Iterator[Case]]] = {
    "data": _data,
    "LocalWorld": partial(_data, starter="LocalWorld"),
    "process": _process,
    "spawn": lambda seed, dice, only: (
        case for case in _process(seed, dice, only, "spawn") if case.phase != strikes.STARTING
    ),
    "files": _files,
    "saving": _saving,
}
