"""Checks a published reproduction report against its own traces.

The report ("Reproducing and Validating Distributed Muon") comes with its traces
(huggingface.co/datasets/bird-of-paradise/muon-distributed-reproducibility, ``traces/comparison``), so its
headline numbers can be traced to single events. For each figure, the table gives the published value, the
value that we get from the traces, and a comparison of like with like. Lesson 13's ``published_traces`` holds
the data of four of the traces, so the traces themselves are not needed:

    python -m scripts.lab.report_001             the table, from the packaged figures
    python -m scripts.lab.report_001 FOLDER      the same, read from the traces in FOLDER
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muon_tutorial.errors import TraceError
from muon_tutorial.evidence.traces import profiler_trace
from muon_tutorial.evidence.traces.profiler_trace import NameSum, Trace, TraceEvent, sums_by_name
from muon_tutorial.evidence.traces.recording import ITEM_BYTES
from muon_tutorial.evidence.traces.time_intervals import measure
from muon_tutorial.learn.cheaper import published_traces
from muon_tutorial.learn.cheaper.published_traces import MB, SOURCE, Ratio, StepSizes, TraceSummary

WORDS = ("all_reduce", "allreduce", "all_gather", "allgather")  # events that the report sums
FILES = {
    "adamw": "trace_adamw_FULLSTEP_rank0.json",
    "adamw_async": "trace_adamw_FULLSTEP_async_rank0.json",
    "muon": "trace_muon_FULLSTEP_dp2_tp2_rank0.json",
    "muon_async": "trace_muon_FULLSTEP_dp2_tp2_async_rank0.json",
}
NOTES = (
    f"Traces: {SOURCE}. Rank 0 of four RTX A4000, five steps, one run each: differences of some per cent "
    "are noise. The two runs do not do the same work: AdamW is unsharded DDP that all-reduces the whole "
    "model in fp32; Muon starts from gradients that are already averaged and sharded, and ends before any "
    "parameter is gathered. A communication kernel spins until its peers arrive, so its time is transfer and "
    "waiting; one rank's trace cannot tell them apart. The report's multi-node table is the communication "
    "column times 3."
)
MS = 1e6  # nanoseconds


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """A published figure, its reproduction from the traces, and comparisons of like with like."""

    claim: str
    published: str
    reproduced: Ratio
    beside: tuple[Ratio, ...]


def summarize(trace: Trace) -> TraceSummary:
    """Read the data for the figures from one trace.

    Raises:
        TraceError: the trace lacks an annotation that the report's traces have.
    """
    launch = _only(trace.of("cpu annotation"), "Muon_Step", "AdamW_Step")
    begin, end = profiler_trace.span(trace.executed)
    return TraceSummary(
        file=trace.source.removesuffix(".gz"),
        devices=int(trace.job.get("world_size", 0)),
        device=trace.devices[0] if trace.devices else "",
        nccl=str(trace.job.get("nccl_version", "")),
        steps=launch.count,
        gpu_span=end - begin,
        busy=measure(profiler_trace.covered(trace.executed)),
        computing=measure(trace.compute),
        communicating=measure(profiler_trace.covered(trace.collectives)),
        full_step=_only(trace.of("cpu annotation"), "Muon_Full_Training_Step", "AdamW_Full_Training_Step"),
        launch=launch,
        optimizer=_only(trace.of("gpu annotation"), "Optimizer.step#Muon.step", "Optimizer.step#AdamW.step"),
        matched=sums_by_name(trace.events, WORDS),
        collectives=profiler_trace.sum_collectives(trace),
    )


def _only(events: Sequence[TraceEvent], *names: str) -> NameSum:
    found = [row for row in sums_by_name(events, names) if row.name in names]
    if len(found) != 1:
        raise TraceError(
            f"expected annotations with exactly one of the names {', '.join(names)}; found {len(found)}"
        )
    return found[0]


def read_summaries(folder: str | Path) -> dict[str, TraceSummary]:
    """Read the four traces of a folder, gzipped or not.

    Raises:
        TraceError: a trace is missing, or a file is not such a trace.
    """
    return {key: summarize(_read(folder, name)) for key, name in FILES.items()}


def read_step(folder: str | Path, number: int = 2) -> tuple[TraceEvent, ...]:
    """Read one step of the asynchronous Muon, without operators and CUDA calls; ``number`` counts from 0."""
    trace = _read(folder, FILES["muon_async"])
    steps = [event for event in trace.events if event.name == "Optimizer.step#Muon.step"]
    call, run = (
        [each for each in steps if each.sort == sort][number] for sort in ("cpu annotation", "gpu annotation")
    )
    return tuple(
        TraceEvent(
            _short(each.name),
            each.sort,
            each.begin - call.begin,
            each.duration,
            *(("rank 0", 1) if each.sort in ("launch", "cpu annotation") else ("GPU 0", each.thread)),
            {},
        )
        for each in trace.of("kernel", "memory", "launch", "gpu annotation", "cpu annotation")
        if call.begin <= each.begin < run.end and each.name != "FWD_BWD"
        if each.sort != "launch" or each.name.startswith("c10d::")
    )


def _short(name: str) -> str:
    """A kernel's name without its templates and arguments."""
    product = re.search(r"\w*gemm\w*", name)
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return product[0] if product else re.split(r"[<(]", bare)[0].strip()


