"""Records a real run, rank by rank, with torch.profiler and our own labels for requests to the world.

A rank adds its ``RankRecorder`` to its world's observers, and records any part of its run:

    def steps(rank, recorder):
        muon = Muon(..., mesh=build_mesh({"dp": 2}))
        muon.world.observers.append(recorder)
        with recorder:
            ...

    recorded = record(steps, 2, "runs/trace")

Every request gets a label on the profiler's track (kind, sizes, phase, matrix or bucket, bytes), and a flight
on one clock that all ranks of a machine share. The result is a file for each rank, one merged file for
Perfetto and chrome://tracing, the split of wall time, and a picture.

On a GPU, a call only enqueues a collective, so a flight is the time of the collective's kernel. A group's
kernels get our labels only if there are as many kernels as requests.
"""

from __future__ import annotations

import ast
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...engine.collective import Collective
from ...errors import TraceError
from ...launching.launch import launch
from ...launching.watch_ranks import print_line
from ...plan.grid import Coordinate
from ...worlds.live import Follow, Moment
from ..ring_bytes import ring_bytes
from .perfetto import merge_documents
from .profiler_trace import Trace, TraceEvent, nanoseconds, parse_trace
from .time_intervals import clip, union
from .time_split import Flight, RankTimes, Timeline, TimeSplit, split, split_markdown
from .timeline_picture import draw_timeline

SPAN = "recorded"
UNASKED = "not requested from a world"
MERGED = "trace.json.gz"
ITEM_BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Byte": 1, "Char": 1}


@dataclass(slots=True, eq=False)
class RankRecorder:
    """Records one rank while its ``with`` block runs, and then writes ``rank_N.json.gz`` into ``folder``.

    A recorder is an observer for a live world. Its file is a Chrome trace that also holds the flights.

    Some collectives are not requested from one of our worlds, such as those of PyTorch's tensor parallelism.
    The profiler does not record their group, so ``others`` names its ranks. Without ``others``, the time of
    such collectives cannot be split into transfer and waiting.
    """

    rank: int
    folder: Path
    others: tuple[int, ...] = ()
    _flights: list[tuple[Flight, dict[Moment, int]]] = field(default_factory=list)
    _turns: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _stamps: dict[str, int] = field(default_factory=dict)
    _profile: Any = None
    _whole: Any = None

    def __enter__(self) -> RankRecorder:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._flights, self._turns, self._stamps = [], Counter(), {}
        self._profile = profile(activities=activities)
        self._profile.__enter__()
        self._whole = self._mark(SPAN)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._whole.__exit__(None, None, None)
        end = perf_counter_ns()
        profiler, self._profile = self._profile, None
        profiler.__exit__(kind, *error)
        if kind is None:
            self._write(profiler, end)

    def __call__(self, request: Collective, at: Coordinate) -> Follow | None:
        if self._profile is None:
            return None
        group, label = at.group(*request.axes), request.label
        payload = 0 if request.send is None else request.send.numel() * request.dtype.itemsize
        about = (self.rank, request.kind, label.phase, label.subject, group, self._turns[group])
        flight = Flight(*about, perf_counter_ns(), 0, payload, ring_bytes(request, at))
        self._turns[group] += 1
        moments: dict[Moment, int] = {}
        self._flights.append((flight, moments))
        number = len(self._flights)
        marks = [self._mark(f"{request}, {payload} bytes #{number}")]

        def follow(moment: Moment) -> None:
            if moment == "waiting":
                marks.append(self._mark(f"wait for {request.label} #{number}"))
            elif moment != "done":
                marks.pop().__exit__(None, None, None)
            moments[moment] = perf_counter_ns()

        return follow

    def _mark(self, name: str) -> Any:
        """Open a label, and note the time on the machine's clock, because the profiler has another clock.
        Names are made ASCII, because the profiler shows any other name as unknown."""
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
        seen = [event for event in document["traceEvents"] if event.get("ph") == "X"]
        late = [nanoseconds(e["ts"]) - self._stamps[e["name"]] for e in seen if e["name"] in self._stamps]
        if not late:
            raise TraceError(f"the profiler on rank {self.rank} recorded no label of the recorder")
        document["recorder"] = {
            "rank": self.rank,
            "begin": self._stamps[SPAN],
            "end": end,
            "ahead": min(late),  # the smallest difference, because opening a label adds some time
            "others": self.others,
            "flights": [{**asdict(one), "done": _done(moments, end)} for one, moments in self._flights],
        }
        _write_json(path.with_suffix(".json.gz"), document)


def _done(moments: Mapping[Moment, int], end: int) -> int:
    """The time when the backend reported a request's end; without a report, when the rank went on."""
    told: tuple[Moment, ...] = ("done", "answered", "issued")
    return min(end, next((moments[moment] for moment in told if moment in moments), end))


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded run: its timeline, the split of each rank's time, and the folder of its files."""

    timeline: Timeline
    splits: tuple[TimeSplit, ...]
    folder: Path

    @property
    def merged(self) -> Path:
        """The one file to open in Perfetto or chrome://tracing."""
        return self.folder / MERGED

    @property
    def markdown(self) -> str:
        return split_markdown(self.splits)


