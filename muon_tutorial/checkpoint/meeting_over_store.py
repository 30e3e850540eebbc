"""Lets ranks decide together: each rank sends its part to rank 0, which decides and sends answers to all.

Ranks communicate through the store that ``init_process_group`` was given, not through collectives. So a
meeting may run in a thread during training, an error can name the rank that was missing, and the process
groups still work after an error. A meeting sends only small objects, and knows nothing about checkpoints.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import CheckpointError, TutorialError
from ..launching.group_timeouts import group_timeout
from ..launching.phase_and_line import report_phase
from ..worlds.live import gather_objects
from .plain_data import pack, unpack

K = TypeVar("K")
T = TypeVar("T")
A = TypeVar("A")

_CLAIMED, _ANSWERED, _REFUSED = b"claimed", b"answered", b"refused "
_NAMES_A_RANK = re.compile(r"ranks? (\d+)")


@dataclass(frozen=True, slots=True)
class Meeting:
    """A task that ranks have begun together. ``id`` is the same on all of them, and is never used again.

    ``timeout`` is the default process group's timeout, in seconds.
    """

    id: str
    what: str
    rank: int
    size: int
    timeout: float
    store: Any

    def agree(
        self, stage: str, make: Callable[[], tuple[K, T]], decide: Callable[[list[T]], Sequence[A]]
    ) -> tuple[K, A]:
        """Call ``make`` on every rank and ``decide`` on rank 0; return what this rank keeps, and rank 0's
        answer.

        All ranks of the meeting must call this once with the same ``stage``. ``make`` returns what this rank
        keeps, and its part for rank 0. When all parts have reached rank 0, and no rank has given up
        waiting, ``decide`` gets the parts and returns an answer for each rank. So either all ranks get an
        answer or none does, unless rank 0 is lost while it decides.

        Raises:
            TutorialError: raised by ``make`` on this rank, or by ``decide``.
            CheckpointError: ``make`` failed on another rank, or with an error from outside this package, or a
                rank was late. The message names the rank and the cause. Raised on all ranks.
        """
        if threading.current_thread() is threading.main_thread():
            report_phase(f"{self.what} · {stage}")
        made, own = _attempt(make)
        try:
            answer = self._exchange(stage, made and made[1], own, decide)
        except dist.DistError as error:
            raise CheckpointError(f"{self.what}: the ranks' store failed: {one_line(error)}") from error
        assert made is not None
        return made[0], answer

    def _exchange(self, stage: str, part: Any, own: BaseException | None, decide: Callable[..., Any]) -> Any:
        """Send this rank's part or error to rank 0 through the store, and wait for the answer."""
        packed, unfit = _attempt(lambda: pack(part))
        own = own or unfit
        self.store.set(f"{stage}/{self.rank}", packed if own is None else pack({"failed": self._line(own)}))
        if own is not None and not isinstance(own, Exception):
            raise own
        if self.rank == 0:
            own = self._preside(stage, decide) or own
        verdict = self._wait_for_verdict(stage)
        if verdict != _ANSWERED:
            raise self._refusal(verdict.removeprefix(_REFUSED).decode(), own)
        answer = unpack(self.store.get(f"{stage}/answer/{self.rank}"))
        if self.store.add(f"{stage}/left", 1) == self.size:  # the last rank removes the stage's keys
            posts = [f"{kind}{rank}" for rank in range(self.size) for kind in ("", "answer/")]
            for post in (*posts, "verdict", "left"):
                self.store.delete_key(f"{stage}/{post}")
        return answer

    def agree_that(self, stage: str, make: Callable[[], K]) -> K:
        """Call ``make`` on every rank. Return the value if all ranks succeeded, else raise like ``agree``."""
        return self.agree(stage, lambda: (make(), None), lambda found: found)[0]

    def _preside(self, stage: str, decide: Callable[[list[Any]], Sequence[Any]]) -> BaseException | None:
        """Collect the parts, decide and publish the answers; return the error if deciding failed."""
        deadline = time.monotonic() + self.timeout
        posts = [f"{stage}/{rank}" for rank in range(self.size)]
        if not _poll(lambda: self.store.check(posts), deadline):
            self._give_up(stage, self._absent(stage))
            return None
        found, error = _attempt(lambda: [unpack(self.store.get(post)) for post in posts])
        for rank, made in enumerate(found or ()):
            if isinstance(made, dict) and "failed" in made:
                self._give_up(stage, f"rank {rank}: {made['failed']}")
                return None
        if self.store.compare_set(f"{stage}/verdict", "", _CLAIMED) != _CLAIMED:
            return None  # another rank gave up waiting
        if found is not None:
            answers, error = _attempt(lambda: [pack(answer) for answer in decide(found)])
        if error is None:
            for rank, answer in enumerate(answers or ()):
                self.store.set(f"{stage}/answer/{rank}", answer)
        verdict = _ANSWERED
        if error is not None:  # an error from outside this package is rank 0's own, so the line names rank 0
            whose = "" if isinstance(error, TutorialError) else f"rank {self.rank}: "
            verdict = _REFUSED + f"{whose}{self._line(error)}".encode()
        self.store.set(f"{stage}/verdict", verdict)
        return error

    def _wait_for_verdict(self, stage: str) -> bytes:
        key = f"{stage}/verdict"

        def is_there() -> bool:
            return self.store.check([key]) and self.store.get(key) != _CLAIMED

        if not _poll(is_there, time.monotonic() + self.timeout):
            self._give_up(stage, self._absent(stage))
        verdict: bytes = self.store.get(key)
        if verdict == _CLAIMED:
            late = f"rank 0, which decides for all ranks, {self._too_late(stage)}, but may still decide"
            return _REFUSED + late.encode()
        return verdict

    def _give_up(self, stage: str, complaint: str) -> None:
        """Make ``complaint`` the verdict for all ranks, unless there is a verdict already."""
        self.store.compare_set(f"{stage}/verdict", "", _REFUSED + complaint.encode())

    def _absent(self, stage: str) -> str:
        absent = [str(rank) for rank in range(self.size) if not self.store.check([f"{stage}/{rank}"])]
        return f"rank{'s' * (len(absent) > 1)} {', '.join(absent) or '0'} {self._too_late(stage)}"

    def _too_late(self, stage: str) -> str:
        return f"did not {stage} within {self.timeout:g} s ({self.what})"

    def _refusal(self, complaint: str, own: BaseException | None) -> TutorialError:
        """The error that this rank raises: its own error if that is the cause, else ``complaint``."""
        if own is not None and complaint in (self._line(own), f"rank {self.rank}: {self._line(own)}"):
            if isinstance(own, TutorialError):
                return own
            if not isinstance(own, Exception):
                raise own
            named = CheckpointError(complaint if self.size > 1 else self._line(own))
            named.__cause__ = own
            return named
        guilty = _NAMES_A_RANK.match(complaint)
        return CheckpointError(complaint, int(guilty[1]) if guilty else None)

    def _line(self, error: BaseException) -> str:
        """An error in one line; an error from outside this package also gets the meeting's name."""
        return one_line(error) + ("" if isinstance(error, TutorialError) else f" ({self.what})")


