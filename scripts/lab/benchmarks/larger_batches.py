"""How the relative cost of Muon's step depends on the batch: the same contenders, larger global batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muon_tutorial.evidence.tables import Table, TableRow, median_and_spread

from .contenders import Workload
from .measured import AGAINST, Costs, read_all, shares_of, steps_of

PAIRED = ("Muon zero1, DP=4", "Muon zero1, DP=2×TP=2", "Muon owner, FSDP2, DP=4")
SEQUENCES = (4, 16, 64)


def read_batches(
    work: Workload, rounds: int, sequences: Sequence[int] = SEQUENCES, names: Sequence[str] = PAIRED
) -> dict[int, Costs]:
    """The paired contenders' costs on four real ranks, by the number of sequences in the global batch."""
    both = [each for name in names for each in (name, AGAINST[name])]
    return {batch: read_all(replace(work, batch=batch), rounds, both) for batch in sequences}


def batches_table(found: dict[int, Costs], context: int, command: str) -> Table:
    """Muon's step time over AdamW's, for growing batches and the same optimizer step."""
    rows = tuple(
        _row(name, batch, context, costs)
        for name in next(iter(found.values()))
        if name in AGAINST
        for batch, costs in found.items()
    )
    notes = (
        "The optimizer's work does not grow with the batch, forward and backward do: Muon's extra time is a "
        "part of the step that shrinks. Above 1, Muon takes longer. Each round's ratio is taken within the "
        "round, then the median over rounds, with its quartiles.",
    )
    return Table("Where the extra time vanishes: larger batches", rows, command, notes)


def _row(name: str, batch: int, context: int, costs: Costs) -> TableRow:
    mine, its = steps_of(costs[name]), steps_of(costs[AGAINST[name]])
    median, low, high = median_and_spread([a / b for a, b in zip(mine, its, strict=True)])
    return {
        "contender": name,
        "against": AGAINST[name],
        "tokens in the batch": batch * context,
        "step ms": 1e3 * median_and_spread(mine)[0],
        "AdamW's step ms": 1e3 * median_and_spread(its)[0],
        "whole step": median,
        "a quarter below": low,
        "a quarter above": high,
        "optimizer's share": median_and_spread(shares_of(costs[name]))[0],
    }
