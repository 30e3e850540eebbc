"""Records of a step: hand-made cases, real ranks compared with the timed world, and the written files."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_tutorial import Grid, LiveWorld, build_mesh, launch
from muon_tutorial.engine.collective import Start, Wait, Walk
from muon_tutorial.errors import TraceError, UsageError
from muon_tutorial.evidence.traces.profiler_trace import parse_trace
from muon_tutorial.evidence.traces.time_split import split
from muon_tutorial.timing.machine import SHAPED_BURST, Link, find_machine, machine_from
from muon_tutorial.timing.step_recorder import (
    NotedRequest,
    RankNotes,
    StepRecorder,
    record_walk,
    recorded_timeline,
)
from muon_tutorial.timing.timed_world import Span
from muon_tutorial.timing.timeline import (
    NEWTON_SCHULZ,
    RecordedStep,
    Recording,
    StepTimeline,
    as_data,
    compare_phases,
    from_data,
    middle,
    predicted_timeline,
    read_recording,
    side_by_side,
)
from muon_tutorial.timing.timeline_cases import CASES, TimelineTask, bytes_of, predict_case, record_cases
from scripts import timelines as script
from scripts.timelines import TimelinePair, draw_pairs

from ..exhaustive import left_out
from .test_machine import refused_in_one_line
from .test_timed_world import asked, compute, run

LAPTOP = find_machine("laptop")
LOOK = attrgetter("kind", "label", "rank", "turn", "payload", "ring")
SMALL = TimelineTask(dp=2, count=4, side=32, steps=1)


def early(rank: int) -> Walk:
    """Rank 1 asks two seconds later; then both compute for two seconds while the data travel for one."""
    compute(rank)
    ticket = yield Start(asked())
    compute()
    yield Wait(ticket)


def early_timeline() -> StepTimeline:
    return predicted_timeline(run(early))


def test_a_predicted_flight_is_issued_begins_ends_and_is_answered() -> None:
    flights = {flight.rank: flight for flight in early_timeline().flights}
    times = {rank: (one.issued, one.begin, one.end, one.answered) for rank, one in flights.items()}
    assert times[0] == pytest.approx((0, 2, 3, 3))  # rank 0 has nothing more to do, and waits
    assert times[1] == pytest.approx((2, 2, 3, 4))  # rank 1 goes on computing
    said = {(one.kind, one.label, one.payload, one.ring) for one in flights.values()}
    assert said == {("all_reduce", "sum", 1000, 1000)}


def test_a_rank_computes_waits_and_sends_beside_it() -> None:
    timeline = early_timeline()
    assert timeline.ranks == (0, 1)
    assert [timeline.seconds, timeline.total("product", 1)] == pytest.approx([4, 4])
    assert [span.doing for span in timeline.of(0)] == ["product", "wait", "transfer"]
    edges = [edge for span in timeline.of(0) for edge in (span.begin, span.end)]
    assert edges == pytest.approx([0, 2, 2, 3, 2, 3])
    named = {(phase.rank, phase.name): (phase.begin, phase.end) for phase in timeline.phases}
    assert named[1, "sum"] == pytest.approx((2, 4))
    assert named[1, f"{NEWTON_SCHULZ} after start"] == pytest.approx((0, 2))


def request(rank: int, asked_at: int, phase: str = "sum", **moments: int) -> NotedRequest:
    about = rank, "all_reduce", phase, "", (0, 1), int(phase == "share")
    return NotedRequest(*about, 8, 8, asked_at, moments)  # type: ignore[arg-type]


def notes() -> list[RankNotes]:
    """Two ranks' notes, in nanoseconds: one request is waited for at once, and one is in the background."""
    summed = request(0, 100, issued=300, done=300), request(1, 200, issued=310, done=310)
    first = request(0, 400, "share", issued=420, waiting=700, answered=900)
    second = request(1, 500, "share", issued=540, done=800, waiting=850, answered=860)
    return [
        RankNotes(0, 0, 1000, (summed[0], first), ((450, 650),)),
        RankNotes(1, 50, 1000, (summed[1], second), ((600, 840),)),
    ]


def nano(spans: list[Span]) -> list[tuple[str, int, int, str]]:
    return [(span.doing, round(span.begin * 1e9), round(span.end * 1e9), span.label) for span in spans]


