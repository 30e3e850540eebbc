"""Pictures of lesson 10: bills as bars, a matrix on a boundary, and sliders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes

from ... import Grid, replicated, round_robin, zero1
from ..pictures.colours import ADAMW, CARD, EMPTY, INK, MARKED, MUON, QUIET, rank_colour
from ..pictures.picture import Picture, blank, finish, rectangle, tile, write
from ..widgets.shell import Shell, choice, play
from . import costs
from .costs import AVERAGE, BOUNDARY, DTYPES, Gather, StepBill, adamw_bill, bill_of, plans_of

_WIDTH = 900
_PHASES = {
    "1": ("average the gradients", CARD, AVERAGE, "gradient reduce_scatter", "gradient reduce"),
    "2": ("dp gather", MARKED, "dp gather", "gather to owners"),
    "3": ("tp gather", EMPTY, "tp gather"),
    "6": ("share the updates", MARKED, "updates all_reduce", "update broadcast", "scatter from owners"),
    "7": ("share the weights", CARD, "parameter all_gather", "parameter broadcast"),
}
"""The phases of a bill by their numbers: each one's words, its fill, and the names that it has in ledgers."""
_NUMBER = {phase: number for number, (_, _, *phases) in _PHASES.items() for phase in phases}
_LEGEND = " · ".join(f"{number} {said}" for number, (said, *_) in _PHASES.items())
DPS, TPS, MEGABYTES = (2, 4, 8), (1, 2), (5, 25, 100)


def hero() -> Picture:
    """The first picture: bytes that one rank sends in a step of a small GPT, with AdamW and four Muons."""
    grid, matrices = Grid.of(dp=4, tp=2), costs.gpt_matrices()
    plans = {BOUNDARY: zero1(matrices, grid, gather="boundary"), "zero1": zero1(matrices, grid)}
    plans |= {"round_robin": round_robin(matrices, grid), "replicated": replicated(matrices, grid)}
    bills = [adamw_bill(plans["zero1"]), *(bill_of(name, plan) for name, plan in plans.items())]
    size = f"{sum(matrix.numel for matrix in matrices) / 1e6:.0f} million entries"
    return draw_bills(bills, f"Bytes that one rank sends in a step: a GPT of {size}, {grid}", "hero")


def draw_bills(bills: Sequence[StepBill], title: str, name: str) -> Picture:
    """Bills as bars, split into phases. Each later bill shows its ratio to the first."""
    figure, axes = blank(_WIDTH, 78 + 46 * len(bills), title)
    most, words = max(1, *(bill.total for bill in bills)), []
    for number, bill in enumerate(bills):
        times = f"{bill.total / bills[0].total:.2f} ×" if bills[0].total else ""
        _draw_bar(axes, number, 560 * bill.total / most, bill, f"{_bytes(bill.total)}   {times}")
        parts = ", ".join(f"{_PHASES[_NUMBER[phase]][0]} {_bytes(sent)}" for phase, sent in bill.sent.items())
        words.append(f"{bill.name}: {_bytes(bill.total)}, {times} ({parts or 'nothing'})")
    write(axes, 16, 56 + 46 * len(bills), _LEGEND, color=QUIET)
    return finish(figure, f"bill-{name}", f"{title}. {'. '.join(words)}.")


def _draw_bar(axes: Axes, number: int, width: float, bill: StepBill, said: str) -> None:
    x, y, edge = 160.0, 42 + 46 * number, MUON if number else ADAMW
    write(axes, 16, y + 16, bill.name)
    for phase, sent in bill.sent.items():
        wide, phase_number = width * sent / max(1, bill.total), _NUMBER[phase]
        look = {"weight": "bold", "edgecolor": edge, "linewidth": 1.8}
        label = phase_number if wide > 14 else ""
        tile(axes, (x, y, wide, 32), _PHASES[phase_number][1], label, 12, **look)
        x += wide
    write(axes, 160 + width + 8, y + 16, said)


def _bytes(number: float) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number:,.0f} B"


def draw_small_bills(dp: int, tp: int) -> Picture:
    plans = plans_of(dp, tp)
    order = (BOUNDARY, "zero1", "round_robin", "replicated")
    bills = [adamw_bill(plans["zero1"]), *(bill_of(name, plans[name]) for name in order)]
    return draw_bills(bills, f"Bytes that rank 0 sends in a step, dp={dp}, tp={tp}", "small-0")


