"""How the price of Muon's step depends on the work around it: the same contenders, larger global batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..evidence.tables import Cell, Table, median_and_spread
from ..launching.launch import launch
from .contender_costs import read_contenders
from .contenders import Work
from .measured import AGAINST, PATIENCE, RANKS, Readings, shares_of, steps_of

PAIRED = ("Muon zero1, DP=4", "Muon zero1, DP=2×TP=2", "Muon owner, FSDP2, DP=4")
SEQUENCES = (4, 16, 64)


def read_batches(
    work: Work, rounds: int, sequences: Sequence[int] = SEQUENCES, names: Sequence[str] = PAIRED
) -> dict[int, Readings]:
    """What four real ranks read of the paired contenders, by the sequences of the global batch."""
    both = [each for name in names for each in (name, AGAINST[name])]
    found = {}
    for batch in sequences:
        asked = (both, replace(work, batch=batch), rounds)
        by_rank = launch(read_contenders, RANKS, args=asked, timeout=PATIENCE)
        found[batch] = {name: [ranks[i] for ranks in by_rank] for i, name in enumerate(both)}
    return found


def batches_table(found: dict[int, Readings], context: int, command: str) -> Table:
    """Step time of Muon over AdamW's, as the batch grows around the same optimizer step."""
    rows = tuple(
        _row(name, batch, context, readings)
        for name in next(iter(found.values()))
        if name in AGAINST
        for batch, readings in found.items()
    )
    columns = (
        "contender",
        "against",
        "tokens in the batch",
        "step ms",
        "AdamW's step ms",
        "whole step",
        "a quarter below",
        "a quarter above",
        "optimizer's share",
    )
    notes = (
        "The optimizer's work does not grow with the batch, forward and backward do: Muon's extra time is a "
        "part of the step that shrinks. Above 1, Muon takes longer. Each round's ratio is taken within the "
        "round, then the median over rounds, with its quartiles.",
    )
    return Table("Where the extra time vanishes: larger batches", columns, rows, command, notes)


def _row(name: str, batch: int, context: int, readings: Readings) -> tuple[Cell, ...]:
    mine, its = steps_of(readings[name]), steps_of(readings[AGAINST[name]])
    ratio = median_and_spread([a / b for a, b in zip(mine, its, strict=True)])
    share = median_and_spread(shares_of(readings[name]))[0]
    milli = [1e3 * median_and_spread(each)[0] for each in (mine, its)]
    return name, AGAINST[name], batch * context, *milli, *ratio, share
