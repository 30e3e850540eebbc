"""Writes the campaign's table of kinds by verdicts, in Markdown and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .campaign import repeat_line
from .case import GOOD, VERDICTS, Outcome


def counts(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Cases by kind and verdict, with kinds in order of first appearance."""
    found: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        row = found.setdefault(outcome.case.kind, dict.fromkeys(VERDICTS, 0))
        row[outcome.verdict] += 1
    return found


def share_named(outcomes: Sequence[Outcome]) -> float:
    """Of the refusals of a fault on one rank, the fraction that name the rank."""
    one = [o for o in outcomes if o.case.rank is not None and o.verdict != "survived"]
    return sum(o.verdict == "named" for o in one) / len(one) if one else 1.0


def as_data(outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of ``faults.json``: the table, and every outcome that was not good."""
    return {
        "facts": dict(facts),
        "totals": totals(outcomes),
        "named": round(share_named(outcomes), 4),
        "kinds": counts(outcomes),
        "bad": [outcome.as_json() for outcome in outcomes if not outcome.is_good],
    }


def totals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Cases by verdict."""
    return {name: sum(o.verdict == name for o in outcomes) for name in VERDICTS}


def as_markdown(outcomes: Sequence[Outcome], facts: Mapping[str, Any], size: int) -> str:
    """The whole page."""
    shown = [name for name, count in totals(outcomes).items() if count or name in GOOD]
    head = [
        "# Faults",
        "",
        "Written by `scripts/faults.py`; do not edit. Every fault was put into a real run, on purpose.",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        f"- the rank at fault was named in {100 * share_named(outcomes):.1f} % of the refusals of one rank's "
        "fault",
        "",
    ]
    rows: list[list[object]] = [["fault", "cases", *shown], ["---", *["---:"] * (1 + len(shown))]]
    for name, row in (("**all**", totals(outcomes)), *counts(outcomes).items()):
        rows.append([name, sum(row.values()), *(row[verdict] or "" for verdict in shown)])
    table = [f"| {' | '.join(map(str, cells))} |" for cells in rows]
    legend = (
        "*named*: one named error on every rank that could still speak, and it names the rank at fault. "
        "*survived*: equal to `torch.optim.Muon` in one process, to the bit. Everything else is a hole."
    )
    return "\n".join([*head, *table, "", legend, "", *_bad(outcomes, size)]) + "\n"


def _bad(outcomes: Sequence[Outcome], size: int) -> list[str]:
    """The first bad outcome of each kind and verdict, with the command that runs it again."""
    first: dict[tuple[str, str], Outcome] = {}
    for outcome in outcomes:
        if not outcome.is_good:
            first.setdefault((outcome.case.kind, outcome.verdict), outcome)
    if not first:
        return []
    lines = ["## Holes", "", "The first of each kind.", ""]
    for outcome in first.values():
        case = outcome.case
        detail = outcome.detail.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
        lines += [f"- **{outcome.verdict}**: {case}", f"  - {detail}"]
        lines += [f"  - `{repeat_line(case.seed, size, case.number)}`"]
    return lines