def draw_boundary(dp: int, tp: int) -> Picture:
    """A bucket of three matrices and its slices; for two gathers, what rank 0 lacks and what it sends."""
    plans = plans_of(dp, tp)
    [bucket] = plans["zero1"].buckets
    at = plans["zero1"].grid.at(0)
    bills = (bill_of(name, plans[name]) for name in ("zero1", BOUNDARY))
    all_sent, boundary_sent = (bill.sent.get("dp gather", 0) // 2 for bill in bills)
    total = bucket.length(bucket.model_layout, at)
    length, wide = total // dp, 710 / total
    figure, axes = blank(_WIDTH, 214)
    rows = {"in the bucket": 16, "kept by": 66, "rank 0, all": 116, "rank 0, boundary": 166}
    for name, y in rows.items():
        write(axes, 12, y + 17, name)
        rectangle(axes, 160, y, total * wide, 34, EMPTY, linewidth=0.8)
    lacked = 0
    for entry, stop in zip(bucket.entries, accumulate(e.size for e in bucket.entries), strict=True):
        start = stop - entry.size
        shared = len(costs.holders((start, stop), length)) > 1
        frame = (160 + start * wide, rows["in the bucket"], entry.size * wide, 34)
        tile(axes, frame, MARKED if shared else CARD, entry.matrix.name, 12, linewidth=1.0)
        if shared and start < length:  # rank 0 lacks the end
            lacked += stop - length
            lacking = (160 + length * wide, rows["rank 0, boundary"], (stop - length) * wide, 34)
            rectangle(axes, *lacking, rank_colour(tp), linewidth=0.8)
    said = f"sends {boundary_sent:,} entries"
    write(axes, 168 + (length + lacked) * wide, rows["rank 0, boundary"] + 17, said)
    for place in range(dp):
        rank = place * tp
        x, each = 160 + place * length * wide, length * wide
        tile(axes, (x, rows["kept by"], each, 34), rank_colour(rank), f"rank {rank}", linewidth=0.8)
        if place:
            rectangle(axes, x, rows["rank 0, all"], each, 34, rank_colour(rank), linewidth=0.8)
            axes.plot([x, x], [50, 204], color=INK, linewidth=1.4, dashes=(4, 3))
    if dp > 1:
        write(axes, 168 + length * wide, rows["rank 0, all"] + 17, f"sends {all_sent:,} entries")
    said = (
        f"A bucket of {total:,} entries in {dp} slices. Rank 0 keeps the first {length:,}. To gather all of "
        f"it on a ring, rank 0 sends {all_sent:,} entries; to gather at boundaries alone, {boundary_sent:,}."
    )
    return finish(figure, f"boundary-{dp}-{tp}", said)


def draw_at(dp: int, tp: int, dtype: str, gather: Gather, bucket: int) -> Picture:
    """AdamW's and Muon's bills for a GPT on a grid, and how much larger or smaller Muon's is."""
    adamw, muon, runs = costs.bills_at(dp, tp, dtype, gather, MEGABYTES[bucket])
    title = f"dp={dp}, tp={tp}, {dtype}, gather {gather}, buckets of {MEGABYTES[bucket]} MB"
    figure, axes = blank(_WIDTH, 300, title)
    most = 2.0 * adamw.total
    for number, bill in enumerate((adamw, muon)):
        _draw_bar(axes, number, 600 * min(1.0, bill.total / most), bill, _bytes(bill.total))
    write(axes, 16, 146, _LEGEND, color=QUIET)
    more = (muon.total / adamw.total - 1) * 100
    less = (muon.state / adamw.state - 1) * 100
    cards = {"bytes sent": f"{more:+.0f} %", "state kept": f"{less:+.0f} %", "ranks a matrix": f"{runs:.1f}"}
    for number, (name, value) in enumerate(cards.items()):
        rectangle(axes, 16 + number * 290, 176, 276, 104, CARD, edgecolor=QUIET, linewidth=1.0)
        write(axes, 32 + number * 290, 200, name, 12, color=QUIET)
        write(axes, 32 + number * 290, 244, value, 26, weight="bold")
    said = (
        f"{title}. AdamW sends {_bytes(adamw.total)}, Muon {_bytes(muon.total)}: {more:+.0f} %. "
        f"State: {less:+.0f} %. On average {runs:.1f} ranks orthogonalize a matrix."
    )
    return finish(figure, f"at-{dp}-{tp}-{bucket}", said)


def explore_bills(live: bool = True) -> Shell | Picture:
    still = draw_at(4, 2, "all fp32", "all", 1)
    buttons = {"dp": choice("dp", DPS), "tp": choice("tp", TPS), "dtype": choice("dtypes", list(DTYPES))}
    buttons["gather"] = choice("gather", ("all", "boundary"))
    return play(draw_at, len(MEGABYTES) - 1, still, live, label="bucket", **buttons)