def test_notes_of_all_ranks_become_one_timeline() -> None:
    timeline = recorded_timeline(notes())
    assert nano(timeline.of(0, "product", "copy", "wait")) == [
        ("copy", 0, 100, "start"),
        ("wait", 100, 300, "sum"),
        ("copy", 300, 400, "sum"),
        ("copy", 400, 450, "share"),
        ("product", 450, 650, "share"),
        ("copy", 650, 700, "share"),
        ("wait", 700, 900, "share"),
        ("copy", 900, 1000, "share"),
    ]
    assert nano(timeline.of(0, "transfer")) == [
        ("transfer", 200, 300, "sum"),  # rank 1 was the last to ask
        ("transfer", 540, 900, "share"),  # the backend did not report its end
    ]
    assert nano(timeline.of(1, "transfer"))[1] == ("transfer", 540, 800, "share")
    assert [flight.turn for flight in timeline.flights] == [0, 1, 0, 1]


def shifted(timeline: StepTimeline, rank: int, seconds: float) -> StepTimeline:
    spans = tuple(replace(s, end=s.end + seconds) if s.rank == rank else s for s in timeline.spans)
    flights = []
    for one in timeline.flights:
        later = seconds * (one.rank == rank)
        flights.append(replace(one, issued=one.issued + later, answered=one.answered + later))
    return StepTimeline("recorded", spans, tuple(flights))


def test_phases_are_compared_in_parts_of_the_recorded_step() -> None:
    predicted = early_timeline()
    assert {gap.worst for gap in compare_phases(predicted, predicted)} == {0.0}
    later = shifted(predicted, 1, 1.0)  # the step now takes 5 s
    gaps = {(gap.rank, gap.name): (gap.begin, gap.end) for gap in compare_phases(predicted, later)}
    assert gaps[1, "sum"] == pytest.approx((0.2, 0.2))
    assert gaps[0, "sum"] == (0, 0)
    assert TimelinePair("a step", predicted, later).worst == pytest.approx(0.2)


def test_steps_with_other_phases_are_not_compared() -> None:
    whole = early_timeline()
    part = replace(whole, flights=tuple(one for one in whole.flights if one.rank == 0))
    with pytest.raises(TraceError, match="only the predicted timeline has 'sum' on rank 1"):
        compare_phases(whole, part)
    with pytest.raises(TraceError, match="only the recorded timeline has"):
        compare_phases(part, whole)


def test_the_median_stands_for_several() -> None:
    several = [shifted(early_timeline(), 1, seconds) for seconds in (2.0, 0.0, 1.0, 9.0)]
    assert middle(several) is several[2]


def test_a_recording_is_written_and_read(tmp_path: Path) -> None:
    steps = tuple(RecordedStep("zero1", window, "bus", 2.5e7, (4.0,), early_timeline()) for window in (1, 3))
    recording = Recording({"date": "today"}, asdict(SMALL), asdict(LAPTOP), steps)
    recording.write(tmp_path / "steps.json")
    again = read_recording(tmp_path / "steps.json")
    assert (again.about, TimelineTask(**again.task)) == ({"date": "today"}, SMALL)
    assert machine_from(again.machine) == LAPTOP
    assert (again.step("zero1", 3, "bus").rate, again.steps[0].seconds) == (2.5e7, (4.0,))
    for one in again.steps:
        assert as_data(one.timeline) == as_data(early_timeline())
        assert compare_phases(early_timeline(), one.timeline)[0].worst == pytest.approx(0, abs=1e-4)
    with pytest.raises(TraceError, match=r"no step \('owner', 1, 'bus'\)"):
        again.step("owner", 1, "bus")


