"""Compares published figures about distributed Muon with this package's own figures.

    python scripts/published.py

writes results/published.md (Markdown) and results/published.json: a row for each published figure, with its
source, our own figure, what was assumed, whether the two agree, and the reason if they differ. Nothing is
measured or downloaded; the same version always writes the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.evidence.tables import Table, TableRow
from scripts.files import made, write_whole
from scripts.lab.benchmarks.published.claim import Comparison, Kind, read_claims, shown
from scripts.result_files import answer, result_parser

COMMAND = "python scripts/published.py"
SAID = {True: "yes", False: "**no**", None: "–"}
KINDS: Mapping[Kind, str] = {
    "counted": "Bytes, collectives, elements and operations: exact arithmetic",
    "computed": "Updates: computed on random matrices",
    "seconds": "Seconds: predictions",
}
OPENING = (
    "Figures that others published about distributed Muon, with their sources, and this package's own "
    "figures for the same quantities. Ours are computed, never typed in, and no machine's file was "
    "changed to fit a row. Bytes, collectives and operations are exact arithmetic: agreement shows that "
    "we understood what was published, and no more. Seconds follow from a machine's file of datasheets "
    "and estimates: they are predictions. Every number is compared in size. Where shapes or hardware were "
    "not published in full, we filled in the rest, and the row says *assumed*. If a claim has a direction "
    "(above or below some value), *same sign* compares that, too."
)


def compare_all() -> tuple[Comparison, ...]:
    """Every claim with our computed figure, grouped by kind; takes some twenty seconds."""
    claims = read_claims()
    return tuple(Comparison(claim, claim.ours()) for kind in KINDS for claim in claims if claim.kind == kind)


def tables_of(comparisons: Sequence[Comparison], command: str) -> Iterator[Table]:
    """A table for each kind; below it, the assumptions and the reasons for differences."""
    numbered = list(enumerate(comparisons, 1))
    for kind, title in KINDS.items():
        of_kind = [(number, one) for number, one in numbered if one.claim.kind == kind]
        if of_kind:
            rows, notes = zip(*(_row(number, one) for number, one in of_kind), strict=True)
            yield Table(title, rows, command, notes)


def _row(number: int, one: Comparison) -> tuple[TableRow, str]:
    """A claim's row, and the note on it below the table."""
    claim = one.claim
    why = f" *Where they differ:* {claim.reason}" if claim.why else ""
    assumed = ", assumed" if one.within is not None and claim.given == "some" else ""
    row: TableRow = {
        "row": number,
        "what": claim.what,
        "published": claim.as_published,
        "source": f"[{claim.source}]({claim.link})",
        "ours": shown(one.ours, claim.unit),
        "ours over theirs": "–" if one.ratio is None else f"{one.ratio:.2f}",
        "same sign": SAID[one.same_sign],
        "within a quarter": SAID[one.within] + assumed,
    }
    return row, f"**{number}.** {claim.assumed}{why}"


def summary(comparisons: Sequence[Comparison]) -> str:
    """For each kind of figure, how many agree in size; and over all kinds, how many agree in sign."""
    counts = []
    for kind in KINDS:
        sized = [one for one in comparisons if one.claim.kind == kind and one.within is not None]
        given = [one.within for one in sized if one.claim.given == "all"]
        counts.append(
            f"{kind.capitalize()}: {sum(bool(one.within) for one in sized)} of {len(sized)} rows are within "
            f"a quarter ({sum(map(bool, given))} of the {len(given)} for which nothing had to be assumed)."
        )
    signed = [one for one in comparisons if one.same_sign is not None]
    same = sum(bool(one.same_sign) for one in signed)
    return (
        f"{' '.join(counts)} Of the {len(signed)} rows that claim a direction (above or below some value), "
        f"our figures agree with {same}. Every row that disagrees says why."
    )


def as_markdown(comparisons: Sequence[Comparison], command: str) -> str:
    opening = "Written by `scripts/published.py`; do not edit."
    heading = "# What was published, and what this package says"
    tables = "\n".join(table.markdown() for table in tables_of(comparisons, command))
    return f"{heading}\n\n{opening}\n\n{OPENING}\n\n{summary(comparisons)}\n\n{tables}"


def as_data(comparisons: Sequence[Comparison], command: str) -> dict[str, Any]:
    said = ("kind", "what", "published", "as_published", "unit", "source", "link", "given", "above", "below")
    rows = [
        {name: getattr(one.claim, name) for name in said}
        | {name: getattr(one, name) for name in ("ours", "ratio", "same_sign", "within")}
        | {"assumed": one.claim.assumed, "why": one.claim.reason}
        for one in comparisons
    ]
    return {"command": command, "rows": rows}


def write(asked: argparse.Namespace, _: str) -> None:
    """Compute every row and write both files. The command that they name does not depend on the folder."""
    folder, comparisons = made(asked.out), compare_all()
    data = json.dumps(as_data(comparisons, COMMAND), indent=1, ensure_ascii=False)
    write_whole(folder / "published.md", as_markdown(comparisons, COMMAND))
    write_whole(folder / "published.json", f"{data}\n")
    print(f"wrote {folder / 'published.md'} and published.json: {summary(comparisons)}")


if __name__ == "__main__":
    raise SystemExit(answer("published", result_parser(__doc__), write))
