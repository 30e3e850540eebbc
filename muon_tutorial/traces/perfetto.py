"""The Trace Event Format, as far as it is written here: recorded ranks merged into one document, and a check.

Perfetto and chrome://tracing open the result: a process for each rank (and each rank's GPU), its threads as
the profiler saw them, and above them tracks of our own: where the time goes, and collectives in as many lanes
as are in flight at once.

Format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .profiler_trace import nanoseconds
from .time_split import Flight, Timeline, last_asked, paint

Entry = dict[str, Any]

STATE_TRACK = 1 << 30  # above any thread's number
FLIGHT_TRACK = STATE_TRACK + 1
ASIDE_TRACK = STATE_TRACK + (1 << 20)  # and below 2^31, with room for any thread
SLACK = 1  # nanosecond: what Kineto's three decimals leave uncertain
PHASES = frozenset("BEXiIMCbnestfPNODSTFp(vRca")
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def merge_documents(
    documents: Mapping[int, Mapping[str, Any]], ahead: Mapping[int, int], timeline: Timeline
) -> Entry:
    """One document from each rank's own. ``ahead`` is how far a rank's profiler is ahead of the timeline's
    clock, in nanoseconds. The earliest event becomes time 0: viewers drop what lies before."""
    processes = _Processes()
    kept = {rank: _kept(document["traceEvents"]) for rank, document in documents.items()}
    begins = [_earliest(entries) - ahead[rank] for rank, entries in kept.items() if entries]
    origin = min([timeline.begin, *begins])
    events: list[Entry] = []
    for rank, entries in kept.items():
        events += _uncrossed(list(_moved(rank, entries, ahead[rank] + origin, processes)))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceEvents": [*processes.names(timeline), *events, *_own_tracks(timeline, origin, processes)],
    }


class _Processes:
    """Numbers for processes that no two ranks share: a rank's own is its rank."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def number(self, rank: int, what: str = "") -> int:
        return self._numbers.setdefault((rank, what), rank if not what else 100_000 + len(self._numbers))

    def names(self, timeline: Timeline) -> Iterator[Entry]:
        for times in timeline.ranks:
            self.number(times.rank)
        for order, (key, number) in enumerate(sorted(self._numbers.items())):
            yield _about(number, 0, "process_name", f"rank {key[0]}{key[1]}")
            yield _about(number, 0, "process_sort_index", order)


def _about(process: int, thread: int, what: str, value: str | int) -> Entry:
    return {
        "ph": "M",
        "name": what,
        "pid": process,
        "tid": thread,
        "ts": 0,
        "args": {METADATA[what][0]: value},
    }


def _kept(entries: Iterable[Entry]) -> list[Entry]:
    """Events of processes and threads, and the threads' names; what spans the whole profiler is dropped."""
    kept = [entry for entry in entries if type(entry.get("pid")) is int and type(entry.get("tid")) is int]
    return [entry for entry in kept if entry["ph"] != "M" or entry["name"] == "thread_name"]


def _earliest(entries: Iterable[Entry]) -> int:
    return min((nanoseconds(entry["ts"]) for entry in entries if entry["ph"] != "M"), default=0)


def _moved(rank: int, entries: Sequence[Entry], shift: int, processes: _Processes) -> Iterator[Entry]:
    """A rank's events on the common clock and under its own processes."""
    host = next((e["pid"] for e in entries if e.get("cat") in ("user_annotation", "cpu_op")), None)
    for entry in entries:
        what = "" if entry["pid"] == host else f" · GPU {entry['pid']}"
        if what and entry["ph"] == "M" and not _is_used(entry, entries):
            continue
        moved = entry | {"pid": processes.number(rank, what), "ts": (nanoseconds(entry["ts"]) - shift) / 1000}
        if entry["ph"] == "M":
            moved["ts"] = 0
        if "id" in entry:
            moved["id"] = f"{rank}.{entry['id']}"
        yield moved


def _uncrossed(entries: list[Entry]) -> Iterator[Entry]:
    """The entries, with complete events that cross others of their thread on tracks beside it.

    Gloo ends an event when the collective does, whatever its thread began meanwhile.
    """
    tracks: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        if entry["ph"] == "X":
            tracks.setdefault((entry["pid"], entry["tid"]), []).append(entry)
        else:
            yield entry
    for (process, thread), pieces in tracks.items():
        nested, crossing = _nested(pieces)
        yield from nested
        aside = 0
        while crossing:
            aside += 1
            track = ASIDE_TRACK + thread * 16 + aside
            nested, crossing = _nested(crossing)
            yield _about(process, track, "thread_name", f"thread {thread}, aside")
            yield from (entry | {"tid": track} for entry in nested)


