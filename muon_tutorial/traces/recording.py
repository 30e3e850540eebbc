"""Records a real run, rank by rank: torch.profiler, and our own labels for what is asked of the world.

A rank hands its ``Tape`` to its world as an observer and records what it likes:

    def steps(rank, tape):
        muon = Muon(..., mesh=build_mesh({"dp": 2}))
        muon.world.observers.append(tape)
        with tape:
            ...

    recording = record(steps, 2, "runs/trace")

Every request gets a label on the profiler's track (kind, sizes, phase, matrix or bucket, bytes), and a flight
on one clock that all ranks of a machine share. Writes a file for each rank, one merged file for Perfetto and
chrome://tracing, the split of wall time, and a picture. Touches neither the engine nor the collectives.

On a GPU the call that asks for a collective only enqueues it: there, a flight is the kernel's, and gets our
label where a group's kernels are as many as its requests.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..engine.collective import Collective
from ..errors import TraceError
from ..evidence.ledger import ring_bytes
from ..launching.launch import launch
from ..launching.output import print_line
from ..plan.grid import Coordinate
from ..worlds.live import Follow, Moment
from .perfetto import merge_documents
from .profiler_trace import Event, Trace, nanoseconds, parse_trace
from .time_intervals import Intervals, clip, union
from .time_split import Flight, RankTimes, Split, Timeline, flights_of, split, split_markdown
from .timeline_picture import draw_timeline

SPAN = "recorded"
UNASKED = "not asked of a world"
MERGED = "trace.json.gz"


@dataclass(slots=True, eq=False)
class Tape:
    """Records one rank while its ``with`` block runs, and then writes ``rank_N.json.gz`` into ``folder``.

    An observer for a live world. The file is a Chrome trace of its own, with the flights beside its events.

    ``others`` are the ranks of the one group over which collectives happen that nobody asks a world of ours
    for, such as PyTorch's own tensor parallelism: the profiler does not note it. Left out, nobody can say how
    much of those is waiting.
    """

    rank: int
    folder: Path
    others: tuple[int, ...] = ()
    _flights: list[_Draft] = field(default_factory=list)
    _turns: dict[tuple[int, ...], int] = field(default_factory=dict)
    _stamps: dict[str, int] = field(default_factory=dict)
    _profile: Any = None
    _whole: Any = None

    def __enter__(self) -> Tape:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._flights, self._turns, self._stamps = [], {}, {}
        self._profile = profile(activities=activities)
        self._profile.__enter__()
        self._whole = self._mark(SPAN)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _finish_gpu()
        self._whole.__exit__(None, None, None)
        end = perf_counter_ns()
        profiler, self._profile = self._profile, None
        profiler.__exit__(kind, error, traceback)
        if error is None:
            self._write(profiler, end)

    @contextmanager
    def label(self, name: str) -> Iterator[None]:
        """Label part of a step of one's own, such as ``"backward"``."""
        with record_function(name):
            yield

    def __call__(self, request: Collective, at: Coordinate) -> Follow | None:
        if self._profile is None:
            return None
        group = at.group(*request.axes)
        turn = self._turns.get(group, 0)
        self._turns[group] = turn + 1
        sent = 0 if request.send is None else request.send.numel() * request.dtype.itemsize
        draft = _Draft(request, group, turn, sent, ring_bytes(request, at), perf_counter_ns())
        self._flights.append(draft)
        number = len(self._flights)
        marks = [self._mark(f"{request}, {sent} bytes #{number}")]

        def follow(moment: Moment) -> None:
            if moment == "done":
                draft.done = perf_counter_ns()
            elif moment == "waiting":
                marks.append(self._mark(f"wait for {request.label} #{number}"))
            else:
                marks.pop().__exit__(None, None, None)
                draft.returned = perf_counter_ns()

        return follow

    def _mark(self, name: str) -> Any:
        """Open a label, and note when on the machine's clock: the profiler's own clock is another, and it
        calls a name that is not all ASCII unknown."""
        name = name.replace("→", "->").replace("×", "x").encode("ascii", "replace").decode()
        mark = record_function(name)
        self._stamps[name] = perf_counter_ns()
        mark.__enter__()
        return mark

    def _write(self, profiler: Any, end: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank_{self.rank}.json"
        profiler.export_chrome_trace(str(path))
        document = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        document["taped"] = {
            "rank": self.rank,
            "begin": self._stamps[SPAN],
            "end": end,
            "ahead": self._ahead(document),
            "others": list(self.others),
            "flights": [draft.as_entry(end) for draft in self._flights],
        }
        _write_json(path.with_suffix(".json.gz"), document)

    def _ahead(self, document: Mapping[str, Any]) -> int:
        """How far the profiler's clock is ahead of the machine's, in nanoseconds: the least that any label
        was seen late, since a label takes time to open."""
        seen = [event for event in document["traceEvents"] if event.get("ph") == "X"]
        late = [nanoseconds(e["ts"]) - self._stamps[e["name"]] for e in seen if e["name"] in self._stamps]
        if not late:
            raise TraceError(f"the profiler on rank {self.rank} recorded none of our labels")
        return min(late)


@dataclass(slots=True, eq=False)
class _Draft:
    """A flight that may not have ended yet."""

    request: Collective
    group: tuple[int, ...]
    turn: int
    payload: int
    ring: int
    issued: int
    done: int | None = None
    returned: int | None = None

    def as_entry(self, end: int) -> dict[str, Any]:
        """Plain data. The backend's word on when it was done may come late; nothing is done after the rank
        went on with the answer, or after the recording's end."""
        label = self.request.label
        waited = self.returned if self.done is None else self.done
        return {
            "kind": self.request.kind,
            "phase": label.phase,
            "subject": label.subject,
            "group": list(self.group),
            "turn": self.turn,
            "issued": self.issued,
            "done": min(end, end if waited is None else waited),
            "payload": self.payload,
            "ring": self.ring,
        }


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run: its timeline, how each rank's time is split, and where its files lie."""

    timeline: Timeline
    splits: tuple[Split, ...]
    folder: Path

    @property
    def merged(self) -> Path:
        """The one file that Perfetto and chrome://tracing open."""
        return self.folder / MERGED

    @property
    def markdown(self) -> str:
        """The split as a table."""
        return split_markdown(self.splits)


def record(
    fn: Callable[..., Any],
    world_size: int,
    folder: str | Path,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Recording:
    """Run ``fn(rank, tape, *args, **kwargs)`` on real ranks, and merge what their tapes recorded.

    ``options`` go to ``launch``. Must not run on a rank.

    Raises:
        TraceError: a rank never entered its tape.
        LaunchError: a rank failed.
    """
    folder = Path(folder).resolve()
    for stale in folder.glob("rank_*.json*"):
        stale.unlink()
    given = (fn, str(folder), args, dict(kwargs or {}))
    launch(_taped, world_size, args=given, **{"output": _without_profiler, **options})
    paths = [folder / f"rank_{rank}.json.gz" for rank in range(world_size)]
    silent = [rank for rank, path in enumerate(paths) if not path.exists()]
    if silent:
        raise TraceError(
            f"rank {silent[0]} recorded nothing: its function must enter its tape (`with tape:`)"
        )
    return merge(folder)


def _taped(
    rank: int, fn: Callable[..., Any], folder: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return fn(rank, Tape(rank, Path(folder)), *args, **kwargs)


def _without_profiler(rank: int, line: str) -> None:
    """Show a rank's line, unless the profiler only says that it starts or stops."""
    if not line.startswith("USDT:"):
        print_line(rank, line)


def merge(folder: str | Path) -> Recording:
    """Merge the ranks' files of a folder into ``trace.json.gz``, beside ``split.md`` and ``timeline.svg``.

    Raises:
        TraceError: there are none, or one was not written by a ``Tape``.
    """
    folder = Path(folder)
    documents = {}
    for path in sorted(folder.glob("rank_*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        if "taped" not in document:
            raise TraceError(f"{path} was not written by a Tape")
        documents[document["taped"]["rank"]] = document
    if not documents:
        raise TraceError(f"there is no recording in {folder}")
    documents = dict(sorted(documents.items()))
    timeline = Timeline(tuple(_times_of(document) for document in documents.values()))
    ahead = {rank: document["taped"]["ahead"] for rank, document in documents.items()}
    _write_json(folder / MERGED, merge_documents(documents, ahead, timeline))
    recording = Recording(timeline, split(timeline), folder)
    (folder / "split.md").write_text(recording.markdown + "\n", encoding="utf-8")
    (folder / "timeline.svg").write_text(draw_timeline(timeline), encoding="utf-8")
    return recording


def _times_of(document: Mapping[str, Any]) -> RankTimes:
    taped = document["taped"]
    trace = parse_trace(dict(document))
    flights = [
        Flight(rank=taped["rank"], **{**entry, "group": tuple(entry["group"])}) for entry in taped["flights"]
    ]
    if trace.executed:
        flights = list(_on_device(trace, taped["rank"], taped["ahead"], flights))
    else:
        others = tuple(taped.get("others", ()))
        flights += _unasked(trace, taped["rank"], taped["ahead"], flights, others)
        flights = _in_turn(flights)
    return RankTimes(
        rank=taped["rank"],
        begin=taped["begin"],
        end=taped["end"],
        compute=_shifted(trace.compute, taped["ahead"]),
        flights=tuple(flights),
        blocked=_shifted(trace.blocked, taped["ahead"]),
    )


def _shifted(intervals: Intervals, ahead: int) -> Intervals:
    return tuple((begin - ahead, end - ahead) for begin, end in intervals)


def _unasked(
    trace: Trace, rank: int, ahead: int, flights: list[Flight], others: tuple[int, ...]
) -> Iterator[Flight]:
    """Collectives that nobody asked our worlds for, such as PyTorch's own tensor parallelism: the backend's
    events that begin in none of our flights, each from the call that asked for it."""
    asked = union((flight.issued, flight.done) for flight in flights)

    def apart(events: Iterable[Event]) -> list[Event]:
        return [e for e in events if not clip(asked, e.begin - ahead, e.begin - ahead + 1)]

    ran = apart(trace.collectives)
    calls = apart(e for e in trace.of("launch") if e.name.startswith("c10d::") and e.kind)
    for event, call in zip(ran, calls if len(calls) == len(ran) else ran, strict=True):
        begin, end = min(event.begin, call.begin) - ahead, event.end - ahead
        yield Flight(rank, event.kind, UNASKED, "", others, 0, begin, end)


def _in_turn(flights: Iterable[Flight]) -> list[Flight]:
    """In order of request, and numbered so: all members of a group ask in one order."""
    turns: Counter[tuple[int, ...]] = Counter()
    numbered = []
    for flight in sorted(flights, key=lambda flight: flight.issued):
        numbered.append(replace(flight, turn=turns[flight.group]))
        turns[flight.group] += 1
    return numbered


def _on_device(trace: Trace, rank: int, ahead: int, flights: list[Flight]) -> Iterator[Flight]:
    """What the kernels executed, on the machine's clock, with our labels where they fit one to one."""
    ran = list(flights_of(rank, trace))
    asked = {(flight.group, flight.turn): flight for flight in flights}
    kernels, requests = Counter(flight.group for flight in ran), Counter(flight.group for flight in flights)
    for flight in ran:
        known = flight.group and kernels[flight.group] == requests[flight.group]
        label = asked[flight.group, flight.turn] if known else flight
        yield replace(label, issued=flight.issued - ahead, done=flight.done - ahead)


def _finish_gpu() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(document).encode())
