"""Tables of measurements, written as Markdown or as plain data for JSON.

Knows only text and numbers. Each table carries the command that makes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | int | float | None
TableRow = dict[str, Cell]  # a cell for each column; all rows of a table have the same columns


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title. ``notes`` say what the numbers mean; ``command`` makes the table again."""

    title: str
    rows: tuple[TableRow, ...]
    command: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all([*row] == [*self.rows[0]] for row in self.rows), self.title

    def markdown(self) -> str:
        """The table in GitHub's Markdown, with numbers aligned right."""
        columns = [*self.rows[0]]
        rule = ["---" if any(isinstance(row[name], str) for row in self.rows) else "---:" for name in columns]
        lines = [columns, rule, *([_text(cell) for cell in row.values()] for row in self.rows)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "".join(f"\n\n{note}" for note in self.notes)
        return f"## {self.title}\n\n`{self.command}`\n\n{body}{notes}\n"

    def data(self) -> dict[str, object]:
        return {
            "title": self.title,
            "command": self.command,
            "rows": list(self.rows),
            "notes": list(self.notes),
        }


def median_and_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, the lower quartile and the upper quartile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(last / 2)], ordered[round(last / 4)], ordered[round(3 * last / 4)]


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