def _read(folder: str | Path, name: str) -> Trace:
    path, zipped = Path(folder, name), Path(folder, f"{name}.gz")
    return profiler_trace.read_trace(zipped if zipped.exists() and not path.exists() else path)


def check_report(summaries: Mapping[str, TraceSummary] | None = None) -> tuple[PublishedFigure, ...]:
    """Reproduce the published figures, from the result of ``read_summaries`` or from the packaged data.

    >>> for figure in check_report():
    ...     print(f"{figure.published:8}{figure.reproduced.shown:8}{figure.reproduced.how}")
    0.57×   0.57×   139.53 / 245.84 ms
    43%     43%     1 - 139.53 / 245.84
    1.1%    1.1%    4.29 / 388.86 ms
    15%     15%     388.86 / 338.51 ms
    2.1×    2.1×    294.09 / 139.53 ms
    50%     50%     72.74 / 145.48 MB
    """
    summaries = published_traces.report() if summaries is None else summaries
    adamw, muon = summaries["adamw"], summaries["muon"]
    sizes = published_traces.step_sizes(adamw, muon)
    return (
        *_of_communication(adamw, muon, sizes),
        *_of_steps(adamw, muon),
        *_of_async_and_state(summaries, sizes),
    )


def _of_communication(adamw: TraceSummary, muon: TraceSummary, sizes: StepSizes) -> Iterator[PublishedFigure]:
    counted = f"{muon.times_counted:.1f} and {adamw.times_counted:.1f} times"
    names, kernels = muon.sum_over_names / adamw.sum_over_names, muon.kernels / adamw.kernels
    more = float((sizes.zero1_muon() + sizes.tp_gather()) / sizes.zero1_adamw() - 1)
    yield PublishedFigure(
        "communication of Muon (DP2×TP2) against AdamW: a sum over names, in time",
        "0.57×",
        _times("every event whose name matches, summed", muon.sum_over_names, adamw.sum_over_names, 2),
        (
            Ratio("events summed for each collective", counted, "Muon and AdamW"),
            _times("each collective once: kernels alone, waiting included", muon.kernels, adamw.kernels, 3),
            *published_traces.compare_bytes(adamw, muon),
        ),
    )
    yield PublishedFigure(
        "communication that Muon saves",
        "43%",
        Ratio(
            "the same sums",
            f"{1 - names:.0%}",
            f"1 - {muon.sum_over_names / MS:.2f} / {adamw.sum_over_names / MS:.2f}",
        ),
        (
            Ratio("kernels alone", f"{1 - kernels:.1%}", "1 - the kernels' ratio"),
            Ratio("like for like, bytes", f"{-more:.0%}", "nothing is saved: 1.70× is 70% more"),
        ),
    )