def record(
    fn: Callable[..., Any], world_size: int, folder: str | Path, *, args: tuple[Any, ...] = (), **options: Any
) -> RecordedRun:
    """Run ``fn(rank, recorder, *args)`` on real ranks, and merge what their recorders wrote.

    ``options`` are arguments of ``launch``, such as ``kwargs`` for ``fn``. Must not be called on a rank.

    Raises:
        TraceError: a rank never entered its recorder.
        LaunchError: a rank failed.
    """
    folder = Path(folder).resolve()
    for stale in folder.glob("rank_*.json*"):
        stale.unlink()
    launch(_with_recorder, world_size, args=(fn, folder, *args), **{"output": _without_profiler, **options})
    for rank in range(world_size):
        if not (folder / f"rank_{rank}.json.gz").exists():
            raise TraceError(
                f"rank {rank} recorded nothing: its function must enter its recorder (`with recorder:`)"
            )
    return merge(folder)


def _with_recorder(rank: int, fn: Callable[..., Any], folder: Path, /, *args: Any, **kwargs: Any) -> Any:
    return fn(rank, RankRecorder(rank, folder), *args, **kwargs)


def _without_profiler(rank: int, line: str) -> None:
    """Show a rank's line. The profiler's notices of its start and stop are left out."""
    if not line.startswith("USDT:"):
        print_line(rank, line)


def merge(folder: str | Path) -> RecordedRun:
    """Merge the ranks' files in a folder into ``trace.json.gz``, and write ``split.md`` and ``timeline.svg``.

    Raises:
        TraceError: there are no such files, or one was not written by a ``RankRecorder``.
    """
    folder, documents = Path(folder), {}
    for path in folder.glob("rank_*.json.gz"):
        document = json.loads(gzip.decompress(path.read_bytes()))
        if "recorder" not in document:
            raise TraceError(f"{path} was not written by a RankRecorder")
        documents[document["recorder"]["rank"]] = document
    if not documents:
        raise TraceError(f"there is no recording in {folder}")
    documents = dict(sorted(documents.items()))
    timeline = Timeline(tuple(_times_of(document) for document in documents.values()))
    ahead = {rank: document["recorder"]["ahead"] for rank, document in documents.items()}
    _write_json(folder / MERGED, merge_documents(documents, ahead, timeline))
    run = RecordedRun(timeline, split(timeline), folder)
    (folder / "split.md").write_text(run.markdown + "\n", encoding="utf-8")
    (folder / "timeline.svg").write_text(draw_timeline(timeline), encoding="utf-8")
    return run


def _times_of(document: Mapping[str, Any]) -> RankTimes:
    noted, trace = document["recorder"], parse_trace(dict(document))
    rank, ahead, others = noted["rank"], noted["ahead"], tuple(noted.get("others", ()))
    flights = [Flight(**{"rank": rank, **it, "group": tuple(it["group"])}) for it in noted["flights"]]
    if trace.executed:
        flights = list(_on_device(trace, rank, ahead, flights))
    else:
        flights = _in_turn([*flights, *_unasked(trace, rank, ahead, flights, others)])
    compute, blocked = (
        tuple((begin - ahead, end - ahead) for begin, end in intervals)
        for intervals in (trace.compute, trace.blocked)
    )
    return RankTimes(rank, noted["begin"], noted["end"], compute, tuple(flights), blocked)


def _unasked(
    trace: Trace, rank: int, ahead: int, flights: list[Flight], others: tuple[int, ...]
) -> Iterator[Flight]:
    """Flights of collectives that begin outside our flights, because they were not requested from our worlds.

    A flight begins with the call that requested the collective.
    """
    asked = union((flight.issued, flight.done) for flight in flights)

    def apart(events: Iterable[TraceEvent]) -> list[TraceEvent]:
        return [e for e in events if not clip(asked, e.begin - ahead, e.begin - ahead + 1)]

    ran = apart(trace.collectives)
    calls = apart(e for e in trace.of("launch") if e.name.startswith("c10d::") and e.kind)
    for event, call in zip(ran, calls if len(calls) == len(ran) else ran, strict=True):
        begin, end = min(event.begin, call.begin) - ahead, event.end - ahead
        yield Flight(rank, event.kind, UNASKED, "", others, 0, begin, end)


def _in_turn(flights: Iterable[Flight]) -> list[Flight]:
    """Sort and number flights in the order of requests, which is the same on all members of a group."""
    turns: Counter[tuple[int, ...]] = Counter()
    numbered = []
    for flight in sorted(flights, key=lambda flight: flight.issued):
        numbered.append(replace(flight, turn=turns[flight.group]))
        turns[flight.group] += 1
    return numbered


def _on_device(trace: Trace, rank: int, ahead: int, flights: list[Flight]) -> Iterator[Flight]:
    """The kernels' flights on the machine's clock, with our labels if each request has one kernel."""
    ran = _in_turn(_kernel_flight(rank, event) for event in trace.collectives)
    asked = {(flight.group, flight.turn): flight for flight in flights}
    kernels, requests = Counter(flight.group for flight in ran), Counter(flight.group for flight in flights)
    for flight in ran:
        known = flight.group and kernels[flight.group] == requests[flight.group]
        label = asked[flight.group, flight.turn] if known else flight
        yield replace(label, issued=flight.issued - ahead, done=flight.done - ahead)


def _kernel_flight(rank: int, event: TraceEvent) -> Flight:
    """A collective's kernel as a flight, on the profiler's clock. Kineto prints the group's ranks, but
    shortens long lists with dots; the group is then unknown, and left empty."""
    try:
        group = tuple(int(one) for one in ast.literal_eval(event.args.get("Process Group Ranks", "")))
    except (SyntaxError, TypeError, ValueError):
        group = ()
    size = ITEM_BYTES.get(str(event.args.get("dtype", "")), 0)
    payload = int(event.args.get("In msg nelems", 0)) * size
    return Flight(rank, event.kind, event.kind, "", group, 0, event.begin, event.end, payload)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(document).encode())
