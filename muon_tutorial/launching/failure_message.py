"""Writes the message of a failed launch: which rank failed first, how it failed, and what the others did."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence

from .errors_of_lost_ranks import in_one_line
from .messages import RankRaised
from .ship_functions import cell_labels
from .watch_ranks import WatchedRank

_FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\("
    r"SequenceNumber=\d+, OpType=(\w+)(?:, TensorShape=(\[.*?\]), TensorDtypes=(\w+))?"
)


def first_failure(ranks: Sequence[WatchedRank]) -> WatchedRank:
    """Return the rank that the report names first.

    If the ranks' requests did not match, that is a rank with the rarest request; otherwise a rank that failed
    by itself; otherwise a rank that kept the others waiting. Of several such ranks, the first that failed is
    named.
    """
    odd = _odd_ones_out(ranks)
    own = [rank for rank in ranks if rank.failed_itself]
    stopped = [rank for rank in ranks if rank.stopped_at is not None]
    elsewhere = [  # ranks that still ran when the launch was ended, and were not waiting for the others
        rank for rank in ranks if not rank.is_done and not (rank.location and rank.location.communicating)
    ]
    raised = [rank for rank in ranks if rank.raised]
    left = [rank for rank in ranks if rank.returned is not None]
    if 2 * len(left) >= len(ranks):  # then the few that still wait probably made one request too many
        left = []
    candidates = next(filter(None, (odd, own, stopped, elsewhere, left, raised)), ranks)
    return min(candidates, key=_failed_at)


def describe_failure(ranks: Sequence[WatchedRank], timeout: float) -> str:
    """Return the full report of a failed launch; its first line is a summary."""
    first = first_failure(ranks)
    left = all(rank.returned is not None for rank in ranks if rank is not first)
    parts = [_headline(first, len(ranks), timeout, left) + _in_phase(first)]
    if first.raised:
        parts.append(first.raised.traceback)
    elif first.location and first.location.line:
        parts.append(f"It was at {first.location.line}")
    others = [_state_line(rank) for rank in ranks if rank is not first]
    if others:
        parts.append("\n".join(["The other ranks:", *others]))
    return _with_cell_names("\n\n".join(parts))


def describe_unfinished(ranks: Sequence[WatchedRank], what: str) -> str:
    """Return the report of a launch that was ended from outside; `what` is its first line."""
    return _with_cell_names("\n".join([what, *map(_state_line, ranks)]))


def _failed_at(rank: WatchedRank) -> float:
    times = (rank.raised.when if rank.raised else None, rank.ended_at, rank.stopped_at)
    return min((time for time in times if time is not None), default=float("inf"))


def _odd_ones_out(ranks: Sequence[WatchedRank]) -> list[WatchedRank]:
    """Return the ranks with the rarest request, if all failed because their requests did not match."""
    failed = [rank for rank in ranks if rank.failed_itself]
    # Each rank's request, if the rank failed torch's own check (TORCH_DISTRIBUTED_DEBUG=DETAIL).
    asked = [_requests(rank.raised.summary).get(rank.rank) if rank.raised else None for rank in failed]
    if not all(asked):
        return []
    counts = Counter(asked)
    return [
        rank for rank, request in zip(failed, asked, strict=True) if counts[request] == min(counts.values())
    ]


def _requests(text: str) -> dict[int, str]:
    """Read each rank's request from torch's message about requests that differ."""
    return {
        int(rank): f"{kind} of {shape or 'nothing'} {dtype or ''}".strip()
        for rank, kind, shape, dtype in _FINGERPRINT.findall(text)
    }


def _headline(rank: WatchedRank, world_size: int, timeout: float, others_left: bool) -> str:
    subject = f"rank {rank.rank} of {world_size}"
    if rank.raised and rank.raised.is_about_lost_rank and others_left and world_size > 1:
        return f"{subject} made a request after the other ranks had returned: {_summary(rank.raised)}"
    if rank.raised and rank.raised.is_about_lost_rank:
        return f"no rank crashed: {subject} got no answer from the others: {_summary(rank.raised)}"
    if rank.raised:
        return f"{subject} raised {_summary(rank.raised)}"
    if rank.exit_code is not None:
        return f"{subject} {_death(rank.exit_code, rank.returned is not None)}"
    if rank.stopped_at is not None:
        return f"{subject} was stopped (SIGSTOP) and did not go on within {timeout:g} s"
    if rank.returned is not None:
        return f"{subject} returned while the others still waited for it"
    return f"{subject} kept the others waiting for more than {timeout:g} s"


def _state_line(rank: WatchedRank) -> str:
    return f"  rank {rank.rank}: {_state(rank)}{_in_phase(rank)}"


def _state(rank: WatchedRank) -> str:
    if rank.raised:
        return _summary(rank.raised)
    if rank.exit_code is not None:
        return _death(rank.exit_code, rank.returned is not None)
    if rank.stopped_at is not None:
        return "stopped (SIGSTOP)"
    if rank.returned is not None:
        return "had returned"
    if rank.location and rank.location.line:
        verb = "waiting for the others" if rank.location.communicating else "running"
        return f"{verb} at {rank.location.line}"
    return "running"


def _death(code: int, after_returning: bool) -> str:
    when = "after its function returned" if after_returning else "before its function returned"
    if code >= 0:
        return f"ended with exit code {code} {when}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    cause = " (by a user, or by the kernel because memory ran out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{cause} {when}"


def _summary(raised: RankRaised) -> str:
    requests = _requests(raised.summary)
    if len(requests) > 1:
        asked = ", ".join(f"rank {rank} asked for {request}" for rank, request in requests.items())
        return f"{raised.summary.split(':')[0]}: requests do not match: {asked}"
    return in_one_line(raised.summary)


def _in_phase(rank: WatchedRank) -> str:
    return f" [in phase: {rank.phase}]" if rank.phase else ""


def _with_cell_names(text: str) -> str:
    for name, label in cell_labels().items():
        text = text.replace(f'File "{name}"', label)
    return text
