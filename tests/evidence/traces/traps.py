"""Small traces made by hand, one for each way to misread a trace. The traces are Chrome's JSON as plain data.

Times are in microseconds, as the format requires. ``profiler_trace.parse_trace`` reads them.
"""

from __future__ import annotations

import math
from typing import Any

Document = dict[str, Any]

_HOST, _STREAM, _SIDE_STREAM = 100, 7, 20
_KERNEL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def counted_four_times() -> Document:
    """One all_gather of 10 ms. Four events with its name take 20.3 ms together, but two only launched it."""
    return _document(*_all_gather(begin=1000, duration=10_000))


def launch_for_execution() -> Document:
    """An optimizer step whose call returns after 1 ms, while its work takes 60 ms on a GPU that is busy for
    100 ms. The whole loop's annotation on the CPU lasts 91 ms, since the CPU does not wait for the GPU."""
    return _document(
        event("user_annotation", "Full_Training_Step", 0, 91_000, _HOST, _HOST),
        event("kernel", "gemm (forward and backward)", 500, 40_000, 0, _STREAM),
        event("user_annotation", "Muon_Step", 90_000, 1_000, _HOST, _HOST),
        event("gpu_user_annotation", "Optimizer.step#Muon.step", 40_500, 60_000, 0, _STREAM),
        event("kernel", "gemm (Newton-Schulz)", 40_500, 60_000, 0, _STREAM),
    )


def spinning(overlapped: bool) -> Document:
    """A step with 20 ms of compute, and two all_gathers of 5 ms each whose peers are ready at 20 ms.

    If not ``overlapped``, both all_gathers are issued after the compute: their kernels take 10 ms, and the
    step takes 30 ms. Otherwise both all_gathers are issued at the start, on separate streams, and spin until
    the peers are ready: their kernels take 50 ms, and the step takes 25 ms.
    """
    compute = event("kernel", "gemm", 0, 20_000, 0, _STREAM)
    if not overlapped:
        return _document(compute, *_all_gather(20_000, 5_000), *_all_gather(25_000, 5_000))
    return _document(
        compute,
        *_all_gather(0, 25_000, stream=_SIDE_STREAM),
        *_all_gather(0, 25_000, stream=_SIDE_STREAM + 1),
    )


def _all_gather(begin: float, duration: float, stream: int = _STREAM) -> tuple[Document, ...]:
    sizes = {"Collective name": "all_gather", "In msg nelems": 500_000, "Out msg nelems": 1_000_000}
    args = sizes | {"Group size": 2, "dtype": "BFloat16", "Process Group Ranks": "[0, 1]"}
    return (
        event("cpu_op", "c10d::allgather_", begin - 200, 200, _HOST, _HOST),
        event("user_annotation", "nccl:all_gather", begin - 150, 100, _HOST, _HOST),
        event("kernel", _KERNEL, begin, duration, 0, stream, args),
        event("gpu_user_annotation", "nccl:all_gather", begin, duration, 0, stream),
    )


def event(
    category: str, name: str, begin: float, duration: float, process: Any, thread: Any, args: Any = None
) -> Document:
    about = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread}
    return about | {"ts": float(begin), "dur": float(duration), "args": args or {}}


def _document(*events: Document) -> Document:
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": list(events)}


METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def assert_keeps_to_the_format(document: dict[str, Any]) -> None:
    """Check types, times, names of metadata and ids of flows. Complete events of one thread must nest, to a
    nanosecond, because otherwise viewers cannot draw them."""
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
