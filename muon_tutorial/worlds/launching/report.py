"""What went wrong in a run, in words: the earliest failing rank first, the others as one line each."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .records import Raised, Whereabouts

# What a rank says when it is another one that failed: its connection broke, or its wait ended.
_ECHO = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out waiting|[Tt]imeout|Socket closed|monitoredBarrier|"
    r"(Read|Write|read|write|recv|send)[: ].*(error|failed)|Application timeout|connectFullMesh failed",
)
_LONGEST_ECHO = 200


@dataclass(frozen=True, slots=True)
class RankStory:
    """What is known of one rank when a run has failed. Times are monotonic seconds."""

    rank: int
    phase: str
    raised: Raised | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    stopped_at: float | None = None
    returned: bool = False
    whereabouts: Whereabouts | None = None

    @property
    def died(self) -> bool:
        """Whether its process ended on its own: after it raised, only by a signal or an exit the run did not ask for."""
        return self.exit_code is not None and self.raised is None

    @property
    def is_echo(self) -> bool:
        """Whether its error only says that another rank failed."""
        return self.raised is not None and bool(_ECHO.search(self.raised.summary))

    @property
    def is_silent(self) -> bool:
        """Whether it still ran, saying nothing, when the run was ended."""
        return self.raised is None and self.exit_code is None and not self.returned


def first_failure(stories: Sequence[RankStory]) -> RankStory:
    """Return the rank that failed first: a failure of its own before a silence, a silence before an echo."""
    own = [story for story in stories if story.died or (story.raised and not story.is_echo)]
    if own:
        return min(own, key=_time_of_failure)
    stopped = [story for story in stories if story.stopped_at is not None]
    if stopped:
        return min(stopped, key=_time_of_failure)
    elsewhere = [story for story in stories if story.is_silent and not _is_communicating(story)]
    if elsewhere:
        return elsewhere[0]
    echoes = [story for story in stories if story.raised]
    return min(echoes, key=_time_of_failure) if echoes else stories[0]


def describe(stories: Sequence[RankStory], timeout: float, labels: Mapping[str, str]) -> str:
    """Return the whole report of a failed run; its first line says it all."""
    first = first_failure(stories)
    others = [_echo_line(story) for story in stories if story is not first]
    parts = [f"rank {first.rank} of {len(stories)} {_what_happened(first, timeout)}{_in_phase(first)}"]
    if first.raised:
        parts.append(first.raised.traceback)
    elif first.whereabouts and first.whereabouts.line:
        parts.append(f"It was at {first.whereabouts.line}")
    if others:
        parts.append("The other ranks:\n" + "\n".join(others))
    return with_labels("\n\n".join(parts), labels)


def describe_unfinished(stories: Sequence[RankStory], what: str, labels: Mapping[str, str]) -> str:
    """Return a report of a run that was ended from outside; `what` says how."""
    lines = [what, *(_echo_line(story) for story in stories)]
    return with_labels("\n".join(lines), labels)


def with_labels(text: str, labels: Mapping[str, str]) -> str:
    """Replace the file names of cells by the names the notebook shows."""
    for name, label in labels.items():
        text = text.replace(f'File "{name}"', label)
    return text


def _time_of_failure(story: RankStory) -> float:
    times = (story.raised.when if story.raised else None, story.ended_at, story.stopped_at)
    return min((time for time in times if time is not None), default=float("inf"))


def _is_communicating(story: RankStory) -> bool:
    return story.whereabouts is not None and story.whereabouts.communicating


def _what_happened(story: RankStory, timeout: float) -> str:
    if story.raised:
        return f"raised {_one_line(story.raised.summary)}"
    if story.exit_code is not None:
        return _death(story.exit_code, story.returned)
    if story.stopped_at is not None:
        return f"was stopped (SIGSTOP) and did not go on within {timeout:g} s"
    return f"did not answer the others within {timeout:g} s"


def _death(code: int, after_returning: bool) -> str:
    when = "after its function returned" if after_returning else "before its function returned"
    if code >= 0:
        return f"ended with exit code {code} {when}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    cause = " (by hand, or by the kernel when memory ran out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{cause} {when}"


def _in_phase(story: RankStory) -> str:
    return f" [in phase: {story.phase}]" if story.phase else ""


def _echo_line(story: RankStory) -> str:
    return f"  rank {story.rank}: {_state(story)}{_in_phase(story)}"


def _state(story: RankStory) -> str:
    if story.raised:
        return _one_line(story.raised.summary)
    if story.exit_code is not None:
        return _death(story.exit_code, story.returned)
    if story.stopped_at is not None:
        return "stopped (SIGSTOP)"
    if story.returned:
        return "had returned"
    if story.whereabouts and story.whereabouts.line:
        verb = "waiting for the others" if story.whereabouts.communicating else "running"
        return f"{verb} at {story.whereabouts.line}"
    return "running"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_ECHO else line[: _LONGEST_ECHO - 1] + "…"
