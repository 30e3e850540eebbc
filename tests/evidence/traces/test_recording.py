"""A recording of real ranks has their events in one file of the right format; its spans sum to 100%."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch.profiler import record_function

from muon_tutorial import Coordinate, Ledger, Muon, launch
from muon_tutorial.engine.collective import Collective, Kind, Label, Start, Wait, Walk
from muon_tutorial.errors import TraceError
from muon_tutorial.evidence.traces.recording import RankRecorder, RecordedRun, merge, record
from muon_tutorial.worlds.build_mesh import build_mesh
from muon_tutorial.worlds.live import Follow, LiveWorld, Moment

from ...configs.functions import config
from ...worlds.requests import one
from . import traps
from .traps import assert_keeps_to_the_format

MATRICES = 4


def steps(rank: int, recorder: RankRecorder, strategy: str) -> None:
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(48, 32)) for _ in range(MATRICES)]
    muon = Muon(matrices, strategy=strategy, mesh=build_mesh({"dp": 2}))
    assert isinstance(muon.world, LiveWorld)
    ledger = Ledger()
    muon.world.observers += [recorder, ledger]
    for recorded in (False, True):
        for matrix in matrices:
            matrix.grad = torch.randn_like(matrix)
        if not recorded:
            muon.step()
            continue
        ledger.clear()
        with recorder, record_function("the step"):
            muon.step()
    (recorder.folder / f"ledger_{rank}.json").write_text(
        json.dumps([[entry.kind, entry.phase, entry.payload, entry.ring] for entry in ledger.entries])
    )


@pytest.fixture(scope="module", params=["zero1", "owner"])
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return record(steps, 2, tmp_path_factory.mktemp(request.param), args=(request.param,), output="quiet")


def read(merged: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(merged.read_bytes()))


@pytest.fixture
def document(recording: RecordedRun) -> dict[str, Any]:
    return read(recording.merged)


def test_flights_are_the_ledgers_in_order_and_inside_the_span(recording: RecordedRun) -> None:
    one, other = (times.flights for times in recording.timeline.ranks)
    assert [(f.kind, f.group, f.turn) for f in one] == [(f.kind, f.group, f.turn) for f in other]
    assert {f.group for f in one} == {(0, 1)}
    for times, row in zip(recording.timeline.ranks, recording.splits, strict=True):
        counted = json.loads((recording.folder / f"ledger_{times.rank}.json").read_text())
        assert counted
        assert [[f.kind, f.phase, f.payload, f.ring] for f in times.flights] == counted
        assert all(times.begin <= f.issued <= f.done <= times.end for f in times.flights)
        assert times.compute
        assert row.compute > 0
        assert row.communication > 0
        assert row.unsplit == 0


def test_the_merged_file_keeps_to_the_format(document: dict[str, Any]) -> None:
    assert_keeps_to_the_format(document)
    named = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert named == ["rank 0", "rank 1"]


def test_the_profiler_and_the_flights_share_a_clock(document: dict[str, Any], recording: RecordedRun) -> None:
    """On the profiler's track, each label begins just after its flight; both name the same bytes."""
    events = document["traceEvents"]
    labels = [e for e in events if e.get("cat") == "user_annotation" and " bytes #" in e["name"]]
    flights = [e for e in events if e.get("cat") == "collective"]
    assert len(labels) == len(flights)
    for label, flight in zip(sorted(labels, key=by_rank), sorted(flights, key=by_rank), strict=True):
        assert label["name"].split(" over ")[0] == flight["args"]["kind"]
        assert f", {flight['args']['payload bytes']} bytes #" in label["name"]
        assert label["ts"] >= flight["ts"]


def test_each_matrix_newton_schulz_has_a_label(document: dict[str, Any], recording: RecordedRun) -> None:
    """With owners, the world has one label per matrix. With slices, each rank with a part has a label."""
    names = [e["name"] for e in document["traceEvents"] if e.get("cat") == "user_annotation"]
    labels = [name for name in names if name.startswith("Newton-Schulz of ")]
    assert len(set(labels)) == MATRICES
    if "gather to owners" in {flight.phase for flight in recording.timeline.ranks[0].flights}:
        assert len(labels) == MATRICES


def own_functions(rank: int, recorder: RankRecorder) -> None:
    matrices = [torch.nn.Parameter(torch.ones(8, 4)) for _ in range(2)]
    muon = Muon(matrices, distributed_config=config(shards=False))
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    with recorder:
        muon.step()


def test_functions_of_the_users_own_have_labels(tmp_path: Path) -> None:
    merged = record(own_functions, 2, tmp_path, output="quiet").merged
    names = [event["name"] for event in read(merged)["traceEvents"]]
    assert sum(name.startswith("gather_fn of ") for name in names) == 4
    assert sum(name.startswith("redistribute_fn of ") for name in names) == 4


