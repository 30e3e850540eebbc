"""The requirements of the Trace Event Format, as far as Perfetto and chrome://tracing insist on them."""

from __future__ import annotations

import math
from typing import Any

METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def assert_keeps_to_the_format(document: dict[str, Any]) -> None:
    """Check types, times, names of metadata and ids of flows; and that complete events of one thread nest,
    to a nanosecond, which viewers need to draw them."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str), event
        assert event["ph"] in set("BEXiIMCbnestfPNODSTFp(vRca"), event
        assert type(event["pid"]) is type(event["tid"]) is int, event
        for time in (event["ts"], event["dur"]) if event["ph"] == "X" else (event["ts"],):
            assert type(time) in (int, float), event
            assert 0 <= time < math.inf, event
        assert isinstance(event.get("args", {}), dict), event
        if event["ph"] == "M":
            key, kind = METADATA[event["name"]]
            assert isinstance(event["args"][key], kind), event
        assert event["ph"] not in "stf" or isinstance(event["id"], (str, int)), event
        if event["ph"] == "X":
            begin, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
            tracks.setdefault((event["pid"], event["tid"]), []).append((begin, -duration))
    for track, pieces in tracks.items():
        open_until: list[int] = []
        for begin, negative in sorted(pieces):
            while open_until and open_until[-1] <= begin + 1:
                open_until.pop()
            assert not open_until or begin - negative <= open_until[-1] + 1, f"events cross on {track}"
            open_until.append(begin - negative)
