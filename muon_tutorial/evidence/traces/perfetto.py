"""Merges the traces of recorded ranks into one document for Perfetto and chrome://tracing.

Each rank becomes a process, and so does each rank's GPU. Our own tracks come above the profiler's threads:
first where the time goes, then collectives, which never overlap within a track.

Format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .profiler_trace import nanoseconds
from .time_split import Flight, Timeline, last_asked, paint

ChromeEvent = dict[str, Any]

STATE_TRACK = 1 << 30  # Above any thread's number.
FLIGHT_TRACK = STATE_TRACK + 1
ASIDE_TRACK = STATE_TRACK + (1 << 20)  # Stays below 2^31 even if a thread's number is added.
SLACK = 1  # One nanosecond: Kineto rounds microseconds to three decimals.


def merge_documents(
    documents: Mapping[int, Mapping[str, Any]], ahead: Mapping[int, int], timeline: Timeline
) -> dict[str, Any]:
    """Merge the ranks' own documents. ``ahead``: how far each rank's profiler is ahead of the timeline's
    clock, in nanoseconds. The earliest event becomes time 0, because viewers drop events at negative
    times."""
    kept = {rank: _kept(document["traceEvents"]) for rank, document in documents.items()}
    stamped = {rank: [e["ts"] for e in events if e["ph"] != "M"] for rank, events in kept.items() if events}
    begins = [nanoseconds(min(each, default=0)) - ahead[rank] for rank, each in stamped.items()]
    origin = min([timeline.begin, *begins])
    processes = {(times.rank, ""): times.rank for times in timeline.ranks}  # no two ranks share a number
    merged: list[ChromeEvent] = []
    for rank, events in kept.items():
        merged += _uncrossed(list(_moved(rank, events, ahead[rank] + origin, processes)))
    names: list[ChromeEvent] = []
    for order, ((rank, gpu), process) in enumerate(sorted(processes.items())):
        names.append(_about(process, 0, "process_name", name=f"rank {rank}{gpu}"))
        names.append(_about(process, 0, "process_sort_index", sort_index=order))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceEvents": [*names, *merged, *_own_tracks(timeline, origin)],
    }


def _about(process: int, thread: int, name: str, /, **value: str | int) -> ChromeEvent:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": value}


def _kept(events: Iterable[ChromeEvent]) -> list[ChromeEvent]:
    """The events of threads, and the threads' names; events of the profiler itself are dropped."""
    kept = [event for event in events if type(event.get("pid")) is int and type(event.get("tid")) is int]
    return [event for event in kept if event["ph"] != "M" or event["name"] == "thread_name"]


def _moved(
    rank: int, events: list[ChromeEvent], shift: int, processes: dict[tuple[int, str], int]
) -> Iterator[ChromeEvent]:
    """A rank's events on the common clock. Each GPU becomes a process, which is added to ``processes``."""
    host = next((e["pid"] for e in events if e.get("cat") in ("user_annotation", "cpu_op")), None)
    used = {event["pid"] for event in events if event["ph"] == "X"}
    for event in events:
        about, pid = event["ph"] == "M", event["pid"]
        if about and pid != host and pid not in used:
            continue
        gpu = "" if pid == host else f" · GPU {pid}"
        process = processes.setdefault((rank, gpu), 100_000 + len(processes))
        moved = event | {"pid": process, "ts": 0 if about else (nanoseconds(event["ts"]) - shift) / 1000}
        if "id" in event:
            moved["id"] = f"{rank}.{event['id']}"
        yield moved


def _uncrossed(events: list[ChromeEvent]) -> Iterator[ChromeEvent]:
    """Yield the events. If two complete events of a thread cross, the later one moves to another track.

    Gloo's events cross: an event lasts as long as its collective, and meanwhile the thread may begin another.
    """
    tracks: dict[tuple[int, int], list[ChromeEvent]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
        else:
            yield event
    for (process, thread), pieces in tracks.items():
        nested, crossing = _nested(pieces)
        yield from nested
        track = ASIDE_TRACK + thread * 16
        while crossing:
            track += 1
            nested, crossing = _nested(crossing)
            yield _about(process, track, "thread_name", name=f"thread {thread}, aside")
            yield from (event | {"tid": track} for event in nested)


def _nested(pieces: list[ChromeEvent]) -> tuple[list[ChromeEvent], list[ChromeEvent]]:
    """Divide a track's complete events into those that nest, and those that cross an earlier event."""
    nested: list[ChromeEvent] = []
    crossing: list[ChromeEvent] = []
    open_until: list[int] = []
    for event in sorted(pieces, key=lambda event: (event["ts"], -event["dur"])):
        begin = nanoseconds(event["ts"])
        end = begin + nanoseconds(event["dur"])
        while open_until and open_until[-1] <= begin + SLACK:
            open_until.pop()
        if open_until and end > open_until[-1] + SLACK:
            crossing.append(event)
        else:
            nested.append(event)
            open_until.append(end)
    return nested, crossing


def _own_tracks(timeline: Timeline, origin: int) -> Iterator[ChromeEvent]:
    asked, states = last_asked(timeline), paint(timeline)
    for times in timeline.ranks:
        yield from _name_track(times.rank, STATE_TRACK, "where the time goes", -100)
        for state, intervals in states[times.rank].items():
            for begin, end in intervals:
                yield _complete(times.rank, STATE_TRACK, "state", state, begin - origin, end - begin, {})
        for lane, flights in enumerate(lanes(times.flights)):
            yield from _name_track(times.rank, FLIGHT_TRACK + lane, f"collectives {lane + 1}", lane - 99)
            for flight in flights:
                last = asked.get((flight.group, flight.turn))
                yield _flown(FLIGHT_TRACK + lane, flight, origin, last)


def _name_track(process: int, thread: int, name: str, order: int) -> Iterator[ChromeEvent]:
    yield _about(process, thread, "thread_name", name=name)
    yield _about(process, thread, "thread_sort_index", sort_index=order)


def _flown(thread: int, flight: Flight, origin: int, last: int | None) -> ChromeEvent:
    args: dict[str, Any] = {
        "phase": flight.phase,
        "subject": flight.subject,
        "kind": flight.kind,
        "group": list(flight.group),
        "turn": flight.turn,
        "payload bytes": flight.payload,
        "ring bytes": flight.ring,
    }
    if last is not None:
        args["waited for the last member, µs"] = max(0, min(last, flight.done) - flight.issued) / 1000
    name, duration = f"{flight.kind}: {flight.label}", flight.done - flight.issued
    return _complete(flight.rank, thread, "collective", name, flight.issued - origin, duration, args)


def _complete(
    process: int, thread: int, category: str, name: str, begin: int, duration: int, args: dict[str, Any]
) -> ChromeEvent:
    track = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread}
    return {**track, "ts": begin / 1000, "dur": duration / 1000, "args": args}


def lanes(flights: Iterable[Flight]) -> list[list[Flight]]:
    """Divide flights into as few lanes as possible. Flights in one lane do not overlap."""
    rows: list[list[Flight]] = []
    for flight in sorted(flights, key=lambda flight: (flight.issued, flight.done)):
        row = next((row for row in rows if row[-1].done <= flight.issued), None)
        if row is None:
            rows.append([flight])
        else:
            row.append(flight)
    return rows
