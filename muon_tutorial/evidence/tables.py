"""Tables of what was measured, and how they are written: as Markdown, and as plain data for JSON.

Knows text and numbers. A table carries the command that makes it, so that no figure stands without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Cell = str | int | float | None
TableRow = dict[str, Cell]  # by column, the same columns in every row of a table


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title. ``notes`` say what the numbers mean; ``command`` makes the table again."""

    title: str
    rows: tuple[TableRow, ...]
    command: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all([*row] == [*self.rows[0]] for row in self.rows), self.title

    def markdown(self) -> str:
        """The table as GitHub shows it, numbers to the right."""
        columns = [*self.rows[0]]
        rule = ["---" if any(isinstance(row[name], str) for row in self.rows) else "---:" for name in columns]
        lines = [columns, rule, *([_text(cell) for cell in row.values()] for row in self.rows)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "".join(f"\n\n{note}" for note in self.notes)
        return f"## {self.title}\n\n`{self.command}`\n\n{body}{notes}\n"

    def data(self) -> dict[str, object]:
        """The table as JSON can hold it."""
        return {
            "title": self.title,
            "command": self.command,
            "rows": list(self.rows),
            "notes": list(self.notes),
        }


def fitted_overhead(readings: Iterable[tuple[int, int, int]]) -> tuple[float, float]:
    """Fit ``counted = a·tcp + b·writes`` to triples of counted, tcp and writes, each reading weighing alike.

    ``a`` is near 1 (headers of full segments), ``b`` the bytes of headers and acknowledgement of a small one.

    >>> fitted_overhead([(1100, 1000, 1), (2300, 2000, 3), (1300, 1000, 3)])
    (1.0, 100.0)
    """
    import numpy as np

    counted, tcp, writes = (np.array(column, dtype=np.float64) for column in zip(*readings, strict=True))
    design = np.stack((tcp / counted, writes / counted), axis=1)
    (a, b), *_ = np.linalg.lstsq(design, np.ones(len(counted)), rcond=None)
    return round(float(a), 6), round(float(b), 3)


def median_and_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the quarter below and above which a quarter of the values lie."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(last / 2)], ordered[round(last / 4)], ordered[round(3 * last / 4)]


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
