"""Lesson 12: pipelines. A stage's order has a forward (F) and a backward (B) for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import UsageError

Schedule = Callable[[int, int, int], str]
"""``schedule(stage, stages, micro)``: the order of a stage, such as "FFBB" for two micro-batches."""
Piece = tuple[int, str, int]
"""A piece of work: its stage, F or B, and the number of its micro-batch."""
TIMES = {"F": 1, "B": 2}


def one_f_one_b(stage: int, stages: int, micro: int) -> str:
    """The exercise's reference: some forwards, then a backward and a forward in turn, then more backwards."""
    ahead = min(micro, stages - stage)
    return "F" * ahead + "BF" * (micro - ahead) + "B" * ahead


def most_kept(order: str) -> int:
    """The most micro-batches whose activations a stage keeps at once."""
    return max(order[:n].count("F") - order[:n].count("B") for n in range(len(order) + 1))


def ends_of(schedule: Schedule, stages: int, micro: int) -> dict[Piece, int]:
    """When each piece of work ends. Raises UsageError if stages wait for each other for ever."""
    needs: dict[Piece, list[Piece]] = {}
    for stage in range(stages):
        order, before = schedule(stage, stages, micro), list[Piece]()
        for n, doing in enumerate(order):
            number = order[:n].count(doing)
            last = (stage, "F", number) if stage == stages - 1 else (stage + 1, "B", number)
            neighbour = [last] if doing == "B" else [(stage - 1, "F", number)][:stage]
            needs[stage, doing, number] = before + neighbour
            before = [(stage, doing, number)]
    ends: dict[Piece, int] = {}
    while len(ends) < len(needs):
        ready = [piece for piece in needs if piece not in ends and all(each in ends for each in needs[piece])]
        if not ready:
            raise UsageError("the stages wait for each other for ever")
        for piece in ready:
            ends[piece] = TIMES[piece[1]] + max((ends[each] for each in needs[piece]), default=0)
    return ends