def beside_torch(rank: int, recorder: RankRecorder) -> None:
    """Our requests, and between them PyTorch's own, over one group of both ranks."""
    world = LiveWorld(build_mesh({"dp": 2}), [recorder])
    recorder.others = world.at.group("dp")
    with recorder:
        for _ in range(3):
            for _ in range(2):
                world.run(one(ask("all_reduce", 4, "ours")))
            time.sleep(0.05 * rank)
            group = world.group(("dp",))
            functional.wait_tensor(functional.all_reduce(torch.ones(1000), "sum", group))


def ask(kind: Kind, receive: int, phase: str) -> Collective:
    ones = torch.ones(4)
    return Collective(kind, ("dp",), ones.dtype, ones, receive, Label(phase))


def test_collectives_of_others_are_matched_where_their_group_is_told(tmp_path: Path) -> None:
    recording = record(beside_torch, 2, tmp_path, output="quiet")
    for times in recording.timeline.ranks:
        assert [(f.phase, f.group, f.turn) for f in times.flights] == [
            ("ours" if turn % 3 < 2 else "not requested from a world", (0, 1), turn) for turn in range(9)
        ]
    assert [row.unsplit for row in recording.splits] == [0, 0]
    assert sum(row.waiting for row in recording.splits) > 0


def by_rank(event: dict[str, Any]) -> tuple[int, float]:
    return event["pid"], event["ts"]


def test_merging_writes_split_and_picture_and_gives_the_same_bytes_again(recording: RecordedRun) -> None:
    assert (recording.folder / "split.md").read_text(encoding="utf-8") == recording.markdown + "\n"
    assert (recording.folder / "timeline.svg").read_text(encoding="utf-8").startswith("<svg")
    before = recording.merged.read_bytes()
    assert merge(recording.folder).splits == recording.splits
    assert recording.merged.read_bytes() == before


def test_a_rank_that_never_records_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="rank 1 recorded nothing"):
        record(only_rank_0_records, 2, tmp_path, output="quiet")


def only_rank_0_records(rank: int, recorder: RankRecorder) -> None:
    if rank == 0:
        with recorder:
            torch.ones(2).sum()


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no recording"):
        merge(tmp_path)
    (tmp_path / "rank_0.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(TraceError, match="not written by a RankRecorder"):
        merge(tmp_path)


def test_an_observer_may_follow_a_request_to_its_end() -> None:
    for told in launch(follow_requests, 2, output="quiet"):
        assert told["at once"] == ["issued", "done"]
        in_flight = [moment for moment in told["in flight"] if moment != "done"]
        assert in_flight == ["issued", "waiting", "answered"]
        assert told["in flight"].count("done") == 1
        assert told["without a word from the backend"] == ["issued", "waiting", "answered"]


def follow_requests(rank: int) -> dict[str, list[Moment]]:
    told: dict[str, list[Moment]] = {}

    def observe(request: Collective, at: Coordinate) -> Follow:
        return told.setdefault(request.label.phase, []).append

    world = LiveWorld(build_mesh({"dp": 2}), [observe])

    def walk() -> Walk:
        yield ask("all_reduce", 4, "at once")
        yield Wait((yield Start(ask("all_gather", 8, "in flight"))))
        yield Wait((yield Start(ask("reduce_scatter", 2, "without a word from the backend"))))

    world.run(walk())
    world.run(one(ask("all_reduce", 4, "last")))
    return told


def test_on_a_gpu_flights_are_the_kernels_with_our_labels(tmp_path: Path) -> None:
    """A trace made by hand, without a GPU: rank 1 asks 20 ms late, and rank 0's kernel spins."""
    for rank, start in enumerate((1000, 21_000)):
        document = traps.counted_four_times()
        kernel = next(event for event in document["traceEvents"] if event["cat"] == "kernel")
        kernel["ts"], kernel["dur"] = start, 31_000 - start
        names = {"kind": "all_gather", "phase": "dp gather", "subject": "bucket 0"}
        asked = names | {"group": [0, 1], "turn": 0}
        enqueued = {"issued": 0, "done": 10_000, "payload": 8, "ring": 8}
        noted = {"rank": rank, "begin": 0, "end": 40_000_000, "ahead": 500_000, "flights": [asked | enqueued]}
        packed = gzip.compress(json.dumps(document | {"recorder": noted}).encode())
        (tmp_path / f"rank_{rank}.json.gz").write_bytes(packed)
    recording = merge(tmp_path)
    flights = [times.flights[0] for times in recording.timeline.ranks]
    assert [flight.label for flight in flights] == ["dp gather of bucket 0"] * 2
    assert [flight.issued for flight in flights] == [500_000, 20_500_000]
    assert [flight.done for flight in flights] == [30_500_000] * 2
    early, late = recording.splits
    assert (early.waiting, early.communication) == (20_000_000, 10_000_000)
    assert (late.waiting, late.communication) == (0, 10_000_000)
