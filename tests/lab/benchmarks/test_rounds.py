"""``scripts/rounds.py`` times a step from when the last rank begins it until the last rank ends it."""

from __future__ import annotations

from scripts.rounds import fastest


def test_the_fastest_step_counts_from_its_last_beginning_to_its_last_end() -> None:
    assert fastest([[(0.0, 2.0), (5.0, 6.0)], [(1.0, 3.5), (5.5, 6.5)]]) == 1.0
