"""All published figures beside the planner's, as one table: for people, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...evidence.tables import Table, TableRow
from . import of_bytes, of_report_001, of_seconds, of_work
from .claim import TOLERANCE, Claim, Comparison, shown

CLAIMS: Sequence[Claim] = (*of_bytes.CLAIMS, *of_work.CLAIMS, *of_seconds.CLAIMS, *of_report_001.CLAIMS)
SAID = {True: "yes", False: "**no**", None: "–"}
OPENING = (
    "Figures that others published about distributed Muon, with their sources, and what this package's "
    "planner, timed world and formulas say of the same. Ours are computed, never typed in. Bytes, "
    "collectives and balance follow from the plan. Seconds follow from a machine's file, whose numbers are "
    "datasheets and estimates: they are predictions. No file was changed to fit a row."
)
READING = (
    f"A row is compared in size (within {TOLERANCE:.0%}) where everything that decides the figure was "
    "published: shapes, and for seconds the hardware and its links. Elsewhere the sign counts alone: "
    "whether ours lies on the same side of the number at which the statement would turn round."
)


def compare_all(claims: Sequence[Claim] = CLAIMS) -> tuple[Comparison, ...]:
    """Every claim with our side computed; some ten seconds."""
    return tuple(Comparison(claim, claim.ours()) for claim in claims)


def table_of(comparisons: Sequence[Comparison], command: str) -> Table:
    """The comparison as a table, with what was assumed and where differences come from below it."""
    rows = tuple(_row(number, one) for number, one in enumerate(comparisons, 1))
    return Table("Published and planned", rows, command, tuple(_notes(comparisons)))


def _row(number: int, one: Comparison) -> TableRow:
    claim = one.claim
    return {
        "row": number,
        "what": claim.what,
        "published": claim.as_published,
        "source": f"[{claim.source}]({claim.link})",
        "the planner": shown(one.ours, claim.unit),
        "ours over theirs": "–" if one.ratio is None else f"{one.ratio:.2f}",
        "same sign": SAID[one.same_sign],
        "within a quarter": SAID[one.within],
    }


def _notes(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield READING
    for number, one in enumerate(comparisons, 1):
        why = f" *Where they differ:* {one.claim.why}" if one.claim.why else ""
        yield f"**{number}.** {one.claim.assumed}{why}"


def summary(comparisons: Sequence[Comparison]) -> str:
    """How many agree, in a sentence for each way of comparing."""
    same = sum(one.same_sign for one in comparisons)
    sized = [one for one in comparisons if one.within is not None]
    near = sum(bool(one.within) for one in sized)
    return (
        f"{same} of {len(comparisons)} rows have the same sign. Of the {len(sized)} that can be compared in "
        f"size, {near} are within a quarter. Every other row says below why not."
    )


def as_markdown(comparisons: Sequence[Comparison], command: str) -> str:
    """The whole page."""
    opening = "Written by `scripts/published.py`; do not edit."
    heading = "# What was published, and what the planner says"
    table = table_of(comparisons, command).markdown()
    return f"{heading}\n\n{opening}\n\n{OPENING}\n\n{summary(comparisons)}\n\n{table}"


def as_data(comparisons: Sequence[Comparison], command: str) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "command": command,
        "rows": [
            {
                "what": one.claim.what,
                "published": one.claim.published,
                "as_published": one.claim.as_published,
                "unit": one.claim.unit,
                "source": one.claim.source,
                "link": one.claim.link,
                "given": one.claim.given,
                "turns": one.claim.turns,
                "side": one.claim.side,
                "ours": one.ours,
                "ratio": one.ratio,
                "same_sign": one.same_sign,
                "within": one.within,
                "assumed": one.claim.assumed,
                "why": one.claim.why,
            }
            for one in comparisons
        ],
    }
