"""What went wrong in a run, in words: the earliest failing rank first, the others as one line each."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .messages import Raised, Whereabouts

_LONGEST_ECHO = 200  # characters
_NOISE = re.compile(r"\[/\S+:\d+\] ?|\. This is typically caused by .*")  # Gloo's own file names and guesses
_FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\("
    r"SequenceNumber=\d+, OpType=(\w+)(?:, TensorShape=(\[.*?\]), TensorDtypes=(\w+))?"
)


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
    def failed_itself(self) -> bool:
        """Whether it died, or raised something that is not about another rank."""
        died = self.exit_code is not None and self.raised is None
        return died or (self.raised is not None and not self.raised.is_echo)

    @property
    def failed_at(self) -> float:
        """When it failed, as far as known."""
        times = (self.raised.when if self.raised else None, self.ended_at, self.stopped_at)
        return min((time for time in times if time is not None), default=float("inf"))

    @property
    def is_elsewhere(self) -> bool:
        """Whether it still ran when the run was ended, and was not waiting for the others."""
        still_ran = self.raised is None and self.exit_code is None and not self.returned
        return still_ran and not (self.whereabouts is not None and self.whereabouts.communicating)

    @property
    def request(self) -> str:
        """What it asked of the others, if torch's own check (TORCH_DISTRIBUTED_DEBUG=DETAIL) refused that."""
        found = _requests(self.raised.summary) if self.raised else {}
        return found.get(self.rank, "")


def first_failure(stories: Sequence[RankStory]) -> RankStory:
    """Return the rank to name first: one that failed by itself, else one that kept the others waiting.

    Of ranks whose requests did not match it is one that stands alone; else the earliest.
    """
    odd = _odd_ones_out(stories)
    own = [story for story in stories if story.failed_itself]
    stopped = [story for story in stories if story.stopped_at is not None]
    elsewhere = [story for story in stories if story.is_elsewhere]
    echoes = [story for story in stories if story.raised]
    candidates = next(filter(None, (odd, own, stopped, elsewhere, echoes)), stories)
    return min(candidates, key=lambda story: story.failed_at)


def describe(stories: Sequence[RankStory], timeout: float, labels: Mapping[str, str]) -> str:
    """Return the whole report of a failed run; its first line says it all. `labels` are the cells' names."""
    first = first_failure(stories)
    parts = [_headline(first, len(stories), timeout) + _in_phase(first)]
    if first.raised:
        parts.append(first.raised.traceback)
    elif first.whereabouts and first.whereabouts.line:
        parts.append(f"It was at {first.whereabouts.line}")
    if len(stories) > 1:
        others = [_state_line(story) for story in stories if story is not first]
        parts.append("\n".join(["The other ranks:", *others]))
    return _with_labels("\n\n".join(parts), labels)


def describe_unfinished(stories: Sequence[RankStory], what: str, labels: Mapping[str, str]) -> str:
    """Return a report of a run that was ended from outside; `what` says how."""
    return _with_labels("\n".join([what, *map(_state_line, stories)]), labels)


def _odd_ones_out(stories: Sequence[RankStory]) -> list[RankStory]:
    """Return the ranks with the rarest request, if every failure is that requests did not match."""
    failed = [story for story in stories if story.failed_itself]
    if not failed or not all(story.request for story in failed):
        return []
    counts = Counter(story.request for story in failed)
    return [story for story in failed if counts[story.request] == min(counts.values())]


def _requests(text: str) -> dict[int, str]:
    """Return what each rank asked for, from the message of a mismatch."""
    return {
        int(rank): f"{kind} of {shape or 'nothing'} {dtype or ''}".strip()
        for rank, kind, shape, dtype in _FINGERPRINT.findall(text)
    }


def _headline(story: RankStory, world_size: int, timeout: float) -> str:
    subject = f"rank {story.rank} of {world_size}"
    if story.raised and story.raised.is_echo:
        return f"no rank failed by itself: {subject} waited for the others in vain: {_summary(story.raised)}"
    if story.raised:
        return f"{subject} raised {_summary(story.raised)}"
    if story.exit_code is not None:
        return f"{subject} {_death(story.exit_code, story.returned)}"
    if story.stopped_at is not None:
        return f"{subject} was stopped (SIGSTOP) and did not go on within {timeout:g} s"
    return f"{subject} did not answer the others within {timeout:g} s"


def _state_line(story: RankStory) -> str:
    return f"  rank {story.rank}: {_state(story)}{_in_phase(story)}"


def _state(story: RankStory) -> str:
    if story.raised:
        return _summary(story.raised)
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


def _death(code: int, after_returning: bool) -> str:
    when = "after its function returned" if after_returning else "before its function returned"
    if code >= 0:
        return f"ended with exit code {code} {when}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    cause = " (by hand, or by the kernel when memory ran out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{cause} {when}"


def _summary(raised: Raised) -> str:
    requests = _requests(raised.summary)
    if len(requests) > 1:
        asked = ", ".join(f"rank {rank} asked for {request}" for rank, request in requests.items())
        return f"{raised.summary.split(':')[0]}: requests do not match: {asked}"
    line = _NOISE.sub("", " ".join(raised.summary.split()))
    return line if len(line) <= _LONGEST_ECHO else line[: _LONGEST_ECHO - 1] + "…"


def _in_phase(story: RankStory) -> str:
    return f" [in phase: {story.phase}]" if story.phase else ""


def _with_labels(text: str, labels: Mapping[str, str]) -> str:
    for name, label in labels.items():
        text = text.replace(f'File "{name}"', label)
    return text
