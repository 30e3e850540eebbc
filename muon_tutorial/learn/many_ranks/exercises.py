"""Exercises of lesson 14: an unseen grid, how many owners are enough, rings across nodes, a quiz, and the
most ranks with which backward hides the gradients' all_reduce."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...timing.machine import find_machine
from ..exercises.judge import Exercise, guesses, numbers, written
from .scaling import FLOPS, MACHINE, RANKS, TOKENS, UNSEEN, WIDTH, card, step_at, steps


def unseen() -> dict[str, Any]:
    """The planner's numbers for the model that was not shown: the answers to the first prediction."""
    fewer, more, most = (step_at(UNSEEN, ranks) for ranks in (2048, 4096, RANKS[-1]))
    return {
        "idle": more.idle_owners,
        "shrinks": round(fewer.busiest / more.busiest, 2),
        "slower": most.seconds() > more.seconds(),
    }


def unseen_exercise() -> Exercise:
    """The prediction for a grid that no picture has shown."""
    right = unseen()
    fewer = "Each matrix has its own owner now. Does the busiest owner now have less to do than before?"
    slower = "A rank still computes as much and sends as many bytes. What grows with the ranks?"
    return guesses(
        ("idle", right["idle"], "A matrix has one owner. How many owners are there, and how many matrices?"),
        ("shrinks", right["shrinks"], fewer),
        ("slower", right["slower"], slower),
        praise="From here on, each new owner stands idle.",
        within=0.01,
    )


def busiest(seconds: Iterable[float], owners: int) -> float:
    """Seconds of the busiest owner if the costliest matrices are dealt out first, as lesson 11 does."""
    load = [0.0] * owners
    for each in sorted(seconds, reverse=True):
        load[load.index(min(load))] += each
    return max(load)


def enough_owners(seconds: Sequence[float]) -> int:
    """The exercise's reference: the fewest owners with which the costliest matrix alone sets the time.

    >>> enough_owners([4, 2, 2, 1, 1])
    3
    """
    owners = 1
    while busiest(seconds, owners) > max(seconds):
        owners += 1
    return owners


def enough_exercise() -> Exercise:
    """The exercise: the fewest owners with which the costliest matrix alone sets the time."""
    cases = [([4, 2, 2, 1, 1],), ([2, 2, 3, 3, 2, 2, 4],), ([5],), ([3, 3, 2, 2, 2, 6],), ([1, 2, 1, 1, 1],)]
    slips = (
        ("That is one owner for each matrix. Do cheap ones need one each?", len),
        ("A matrix cannot be cut: its owner takes all of it.", lambda each: math.ceil(sum(each) / max(each))),
        ("Begin with one owner.", lambda each: max(2, enough_owners(each))),
    )
    hints = ("A number of owners is enough if lesson.busiest(seconds, owners) <= max(seconds).",)
    praise = "From there on, only a faster Newton–Schulz would help."
    return written(enough_owners, cases, *slips, say="seconds {}", hints=hints, praise=praise)


def reduce_seconds(entries: int, tp: int, card: float) -> float:
    """The exercise's reference: seconds to send a rank's fp32 gradients once, out of a node of 8 cards."""
    return (4 * entries / tp) / (card * 8 / tp)


def wires_exercise() -> Exercise:
    """The exercise: seconds in which gradients leave a node, with tp and without."""
    cases = [(7 * 10**9, tp, 42.5e9) for tp in (1, 8)] + [(10**9, 2, 25e9)]
    slips = (
        ("With tp, a rank holds only 1 / tp of the entries.", lambda n, tp, card: 4 * n / (card * 8 / tp)),
        ("How many cards has each ring in a node? 8 / tp of them.", lambda n, tp, card: 4 * n / tp / card),
        ("Only with tp=1 do all 8 cards carry one ring.", lambda n, tp, card: 4 * n / tp / (8 * card)),
        ("In fp32 each entry is 4 bytes.", lambda n, tp, card: n / (8 * card)),
    )
    say, praise = "{} entries, tp={} and {:.3g} bytes a second", "tp cancels: fewer bytes, and fewer cards."
    return written(reduce_seconds, cases, *slips, say=say, praise=praise)


def quiz() -> Exercise:
    found = steps()
    return numbers(
        ("idle", found[-1].idle_owners, "With tp=8, how many owners are there? A matrix needs only one."),
        ("floor", 1000 * found[-1].floor, "The top picture names it; .floor has it in seconds."),
        ("latency", found[-1].latency / found[0].latency, "Divide the last latency by the first."),
        within=0.02,
    )


def most_ranks(tokens: int, flops: float, bandwidth: float) -> int:
    """The exercise's reference: the most ranks along dp with which backward hides the whole all_reduce.

    With n entries on each of P ranks, backward takes 4·n·tokens / (P·flops) seconds, and the all_reduce
    2·2·n·(P − 1) / (P·bandwidth).

    >>> most_ranks(4_000_000, 400e12, 25e9)
    251
    """
    return 1 + int(tokens * bandwidth / flops)


def found_limits() -> dict[str, Any]:
    """ZeRO-3's limit beside DDP's, and tp's limit in an MLP, over network cards and inside a node."""
    halves = ((2, 1), (4, 2))  # forward, backward: operations for a token and entry, shares sent meanwhile
    zero3 = min(most_ranks(TOKENS, FLOPS, card() * operations / 2 / shares) for operations, shares in halves)
    ddp, links = most_ranks(TOKENS, FLOPS, card()), {"tp_ranks": card()}
    links["tp_ranks over NVLink"] = find_machine(MACHINE).inside.bandwidth
    found = "as many" if zero3 == ddp else "fewer" if zero3 < ddp else "more"
    return {"zero3": found, **{name: most_ranks(WIDTH, FLOPS, link) for name, link in links.items()}}


def most_exercise() -> Exercise:
    """The exercise: the most ranks along dp with which backward hides the all_reduce of bf16 gradients."""
    cases = [(TOKENS, FLOPS, card()), (2**20, 5e14, 1e11), (2**19, 9e14, 5e10), (2**16, 9e14, 1.25e10)]

    def times(factor: float) -> Callable[..., int]:
        return lambda tokens, flops, bandwidth: most_ranks(tokens, flops, factor * bandwidth)

    slips = (
        ("A rank sends P − 1 shares twice, not P.", lambda t, flops, w: int(t * w / flops)),
        ("An all_reduce is a reduce_scatter and an all_gather: each sends P − 1 shares.", times(2)),
        ("An entry has 2 bytes in bf16, and backward takes 4 operations for it.", times(1 / 2)),
        ("Only backward hides it, with 4 operations. Forward has 2 more, and is over.", times(3 / 2)),
        ("With one rank more, the all_reduce takes longer.", lambda *given: 1 + most_ranks(*given)),
        ("Give a whole number, rounded down.", lambda t, flops, w: 1 + t * w / flops),
    )
    hints = (
        "Backward takes 4 · n · tokens / (P · flops) seconds on a rank that holds n entries.",
        "An all_reduce of 2 · n bytes sends 2 · (P − 1) shares, each of 2 · n / P bytes.",
    )
    say, praise = "{} tokens, {:.3g} operations and {:.3g} bytes a second", "The model's size cancels."
    return written(most_ranks, cases, *slips, say=say, hints=hints, praise=praise)


def all_exercises() -> tuple[Exercise, ...]:
    return unseen_exercise(), enough_exercise(), wires_exercise(), quiz(), most_exercise()