def _of_steps(adamw: TraceSummary, muon: TraceSummary) -> Iterator[PublishedFigure]:
    bare = muon.optimizer.total - muon.kernels
    ratio = muon.full_step.total / adamw.full_step.total
    how = f"{muon.full_step.total / MS:.2f} / {adamw.full_step.total / MS:.2f} ms"
    yield PublishedFigure(
        "the optimizer's share of the step: its launch on the CPU",
        "1.1%",
        _share("annotation Muon_Step on the CPU", muon.launch.total, muon.full_step.total, 1),
        (
            _share("the step's share of the GPU's span", muon.optimizer.total, muon.gpu_span, 0),
            _share("the same without its communication", bare, muon.gpu_span, 0),
            _share("AdamW's share without its communication", adamw.optimizer.total, adamw.gpu_span, 1),
            _share(
                "AdamW's share with its communication",
                adamw.optimizer.total + adamw.kernels,
                adamw.gpu_span,
                0,
            ),
        ),
    )
    yield PublishedFigure(
        "Muon's step is slower",
        "15%",
        Ratio("the CPU's annotation of five steps", f"{ratio - 1:.0%}", how),
        (
            _times("the GPU's span", muon.gpu_span, adamw.gpu_span, 2),
            _times("time in which the GPU did anything: AdamW's idles more", muon.busy, adamw.busy, 2),
            _times("time in which anything but communication ran", muon.computing, adamw.computing, 2),
        ),
    )


def _of_async_and_state(summaries: Mapping[str, TraceSummary], sizes: StepSizes) -> Iterator[PublishedFigure]:
    adamw, muon = summaries["adamw"], summaries["muon"]
    adamw_async, muon_async = summaries["adamw_async"], summaries["muon_async"]
    slices, straddling = muon.collectives
    kept = sizes.shard / sizes.ranks * 4
    gained = muon.gpu_span - muon_async.gpu_span
    buffers = slices.received * ITEM_BYTES[slices.dtype] + straddling.received * ITEM_BYTES[straddling.dtype]
    yield PublishedFigure(
        'Muon with async_op=True is "slower": summed event time',
        "2.1×",
        _times("every event whose name matches, summed", muon_async.sum_over_names, muon.sum_over_names, 1),
        (
            _times("kernels alone, which spin while they wait", muon_async.kernels, muon.kernels, 2),
            _times("time in which any of them ran", muon_async.communicating, muon.communicating, 2),
            _times("the GPU's span: faster, in one run each", muon_async.gpu_span, muon.gpu_span, 3),
            _times("what its span gains, and the dp gathers that nothing waits for", gained, slices.total, 2),
            _times("AdamW by the sum over names", adamw_async.sum_over_names, adamw.sum_over_names, 2),
            _times("AdamW by the GPU's span", adamw_async.gpu_span, adamw.gpu_span, 3),
        ),
    )
    yield PublishedFigure(
        "optimizer state of Muon against AdamW, in fp32",
        "50%",
        _held("one momentum against two moments, an element", sizes.whole * 4, sizes.whole * 8),
        (
            _held("ZeRO-1 both, DP2×TP2, a rank", kept, 2 * kept),
            _held("the same while Muon's gather buffers live", kept + buffers, 2 * kept),
        ),
    )


def _times(what: str, one: float, other: float, digits: int) -> Ratio:
    return Ratio(what, f"{one / other:.{digits}f}×", f"{one / MS:.2f} / {other / MS:.2f} ms")


def _share(what: str, part: float, whole: float, digits: int) -> Ratio:
    return Ratio(what, f"{part / whole:.{digits}%}", f"{part / MS:.2f} / {whole / MS:.2f} ms")


def _held(what: str, one: float, other: float) -> Ratio:
    return Ratio(what, f"{one / other:.0%}", f"{one / MB:.2f} / {other / MB:.2f} MB")


def as_markdown(figures: Sequence[PublishedFigure]) -> str:
    """One table: a row for each figure, as published and as reproduced, then a row for each comparison."""
    lines = ["| figure | published | measured | from |", "|---|---|---|---|"]
    for figure in figures:
        found = figure.reproduced
        lines.append(f"| **{figure.claim}** | **{figure.published}** | **{found.shown}** | {found.how} |")
        lines += [f"| {ratio.what} | | {ratio.shown} | {ratio.how} |" for ratio in figure.beside]
    return "\n".join([*lines, "", NOTES])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.lab.report_001")
    parser.add_argument("folder", nargs="?", help="a folder with the four traces, gzipped or not")
    chosen = parser.parse_args(arguments)
    try:
        summaries = read_summaries(chosen.folder) if chosen.folder else published_traces.report()
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_markdown(check_report(summaries)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
