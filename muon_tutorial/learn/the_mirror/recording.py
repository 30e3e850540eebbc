"""One step, recorded phase by phase in a small file, and read back from it.

A recording holds, for every rank, matrix and moment of the step, which boxes of the matrix the rank held, and
a hash of their bytes. Before the step, each rank runs the same routes with its rank number in place of data,
and sees whose numbers arrive. The recording that comes with the package was made by

    diaries = launch(the_mirror.record_rank, 4, args=(2, 2, 0))
    source = "One step recorded on 4 real processes (Gloo), dp=2, tp=2"
    text = recording.dumps(recording.assemble(source, the_mirror.plan_of(2, 2), diaries))
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources

import torch
from torch import Tensor

from ...engine.collective import Collective, Label, Walk
from ...engine.hop_collectives import view
from ...engine.travel import stand_by, travel
from ...plan.bucket import Bucket, matrix_boxes
from ...plan.exchange import BufferSlice
from ...plan.grid import Coordinate, Grid
from ...plan.layout import Box
from ...plan.matrix import BucketEntry
from ...plan.strategies import Plan
from .. import inputs
from ..pictures.holdings import patches

PHASES = (
    "gradient reduce_scatter",
    "dp gather",
    "tp gather",
    "Newton–Schulz",
    "tp slice",
    "dp slice",
    "parameter all_gather",
)
MOMENTS = (
    "its own gradient",
    "its range, averaged",
    "its tp piece",
    "the whole matrix",
    "whole, orthogonal",
    "its tp piece",
    "its range",
    "its weight",
)
AXIS = 4
LAST = len(PHASES)
_NOBODY = -1
_SHIPPED = "step_dp2_tp2.json"

Tile = tuple[int, int, int, int, int]
"""A box of a matrix and its source: rank, first row, first column, rows, columns."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One message that a rank sent in the step: ``numbers`` counts its elements, and ``size`` its bytes."""

    phase: int
    subject: str
    kind: str
    axis: str
    numbers: int
    size: int


@dataclass(frozen=True, slots=True)
class RankDiary:
    """One rank's notes: tiles and contents for each matrix and moment, and the messages that it sent."""

    rank: int
    tiles: Mapping[str, Sequence[Sequence[Tile]]]
    contents: Mapping[str, Sequence[str]]
    sent: Sequence[SentMessage]


@dataclass(frozen=True, slots=True)
class StepRecording:
    """One recorded step: where it ran, the grid, the matrices by name, and one diary per rank."""

    source: str
    dp: int
    tp: int
    shapes: Mapping[str, tuple[int, int]]
    diaries: Sequence[RankDiary]

    @property
    def grid(self) -> Grid:
        return Grid.of(dp=self.dp, tp=self.tp)

    def workers(self, matrix: str) -> list[int]:
        """The ranks that held the whole matrix at Newton–Schulz."""
        return [diary.rank for diary in self.diaries if diary.tiles[matrix][AXIS]]

    def busiest(self) -> str:
        """The matrix that the largest number of ranks orthogonalize; on a tie, the first."""
        return max(self.shapes, key=lambda name: len(self.workers(name)))