@pytest.mark.parametrize("held", ["no JSON", "{}", '{"about":{},"machine":{},"steps":[{"strategy":1}]}'])
def test_a_file_that_is_no_recording_is_one_line(tmp_path: Path, held: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(held, encoding="utf-8")
    told = refused_in_one_line(TraceError, lambda: read_recording(path))
    assert "steps.json is not a recording of steps" in told
    with pytest.raises(TraceError, match="is not a timeline of a step"):
        from_data({"spans": [[0, 1]], "labels": [], "kinds": [], "flights": [], "source": "recorded"})


def test_it_becomes_a_trace_that_is_read_and_split() -> None:
    timeline = early_timeline()
    trace = parse_trace(json.loads(json.dumps(timeline.document())))
    names = {(event.process, event.name) for event in trace.events}
    assert {(0, "product"), (0, "wait"), (1, "all_reduce: sum"), (1, "compute")} <= names
    product = next(event for event in trace.events if (event.process, event.name) == (0, "product"))
    assert (product.begin, product.duration) == (0, 2 * 10**9)
    for row, wait in zip(split(timeline.trace), (1, 0), strict=True):
        assert row.compute + row.communication + row.waiting + row.neither == row.span
        assert row.communication == pytest.approx(wait * 1e9)


def test_a_prediction_stands_beside_its_recording_in_one_trace() -> None:
    document = side_by_side(early_timeline(), shifted(early_timeline(), 1, 1.0))
    named = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert named == {0: "rank 0", 1: "rank 1", 1000: "rank 0, predicted", 1001: "rank 1, predicted"}
    assert {event.process for event in parse_trace(document).events if event.name == "product"} == set(named)


def test_the_same_pairs_give_the_same_picture_and_say_their_gap() -> None:
    predicted = early_timeline()
    pair = TimelinePair("a step", predicted, shifted(predicted, 1, 1.0))
    assert str(pair) == "a step: predicted 4000 ms, recorded 5000; phases within 20% of the step"
    assert draw_pairs([pair, pair], "two") == draw_pairs([pair, pair], "two")
    assert draw_pairs([pair]) != draw_pairs([replace(pair, recorded=predicted)])


@pytest.fixture(scope="module")
def recorded() -> list[list[StepTimeline]]:
    """Each case's steps on real ranks."""
    return record_cases(SMALL)


def test_real_ranks_live_through_the_phases_that_are_predicted(recorded: list[list[StepTimeline]]) -> None:
    for case, (real,) in zip(CASES, recorded, strict=True):
        said = predict_case(SMALL, LAPTOP, *case)
        assert compare_phases(said, real), case
        assert len(real.flights) == len(said.flights)
        assert set(map(LOOK, real.flights)) == set(map(LOOK, said.flights))
        for one in real.flights:
            assert 0 <= one.begin <= one.end <= one.answered
            assert one.issued <= one.answered
        for rank in range(SMALL.dp):
            spans = real.of(rank, "product", "copy", "wait")  # without a gap
            assert all(one.end == pytest.approx(two.begin, abs=1e-8) for one, two in pairwise(spans))
            assert real.total("product", rank) > 0


def on_two_ranks(rank: int) -> list[Any]:
    """Two steps noted by one recorder, one of them interrupted."""
    world, recorder = LiveWorld(build_mesh({"dp": 2})), StepRecorder(rank)

    def program(breaks: bool) -> Walk:
        ticket = yield Start(replace(asked(elements=4), send=torch.ones(4)))
        with recorder.product():
            pass
        answer = yield Wait(ticket)
        if breaks:
            raise UsageError("stop")
        return answer

    with pytest.raises(UsageError):
        record_walk(world, program(True), recorder)
    return [record_walk(world, program(False), recorder), len(recorder.notes), world.observers]


def test_a_recorder_notes_whole_steps_and_lets_go_of_its_world() -> None:
    for rank, (noted, kept, observers) in enumerate(launch(on_two_ranks, 2)):
        assert (noted.rank, kept, observers) == (rank, 1, [])
        [request] = noted.requests
        assert request.in_background
        assert len(noted.products) == 1
        assert noted.begin <= request.asked <= request.issued <= request.answered <= noted.end


@pytest.mark.parametrize(("rate", "per_second"), [("200mbit", 2.5e7), ("1gbit", 1.25e8), ("1.5kbit", 187.5)])
def test_a_rate_is_as_tc_writes_it(rate: str, per_second: float) -> None:
    link = Link(per_second, LAPTOP.inside.latency, shared=True, burst=SHAPED_BURST)
    assert LAPTOP.on_bus(bytes_of(rate)).inside == link


@pytest.mark.parametrize("steps", ["those above", left_out("new ones")])
def test_the_script_prints_a_row_for_each_case_and_writes_its_pictures(
    steps: str,
    recorded: list[list[StepTimeline]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if steps == "those above":
        monkeypatch.setattr(script, "record_cases", lambda task: recorded)
        monkeypatch.setattr(script, "run_shaped", lambda *asked: pickle.dumps(recorded))
    path = tmp_path / "machine.json"
    LAPTOP.write(path)
    options = [word for name, value in asdict(SMALL).items() for word in (f"--{name}", str(value))]
    options += ["--machine", str(path)]
    assert script.main([*options, "--rate", "fast"]) == 2
    assert capsys.readouterr().err == "a rate is a number and a unit, such as 200mbit or 1gbit; got 'fast'\n"
    assert script.main([*options, "--folder", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| loop", "| 200"))]
    assert len(rows) == 8 or (steps, len(rows)) == ("new ones", 4)  # if the loopback cannot be limited
    written = (tmp_path / "timelines.md").read_text(encoding="utf-8")
    assert all(row in written for row in rows)
    traced = json.loads((tmp_path / "owner-window3-loopback.json").read_text(encoding="utf-8"))
    assert {event.process for event in parse_trace(traced).events} == {0, 1, 1000, 1001}
    assert (tmp_path / "timelines-loopback.svg").read_text(encoding="utf-8").startswith("<svg")


def test_each_strategy_has_buckets_for_a_window() -> None:
    assert SMALL.plan("zero1").grid == Grid.of(dp=2)
    assert [len(SMALL.plan(name).buckets) for name in ("zero1", "owner")] == [2, 2]
