"""Lesson 14: milliseconds that others measured on GPUs, beside the planner's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocked:
    """A time as published and as planned, in ms or %; ``row`` is its row in results/published.md."""

    row: int
    what: str
    published: float
    planned: float

    @property
    def off(self) -> float:
        """The longer of the two times, divided by the shorter."""
        return max(self.planned / self.published, self.published / self.planned)


CLOCKED = (
    Clocked(19, "one H100, Newton–Schulz of a quarter of the rows", 115.0, 107.8),
    Clocked(20, "4 H100s, the optimizer's whole step", 31.4, 32.4),
    Clocked(36, "8 A800s, Newton–Schulz, one owner a matrix", 261.7, 385.8),
    Clocked(37, "8 H100s, Newton–Schulz of all experts", 523.6, 736.9),
    Clocked(40, "8 H100s, what Muon adds to a step of SGD", 1054.0, 1118.6),
    Clocked(32, "8 GB300s, what Muon adds to a step, in %", 3.94, 10.2),
    Clocked(38, "32 H100s, Newton–Schulz of all experts", 161.0, 184.2),
    Clocked(39, "32 H100s, with updates brought back", 406.0, 378.3),
    Clocked(34, "128 A800s with FSDP, what Muon adds to a step", 101.0, 276.5),
    Clocked(35, "128 A800s with HSDP, what Muon adds to a step", 64.0, 276.5),
    Clocked(31, "256 GB300s, what Muon adds to a step, in %", 2.14, 4.32),
)
"""Published times, from few GPUs to many; a test compares them with results/published.json."""


def say_clocked() -> str:
    """A line for each published time: as measured, as predicted, and the factor between the two."""
    lines = [f"{'ms, or %':48}{'measured':>10}{'planned':>9}{'off by':>8}"]
    for each in CLOCKED:
        lines.append(f"{each.what:48}{each.published:>10,.4g}{each.planned:>9,.4g}{each.off:>7.1f}x")
    return "\n".join(lines)
