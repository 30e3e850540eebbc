"""Lesson 06 on real ranks: the groups of a grid, the ranks that answer in them, and mismatched calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ...errors import MismatchError
from ...launching.errors_of_lost_ranks import is_about_lost_rank
from ...launching.launch import launch
from ...worlds.live import gather_objects
from ..exercises.on_real_ranks import say_ranks, watching
from ..my_muon.reference import groups

Groups = Callable[[int, int], Any]
Listed = Sequence[Sequence[int]]
PATIENCE = 4.0
"""Seconds after which a rank gives up waiting if an answer hangs."""


def read_groups(said: object) -> list[list[int]] | None:
    """Groups as lists, in the order given; None if ``said`` is no list of lists of integers."""
    kinds = (list, tuple, set, frozenset, range)
    if not isinstance(said, (list, tuple)) or not all(isinstance(group, kinds) for group in said):
        return None
    found = [list(group) for group in said]
    return found if all(type(rank) is int for group in found for rank in group) else None


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """One rank's result, the groups it made, the error of a wait that timed out, and its number of calls.

    ``outside`` is how many of these calls it made for groups of others.
    """

    returned: Any
    made: tuple[tuple[int, ...], ...]
    stuck: str = ""
    gathers: int = 0
    outside: int = 0


@dataclass(frozen=True, slots=True)
class AnswerRun:
    """What all ranks reported, and the groups that they had to make."""

    wanted: tuple[tuple[int, ...], ...]
    reports: tuple[AnswerReport, ...]

    def expected(self, rank: int) -> list[list[int]]:
        """The correct answer for a rank: the members of its groups, in order."""
        return [list(ranks) for ranks in self.wanted if rank in ranks]


def who_answers(rank: int, all_groups: Listed) -> list[list[int]]:
    """The reference: the ranks that answer in each of this rank's groups. All ranks must call."""
    heard = []
    for ranks in all_groups:
        group = dist.new_group(list(ranks))  # all ranks call, members or not
        if rank in ranks:
            found: list[Any] = [None] * len(ranks)
            dist.all_gather_object(found, rank, group=group)
            heard.append(found)
    return heard


def play_answers(
    function: Callable[[int, Listed], Any], dp: int, tp: int, backend: str = "gloo", timeout: float = PATIENCE
) -> AnswerRun:
    """Call ``function(rank, all groups of the grid)`` on real ranks, and note the groups that each makes."""
    wanted = [ranks for part in groups(dp, tp) for ranks in part]
    settings: dict[str, Any] = {"backend": backend, "timeout": timeout, "output": "quiet"}
    reports = launch(report_answers, dp * tp, args=(function, wanted), **settings)
    return AnswerRun(tuple(map(tuple, wanted)), tuple(reports))


def report_answers(rank: int, function: Callable[[int, Listed], Any], wanted: Listed) -> AnswerReport:
    """One rank's part. A wait that times out is reported; any other error is raised."""
    made, gathers = list[tuple[int, ...]](), list[bool]()

    def note(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if original.__name__ in _HEARING:
            groups_of_others = dist.GroupMember.NON_GROUP_MEMBER
            gathers.append(any(each is groups_of_others for each in (*given, *named.values())))
        elif not named.get("use_local_synchronization"):  # with it, members alone make a group
            ranks = given[0] if given else named.get("ranks")
            made.append(tuple(range(dist.get_world_size()) if ranks is None else ranks))
        return original(*given, **named)

    with watching(note, "new_group", *_HEARING):
        try:
            returned = function(rank, wanted)
        except RuntimeError as error:
            if not is_about_lost_rank(error):
                raise
            return AnswerReport(None, tuple(made), str(error).splitlines()[0], len(gathers))
    return AnswerReport(returned, tuple(made), gathers=len(gathers), outside=sum(gathers))


_HEARING = ("all_gather_object", "all_gather", "all_gather_into_tensor", "all_reduce")
"""The calls by which ranks can learn of each other."""


def say_answers(answers: Sequence[Listed]) -> str:
    lines = ["rank   who answered in its dp group, and in its tp group"]
    return "\n".join([*lines, *(f"{rank:4}   {mine[0]} and {mine[1]}" for rank, mine in enumerate(answers))])


def say_arrivals(found: Sequence[int | str]) -> str:
    """What each rank got from a broadcast, or its error, without memory addresses."""
    said = (got if isinstance(got, str) else f"got {got}" for got in found)
    return "\n".join(re.sub(r" <.*?>", "", f"rank {rank}: {each}") for rank, each in enumerate(said))


def error_or_value(found: int | str) -> int | str:
    return "error" if isinstance(found, str) else found


def say_calls(found: Sequence[Sequence[int] | str]) -> str:
    """Each rank after its two calls: the ranks that it then knows of, or the call in which it timed out."""
    said = (f"timed out in {e}" if isinstance(e, str) else f"returned {list(e)}" for e in found)
    return "\n".join(f"rank {rank}: {each}" for rank, each in enumerate(said))


def agree(wanted: Listed) -> None:
    """Check that all ranks are about to make the same groups. All ranks must call.

    Raises MismatchError, which names the first group that differs, and what each rank wants there.
    """
    found = gather_objects([list(ranks) for ranks in wanted])
    for number, row in enumerate(zip_longest(*found), start=1):
        wants: dict[str, list[int]] = {}
        for rank, ranks in enumerate(row):
            wants.setdefault(str(ranks or "no group"), []).append(rank)
        if len(wants) > 1:
            said = "; on ".join(f"{say_ranks(who)}: {what}" for what, who in wants.items())
            what = f"call {number} of new_group is not the same on all ranks. On {said}."
            raise MismatchError(f"{what}\nMake the same groups, in the same order, on every rank.")


def ring_in_groups(rank: int, dp_groups: Listed, ring_all_gather: Callable[..., Any]) -> str:
    """Run a ring in each dp group, and say whose numbers reached this rank. Must be called by all ranks."""
    made = [dist.new_group(list(ranks)) for ranks in dp_groups]
    number = next(place for place, ranks in enumerate(dp_groups) if rank in ranks)
    place, many = list(dp_groups[number]).index(rank), len(dp_groups[number])
    came = ring_all_gather(torch.tensor([rank]), place, many, made[number])
    return f"rank {rank} received the numbers of ranks {', '.join(str(piece.item()) for piece in came)}"