def call_meeting(what: str) -> Meeting:
    """Begin a meeting. All ranks of the default process group must call it in their main threads."""
    fresh = uuid.uuid4().hex
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Meeting(fresh, what, 0, 1, 0.0, dist.HashStore())
    try:
        found = gather_objects((fresh, what))
    except RuntimeError as error:
        raise CheckpointError(f"{what}: not all ranks called it: {one_line(error)}") from error
    for rank, (_, its) in enumerate(found):
        if its != found[0][1]:
            raise CheckpointError(f"rank 0 called {found[0][1]}, but rank {rank} called {its}")
    name = found[0][0]
    c10d = dist.distributed_c10d
    store = dist.PrefixStore(f"muon_tutorial/{name}", c10d._get_default_store())
    return Meeting(
        name, what, dist.get_rank(), dist.get_world_size(), group_timeout(c10d._get_default_group()), store
    )


def one_line(error: BaseException) -> str:
    """Say an error in one line, with its class unless it is an OSError or an error of this package."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = " ".join(str(error).split())
    return text if isinstance(error, TutorialError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _attempt(make: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return make(), None
    except BaseException as error:
        return None, error


def _poll(is_there: Callable[[], bool], deadline: float) -> bool:
    """Call ``is_there`` at growing intervals until it is true; return False if the deadline passed first."""
    pause = 0.0005
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return True