@dataclass(slots=True)
class Diarist:
    """Notes what one rank holds at every moment. Add ``observe`` to the world's observers."""

    plan: Plan
    at: Coordinate
    tiles: dict[str, list[list[Tile]]] = field(init=False)
    contents: dict[str, list[str]] = field(init=False)
    sent: list[SentMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [entry.matrix.name for bucket in self.plan.buckets for entry in bucket.entries]
        self.tiles = {name: [[] for _ in MOMENTS] for name in names}
        self.contents = {name: [""] * len(MOMENTS) for name in names}

    def observe(self, request: Collective, at: Coordinate) -> None:
        """Note a message if it is this rank's and belongs to one of the seven phases."""
        label, axis = request.label, "×".join(request.axes)
        if label.phase in PHASES and at == self.at:
            numbers = 0 if request.send is None else request.send.numel()
            size, number = numbers * request.dtype.itemsize, PHASES.index(label.phase) + 1
            self.sent.append(SentMessage(number, label.subject, request.kind, axis, numbers, size))

    def note(self, moment: int, name: str, held: Tensor) -> None:
        """Note a hash of the bytes that the rank holds of a matrix."""
        raw = held.detach().flatten().view(torch.uint8).numpy().tobytes()
        self.contents[name][moment] = hashlib.sha256(raw).hexdigest()[:10] if raw else ""

    def note_held(self, moment: int, bucket: Bucket, flat: Tensor) -> None:
        """Note the bytes of each piece in a flat buffer with the model's layout."""
        for held in bucket.buffer_slices(bucket.model_layout, self.at):
            self.note(moment, held.entry.matrix.name, view(flat, held))

    def note_stored(self, moment: int, bucket: Bucket, flat: Tensor) -> None:
        """Note the bytes of each matrix's part in this rank's flat stored buffer."""
        for shard in bucket.stored_shards(self.at):
            self.note(moment, shard.entry.matrix.name, flat[slice(*shard.interval)])

    def diary(self) -> RankDiary:
        return RankDiary(self.at.rank, self.tiles, self.contents, self.sent)

    def trace(self) -> Walk:
        """Run all routes with rank numbers in place of data. All ranks must run it."""
        at = self.at
        for bucket in self.plan.buckets:
            length = bucket.length(bucket.storage_layout, at)
            own = torch.full((length,), float(at.rank), dtype=bucket.compute.dtype)
            for entry in bucket.entries:
                box = entry.matrix.box(at)
                self._see(0, entry, box, torch.full(box.shape, float(at.rank)))
            self._see_stored(1, bucket, own)
            back = yield from self.there_and_back(bucket, own)
            self._see_stored(6, bucket, back)
            route, label = bucket.parameter, Label("trace", f"bucket {bucket.index}")
            whole = yield from travel(back.to(route.dtype), route, at, label)
            self._see_held(7, bucket, whole)

    def there_and_back(self, bucket: Bucket, own: Tensor) -> Walk:
        """Phases 2 to 6 with ``own`` in place of data, and without Newton–Schulz."""
        at, label = self.at, Label("trace", f"bucket {bucket.index}")
        flat = yield from travel(own, bucket.compute, at, label)
        self._see_held(2, bucket, flat)
        done = torch.full_like(flat, _NOBODY)
        for entry, work in zip(bucket.entries, bucket.work_slices(at), strict=True):
            if work is None:
                yield from stand_by(entry.route)
                continue
            name = Label("trace", entry.matrix.name)
            matrix = yield from travel(view(flat, work), entry.route, at, name)
            for moment in (AXIS - 1, AXIS):
                self._see(moment, entry, Box((0, 0), entry.matrix.sides), matrix)
            view(done, work).copy_((yield from travel(matrix, entry.route.inverse, at, name)))
        self._see_held(5, bucket, done)
        return (yield from travel(done, bucket.compute.inverse, at, label))

    def _see_stored(self, moment: int, bucket: Bucket, flat: Tensor) -> None:
        for held in bucket.stored_shards(self.at):
            for box, part in stored_parts(held, self.at, flat):
                self._see(moment, held.entry, box, part)

    def _see_held(self, moment: int, bucket: Bucket, flat: Tensor) -> None:
        for held in bucket.buffer_slices(bucket.model_layout, self.at):
            self._see(moment, held.entry, held.box, view(flat, held))

    def _see(self, moment: int, entry: BucketEntry, box: Box, names: Tensor) -> None:
        top, left = box.offset
        self.tiles[entry.matrix.name][moment] += [
            (int(name), row + top, column + left, rows, columns)
            for name, row, column, rows, columns in patches(names.tolist())
            if name != _NOBODY
        ]


def stored_parts(held: BufferSlice, at: Coordinate, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """A rank's stored part of a matrix, from its flat buffer: rectangles, and the entries in each."""
    boxes = matrix_boxes(held, at)
    parts = flat[slice(*held.interval)].split([box.numel for box in boxes])
    return ((box, part.view(box.shape)) for box, part in zip(boxes, parts, strict=True))


def assemble(source: str, plan: Plan, diaries: Sequence[RankDiary]) -> StepRecording:
    shapes = {each.matrix.name: each.matrix.sides for bucket in plan.buckets for each in bucket.entries}
    return StepRecording(source, plan.grid.size("dp"), plan.grid.size("tp"), shapes, tuple(diaries))


def dumps(recording: StepRecording) -> str:
    return json.dumps(asdict(recording), separators=(",", ":"))


def loads(text: str) -> StepRecording:
    """The recording that a JSON text holds: the inverse of ``dumps``."""
    found = json.loads(text)
    for diary in found["diaries"]:
        tiles = diary["tiles"].items()
        diary["tiles"] = {n: [[tuple(tile) for tile in moment] for moment in moments] for n, moments in tiles}
        diary["sent"] = [SentMessage(**sent) for sent in diary["sent"]]
    shapes = {name: tuple(sides) for name, sides in found["shapes"].items()}
    diaries = tuple(RankDiary(**diary) for diary in found["diaries"])
    return StepRecording(**{**found, "shapes": shapes, "diaries": diaries})


def load() -> StepRecording:
    """The recording that comes with the package."""
    return loads((resources.files(inputs) / "recorded" / _SHIPPED).read_text(encoding="utf-8"))


def say_phase(recording: StepRecording, phase: int) -> str:
    sent = [item for diary in recording.diaries for item in diary.sent if item.phase == phase]
    if not sent:
        return "in one place, nothing is sent" if phase == AXIS else "nothing is sent"
    most = max(sum(item.numbers for item in diary.sent if item.phase == phase) for diary in recording.diaries)
    return f"{sent[0].kind} over {sent[0].axis}, up to {most:,} numbers from a rank"
