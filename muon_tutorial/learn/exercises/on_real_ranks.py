"""Exercises whose answers run on real ranks. This module handles stubs and failed runs."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from ...errors import MismatchError, RankFailedError
from ...worlds.live import gather_objects
from .judge import Diagnosis, Judge, MistakeError, OpenAnswerError

OTHERS = "The other ranks:"
_OURS = re.compile(rf' at File "{re.escape(str(Path(__file__).parents[2]))}.*')
"""In a report, the end of a rank's line, if it names a place in this package, not in the reader's code."""
_CELL = re.compile(r"Cell In\[\d+\], line")


def say_failure(error: RankFailedError) -> str:
    """A failed launch in a few lines: the error's name and first line, the reader's line, the other ranks."""
    report = str(error).splitlines()
    own = [place for place, line in enumerate(report) if line.strip().startswith("Cell In")]
    yours = report[own[-1] : own[-1] + 2] if own else []
    start = report.index(OTHERS) if OTHERS in report else len(report)
    others = [OTHERS, *_say_together(report[start + 1 :], report[0])] if start < len(report) else []
    lines = [type(error).__name__, report[0], *yours, *others]
    shown = (_CELL.sub("your cell, line", line) for line in lines)
    return "\n".join(textwrap.fill(line, 96, subsequent_indent="    ") for line in shown)


def _say_together(lines: Sequence[str], headline: str) -> list[str]:
    """If lines such as ``rank 1: …`` say the same, merge them into one line that names all their ranks.

    >>> _say_together(["  rank 1: had returned", "  rank 2: E: no", "  rank 3: E: no"], "rank 0 raised E: no")
    ['  rank 1: had returned', '  ranks 2 and 3: the same']
    """
    ranks: dict[str, list[str]] = {}
    for line in lines:
        who, _, state = line.strip().partition(": ")
        state = _OURS.sub("", state)
        ranks.setdefault(state, []).append(who.removeprefix("rank "))
    return [
        f"  {say_ranks(who)}: {'the same' if headline.endswith(f' raised {state}') else state}"
        for state, who in ranks.items()
    ]


def say_ranks(ranks: Sequence[object]) -> str:
    """Ranks in words.

    >>> say_ranks([2]), say_ranks([1, 3]), say_ranks([0, 1, 3])
    ('rank 2', 'ranks 1 and 3', 'ranks 0, 1 and 3')
    """
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


AnyRun = TypeVar("AnyRun")


def is_stub(run: Any) -> bool:
    """Whether any rank returned ``...``, because the reader's function is still a stub."""
    if is_dataclass(run):
        parts = [getattr(run, part.name) for part in fields(run)]
        return bool(getattr(run, "is_open", False)) or any(map(is_stub, parts))
    if isinstance(run, Mapping | list | tuple):
        return any(map(is_stub, run.values() if isinstance(run, Mapping) else run))
    return run is ...


@contextmanager
def watching(see: Callable[..., Any], *names: str) -> Iterator[None]:
    """In the block, calls of these ``torch.distributed`` functions go to ``see(original, *given, …)``."""
    seen: dict[str, Any] = {name: partial(see, getattr(dist, name)) for name in names}
    with patch.multiple(dist, **seen):
        yield


def handed_over(call: Callable[..., Any], *given: Any, **named: Any) -> Tensor:
    """The tensor that a rank hands over in a call of ``torch.distributed``."""
    arguments = inspect.signature(call).bind(*given, **named).arguments
    return arguments["input_tensor" if "input_tensor" in arguments else "tensor"]


def ring_sent(kind: str, size: int, ranks: int) -> int:
    """Bytes that a rank sends in a ring if it hands ``size`` bytes to a collective."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) * size // ranks
    return size * (ranks - 1) if kind.startswith("all_gather") else size * (ranks > 1)


def check_alike(tensor: Tensor | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise MismatchError if a group's ranks bring different sizes or dtypes to their next collective.

    All ranks of the group must call; a rank that has returned calls with None.
    """
    brought = "nothing, as it has returned"
    if tensor is not None:
        brought = f"{tensor.numel():,} entries of {str(tensor.dtype).removeprefix('torch.')}"
    found = gather_objects((dist.get_rank(), brought), group)
    if len({what for _, what in found}) > 1:
        said = "; ".join(f"rank {rank}: {what}" for rank, what in found)
        raise MismatchError(f"all ranks must pass equally many entries of one dtype; here {said}.")


def judge_on_ranks(
    play: Callable[[Any], AnyRun],
    judge_run: Callable[[AnyRun], str | Diagnosis | None],
    say: Callable[[RankFailedError], str] = say_failure,
    hint: str = "",
) -> Judge:
    """A judge that runs the reader's function on real ranks. ``say`` describes a run that failed.

    After a failed run, ``hint`` replaces the exercise's hints, because the error says more than they do.
    """

    def judge(function: Any) -> str | Diagnosis | None:
        if not callable(function):
            raise MistakeError("Give a function.")
        try:
            run = play(function)
        except RankFailedError as error:
            return Diagnosis(say(error), (hint,))
        if is_stub(run):
            raise OpenAnswerError
        return judge_run(run)

    return judge


def run_or_reference(play: Callable[[Any], AnyRun], function: Any, reference: Any) -> AnyRun:
    """Run the reader's function; if it is still a stub, print a note and run the reference."""
    run = play(function)
    if not is_stub(run):
        return run
    print("No answer yet: this is the reference.")
    return play(reference)