def _nested(pieces: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Complete events of one track: those that nest, the earlier ones first, and those that would cross."""
    nested: list[Entry] = []
    crossing: list[Entry] = []
    open_until: list[int] = []
    for entry in sorted(pieces, key=lambda entry: (entry["ts"], -entry["dur"])):
        begin = nanoseconds(entry["ts"])
        end = begin + nanoseconds(entry["dur"])
        while open_until and open_until[-1] <= begin + SLACK:
            open_until.pop()
        if open_until and end > open_until[-1] + SLACK:
            crossing.append(entry)
        else:
            nested.append(entry)
            open_until.append(end)
    return nested, crossing


def _is_used(about: Entry, entries: Sequence[Entry]) -> bool:
    return any(entry["ph"] == "X" and entry["pid"] == about["pid"] for entry in entries)


def _own_tracks(timeline: Timeline, origin: int, processes: _Processes) -> Iterator[Entry]:
    asked = last_asked(timeline)
    for times in timeline.ranks:
        process = processes.number(times.rank)
        yield from _name_track(process, STATE_TRACK, "where the time goes", -100)
        for state, intervals in paint(timeline)[times.rank].items():
            for begin, end in intervals:
                yield _complete(process, STATE_TRACK, "state", state, begin - origin, end - begin)
        for lane, flights in enumerate(lanes(times.flights)):
            yield from _name_track(process, FLIGHT_TRACK + lane, f"collectives {lane + 1}", lane - 99)
            for flight in flights:
                yield _flown(process, FLIGHT_TRACK + lane, flight, origin, asked)


def _name_track(process: int, thread: int, name: str, order: int) -> Iterator[Entry]:
    yield _about(process, thread, "thread_name", name)
    yield _about(process, thread, "thread_sort_index", order)


def _flown(
    process: int,
    thread: int,
    flight: Flight,
    begin: int,
    asked: Mapping[tuple[tuple[int, ...], int], int],
) -> Entry:
    last = asked.get((flight.group, flight.turn))
    args: Entry = {
        "phase": flight.phase,
        "subject": flight.subject,
        "kind": flight.kind,
        "group": list(flight.group),
        "turn": flight.turn,
        "payload bytes": flight.payload,
        "ring bytes": flight.ring,
    }
    if last is not None:
        args["waited for the last member, us"] = max(0, min(last, flight.done) - flight.issued) / 1000
    name = f"{flight.kind}: {flight.label}"
    entry = _complete(process, thread, "collective", name, flight.issued - begin, flight.done - flight.issued)
    return entry | {"args": args}


def _complete(process: int, thread: int, category: str, name: str, begin: int, duration: int) -> Entry:
    times = {"ts": begin / 1000, "dur": duration / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, **times, "args": {}}


def lanes(flights: Iterable[Flight]) -> list[list[Flight]]:
    """Flights in as few lanes as hold them without overlap: a track must not hold two at once."""
    rows: list[list[Flight]] = []
    for flight in sorted(flights, key=lambda flight: (flight.issued, flight.done)):
        row = next((row for row in rows if row[-1].done <= flight.issued), None)
        if row is None:
            rows.append([flight])
        else:
            row.append(flight)
    return rows


def check_document(document: object) -> list[str]:
    """What in a document breaks the Trace Event Format; nothing where viewers can open it.

    Held: types of name, ph, ts, pid and tid; a duration on complete events; names and values of metadata;
    ids on flows; and that complete events of one thread nest, which viewers need to draw them.
    """
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["the document is no object with a list traceEvents"]
    wrong: list[str] = []
    tracks: dict[tuple[int, int], list[Entry]] = {}
    for index, entry in enumerate(document["traceEvents"]):
        found = list(_broken(entry))
        wrong += [f"event {index}: {what}" for what in found]
        if not found and entry["ph"] == "X":
            tracks.setdefault((entry["pid"], entry["tid"]), []).append(entry)
    for (process, thread), pieces in tracks.items():
        crossing = _nested(pieces)[1]
        if crossing:
            wrong.append(f"pid {process}, tid {thread}: events cross at {crossing[0]['ts']} us")
    return wrong


def _broken(entry: object) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"is no object: {entry!r}"
        return
    if not isinstance(entry.get("name"), str):
        yield "name is no text"
    if entry.get("ph") not in PHASES:
        yield f"unknown ph {entry.get('ph')!r}"
    yield from (f"{key} is no whole number" for key in ("pid", "tid") if type(entry.get(key)) is not int)
    for key in ("ts", "dur") if entry.get("ph") == "X" else ("ts",):
        if not _is_time(entry.get(key)):
            yield f"{key} is no time in microseconds: {entry.get(key)!r}"
    if entry.get("ph") == "M":
        yield from _broken_metadata(entry)
    if entry.get("ph") in ("s", "t", "f") and not isinstance(entry.get("id"), (str, int)):
        yield "a flow without id"
    if not isinstance(entry.get("args", {}), dict):
        yield "args is no object"


def _broken_metadata(entry: Entry) -> Iterator[str]:
    key, kind = METADATA.get(str(entry.get("name")), ("", object))
    if not key:
        yield f"unknown metadata {entry.get('name')!r}"
    elif not isinstance(entry.get("args", {}).get(key), kind):
        yield f"{entry['name']} needs args.{key}"


def _is_time(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    )
