"""One real step, recorded phase by phase as a small file, and drawn from it without any process.

A recording holds, for every rank, matrix and moment of the step, which boxes of the matrix the rank held, and
a name for the bytes in them. Who brought which box is not worked out from the plan: before the step, each
rank walks the same routes with its own rank number in place of data, and reads off whose numbers arrived.
``render(recording, moment)`` is a pure function.

The recording that comes with the package was made by

    diaries = launch(lesson08.record_rank, 4, args=(2, 2, 0))
    source = "One step recorded on 4 real processes (Gloo), dp=2, tp=2"
    text = replay.dumps(replay.assemble(source, lesson08.plan_of(2, 2), diaries))
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from ...engine.collective import Collective, Label, Walk
from ...engine.hops import view
from ...engine.travel import stand_by, travel
from ...plan.bucket import Bucket, StoredShard, matrix_boxes
from ...plan.exchange import BufferSlice
from ...plan.grid import Coordinate, Grid
from ...plan.layout import Box
from ...plan.matrix import BucketEntry
from ...plan.strategies import Plan
from .. import inputs
from ..pictures.picture import EMPTY, INK, QUIET, Picture, blank, finish, holder_colour
from ..widgets.shell import Shell, choice, show, slider

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
"""A box of a matrix and who brought it: rank, first row, first column, rows, columns."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One message of the step as one rank asked for it; ``numbers`` is how many it handed over."""

    phase: int
    subject: str
    kind: str
    axis: str
    numbers: int
    size: int


@dataclass(frozen=True, slots=True)
class Diary:
    """What one rank wrote down: tiles and contents by matrix, one for each moment, and what it sent."""

    rank: int
    tiles: Mapping[str, Sequence[Sequence[Tile]]]
    contents: Mapping[str, Sequence[str]]
    sent: Sequence[Sent]


@dataclass(frozen=True, slots=True)
class Recording:
    """One step: the grid, the matrices by name, where it ran, and a diary for each rank."""

    source: str
    dp: int
    tp: int
    shapes: Mapping[str, tuple[int, int]]
    diaries: Sequence[Diary]

    @property
    def grid(self) -> Grid:
        """The grid it ran on."""
        return Grid.of(dp=self.dp, tp=self.tp)

    def workers(self, matrix: str) -> list[int]:
        """The ranks that held the whole matrix at Newton–Schulz."""
        return [diary.rank for diary in self.diaries if diary.tiles[matrix][AXIS]]

    def busiest(self) -> str:
        """The matrix that most ranks orthogonalize; the first of them."""
        return max(self.shapes, key=lambda name: len(self.workers(name)))


@dataclass(slots=True)
class Diarist:
    """Notes, on one rank, what it holds at every moment. ``observe`` belongs among a world's observers."""

    plan: Plan
    at: Coordinate
    tiles: dict[str, list[list[Tile]]] = field(default_factory=dict)
    contents: dict[str, list[str]] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        for entry in (entry for bucket in self.plan.buckets for entry in bucket.entries):
            self.tiles[entry.matrix.name] = [[] for _ in range(LAST + 1)]
            self.contents[entry.matrix.name] = [""] * (LAST + 1)

    def observe(self, request: Collective, at: Coordinate) -> None:
        """Note a message of this rank's, if it is of one of the seven phases."""
        if request.label.phase in PHASES and at == self.at:
            numbers = 0 if request.send is None else request.send.numel()
            number = PHASES.index(request.label.phase) + 1
            axis = "×".join(request.axes)
            size = numbers * request.dtype.itemsize
            self.sent.append(Sent(number, request.label.subject, request.kind, axis, numbers, size))

    def note(self, moment: int, name: str, held: Tensor) -> None:
        """Note the bytes held of a matrix."""
        raw = held.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.contents[name][moment] = hashlib.sha256(raw).hexdigest()[:10] if held.numel() else ""

    def diary(self) -> Diary:
        """What was noted."""
        return Diary(self.at.rank, self.tiles, self.contents, self.sent)

    def trace(self) -> Walk:
        """Walk all routes with rank numbers in place of data. Must be walked by all ranks."""
        for bucket in self.plan.buckets:
            yield from self._trace_bucket(bucket)

    def _trace_bucket(self, bucket: Bucket) -> Walk:
        at, label = self.at, Label("trace", f"bucket {bucket.index}")
        own = torch.full(
            (bucket.length(bucket.storage_layout, at),), float(at.rank), dtype=bucket.compute.dtype
        )
        for entry in bucket.entries:
            box = entry.matrix.box(at)
            self._see(0, entry, box, torch.full(box.shape, float(at.rank)))
        self._see_stored(1, bucket, own)
        back = yield from self.there_and_back(bucket, own)
        self._see_stored(6, bucket, back)
        whole = yield from travel(back.to(bucket.parameter.dtype), bucket.parameter, at, label)
        self._see_held(7, bucket, whole)

    def there_and_back(self, bucket: Bucket, own: Tensor) -> Walk:
        """Phases 2 to 6 with whatever ``own`` holds in place of data, and no Newton–Schulz in the middle."""
        at, label = self.at, Label("trace", f"bucket {bucket.index}")
        flat = yield from travel(own, bucket.compute, at, label)
        self._see_held(2, bucket, flat)
        done = torch.full_like(flat, _NOBODY)
        for entry, work in zip(bucket.entries, bucket.work_slices(at), strict=True):
            if work is None:
                yield from stand_by(entry.route)
            else:
                yield from self._trace_matrix(entry, work, flat, done)
        self._see_held(5, bucket, done)
        return (yield from travel(done, bucket.compute.inverse, at, label))

    def _trace_matrix(self, entry: BucketEntry, work: BufferSlice, flat: Tensor, done: Tensor) -> Walk:
        label = Label("trace", entry.matrix.name)
        matrix = yield from travel(view(flat, work), entry.route, self.at, label)
        for moment in (AXIS - 1, AXIS):
            self._see(moment, entry, Box((0, 0), entry.matrix.sides), matrix)
        piece = yield from travel(matrix, entry.route.inverse, self.at, label)
        view(done, work).copy_(piece)

    def _see_stored(self, moment: int, bucket: Bucket, flat: Tensor) -> None:
        for held in bucket.stored_shards(self.at):
            for box, part in _parts(held, self.at, flat):
                self._see(moment, held.entry, box, part)

    def _see_held(self, moment: int, bucket: Bucket, flat: Tensor) -> None:
        for held in bucket.buffer_slices(bucket.model_layout, self.at):
            self._see(moment, held.entry, held.box, view(flat, held))

    def _see(self, moment: int, entry: BucketEntry, box: Box, names: Tensor) -> None:
        found = [
            (int(name), row + box.offset[0], column + box.offset[1], rows, columns)
            for name, row, column, rows, columns in patches(names)
            if name != _NOBODY
        ]
        self.tiles[entry.matrix.name][moment] += found


def _parts(held: StoredShard, at: Coordinate, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
    boxes = matrix_boxes(held, at)
    mine = flat[slice(*held.in_buffer)].split([box.numel for box in boxes])
    return ((box, part.view(box.shape)) for box, part in zip(boxes, mine, strict=True))


def patches(names: Tensor) -> list[tuple[float, int, int, int, int]]:
    """Rectangles of equal numbers that cover a matrix: number, first row, first column, rows, columns.

    >>> patches(torch.tensor([[0, 0, 1], [0, 0, 1]]))
    [(0, 0, 0, 2, 2), (1, 0, 2, 2, 1)]
    """
    found: list[tuple[float, int, int, int, int]] = []
    rows = [_runs(row) for row in names.tolist()]
    start = 0
    for row in range(1, len(rows) + 1):
        if row == len(rows) or rows[row] != rows[start]:
            found += [(name, start, left, row - start, length) for name, left, length in rows[start]]
            start = row
    return found


def _runs(row: Sequence[float]) -> list[tuple[float, int, int]]:
    runs: list[tuple[float, int, int]] = []
    for place, name in enumerate(row):
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((name, place, 1))
    return runs


def assemble(source: str, plan: Plan, diaries: Sequence[Diary]) -> Recording:
    """The recording of a step from the diaries of its ranks."""
    entries = [entry for bucket in plan.buckets for entry in bucket.entries]
    shapes = {entry.matrix.name: entry.matrix.sides for entry in entries}
    dp, tp = plan.grid.size("dp"), plan.grid.size("tp")
    return Recording(source, dp, tp, shapes, tuple(diaries))


def dumps(recording: Recording) -> str:
    """The recording as JSON."""
    return json.dumps(asdict(recording), separators=(",", ":"))


def loads(text: str) -> Recording:
    """The recording in a JSON text: the opposite of ``dumps``."""
    found = json.loads(text)
    shapes = {name: (rows, columns) for name, (rows, columns) in found["shapes"].items()}
    diaries = tuple(_diary(item) for item in found["diaries"])
    return Recording(found["source"], found["dp"], found["tp"], shapes, diaries)


def _diary(item: Mapping[str, Any]) -> Diary:
    tiles = {
        name: [[(tile[0], tile[1], tile[2], tile[3], tile[4]) for tile in moment] for moment in moments]
        for name, moments in item["tiles"].items()
    }
    return Diary(item["rank"], tiles, item["contents"], [Sent(**sent) for sent in item["sent"]])


def load(path: Path | None = None) -> Recording:
    """A recording from a file; without one, the step on real processes that comes with the package."""
    file = resources.files(inputs) / "recorded" / _SHIPPED if path is None else path
    return loads(file.read_text(encoding="utf-8"))


def say_phase(recording: Recording, phase: int) -> str:
    """What a phase sends, in words."""
    sent = [item for diary in recording.diaries for item in diary.sent if item.phase == phase]
    if not sent:
        return "in one place, nothing is sent" if phase == AXIS else "nothing is sent"
    most = max(sum(item.numbers for item in diary.sent if item.phase == phase) for diary in recording.diaries)
    return f"{sent[0].kind} over {sent[0].axis}, up to {most:,} numbers from a rank"


_WIDTH, _TOP, _MARGIN = 900, 182, 22


def render(recording: Recording, moment: int, matrix: str = "") -> Picture:
    """What every rank holds of a matrix after ``moment`` phases, beside the moment that mirrors it."""
    matrix = matrix or recording.busiest()
    outward, homeward = min(moment, LAST - moment), max(moment, LAST - moment)
    high = _tile_height(recording)
    figure, axes = blank(_WIDTH, round(_TOP + recording.dp * (high + 22) + 16))
    _draw_path(axes, recording, moment)
    half = _WIDTH / 2
    for place, shown in enumerate((outward, homeward)):
        left = _MARGIN + place * half
        _write_moment(axes, recording, matrix, left, shown, shown == moment)
        _draw_ranks(axes, recording, matrix, shown, (left, _TOP, half - 2 * _MARGIN, high))
    axes.plot([half, half], [96, _TOP + recording.dp * (high + 22)], color=INK, linewidth=1.4, dashes=(4, 3))
    return finish(figure, f"replay-{matrix}-{moment}", _say(recording, matrix, moment))


def _tile_height(recording: Recording) -> float:
    return max(30.0, min(84.0, 300 / recording.dp))


def _draw_path(axes: Axes, recording: Recording, moment: int) -> None:
    """The seven phases as a way up and the same way down, with the present moment and its mirror marked."""
    step = (_WIDTH - 2 * 60) / LAST
    places = [(60 + step * number, 66 - 14 * min(number, LAST - number)) for number in range(LAST + 1)]
    for number, (start, stop) in enumerate(pairwise(places), 1):
        passed = number == moment
        arrow = FancyArrowPatch(
            start, stop, arrowstyle="-|>", mutation_scale=11, color=INK, linewidth=2.6 if passed else 1.0
        )
        axes.add_patch(arrow)
        middle = ((start[0] + stop[0]) / 2, max(start[1], stop[1]) + 13)
        name = f"{number} {PHASES[number - 1]}".replace(" ", "\n", 2).replace("\n", " ", 1)
        axes.text(*middle, name, size=7, ha="center", va="top", color=INK, linespacing=1.25)
    for number, place in enumerate(places):
        now, mirror = number == moment, number == LAST - moment
        colour = INK if now else "#ffffff"
        axes.plot(*place, "o", markersize=11 if now or mirror else 5, markerfacecolor=colour, color=INK)


def _write_moment(axes: Axes, recording: Recording, matrix: str, left: float, shown: int, now: bool) -> None:
    title = ("now: " if now else "its mirror: ") + MOMENTS[shown]
    axes.text(left, 116, title, size=10.5, weight="bold", color=INK)
    axes.text(left, 134, say_when(shown), size=8.5, color=QUIET)
    axes.text(left, 150, say_contents(recording, matrix, shown), size=8.5, color=QUIET)


def say_when(moment: int) -> str:
    """Between which phases a moment lies."""
    after = f"after phase {moment}" if moment else "before phase 1"
    before = f", before phase {moment + 1}" if 0 < moment < LAST else ""
    return after + before + ("; hatched: made from the whole matrix" if AXIS <= moment < LAST else "")


def say_contents(recording: Recording, matrix: str, moment: int) -> str:
    """How many ranks hold a part of a matrix, and how many different contents they hold."""
    held = [diary.contents[matrix][moment] for diary in recording.diaries if diary.tiles[matrix][moment]]
    if not all(held):  # between packing and unpacking, nobody took note of the bytes
        return f"{len(held)} of {len(recording.diaries)} ranks hold a part"
    return f"{len(held)} of {len(recording.diaries)} ranks hold a part; different contents: {len(set(held))}"


def _draw_ranks(
    axes: Axes, recording: Recording, matrix: str, moment: int, frame: tuple[float, float, float, float]
) -> None:
    left, top, width, high = frame
    each = width / recording.tp
    for diary in recording.diaries:
        at = recording.grid.at(diary.rank)
        corner = (left + at["tp"] * each, top + at["dp"] * (high + 22))
        axes.text(corner[0], corner[1] - 6, f"rank {diary.rank}", size=8, color=INK)
        _draw_tiles(axes, recording, diary, matrix, moment, (*corner, each - 14, high))


def _draw_tiles(
    axes: Axes,
    recording: Recording,
    diary: Diary,
    matrix: str,
    moment: int,
    frame: tuple[float, float, float, float],
) -> None:
    left, top, width, high = frame
    rows, columns = recording.shapes[matrix]
    axes.add_patch(Rectangle((left, top), width, high, facecolor=EMPTY, edgecolor=INK, linewidth=1.0))
    hatch = "////" if AXIS <= moment < LAST else None
    for name, row, column, down, across in diary.tiles[matrix][moment]:
        place = (left + width * column / columns, top + high * row / rows)
        size = (width * across / columns, high * down / rows)
        fill = holder_colour(name)
        axes.add_patch(
            Rectangle(place, *size, facecolor=fill, edgecolor="#ffffff", hatch=hatch, linewidth=0.0)
        )
        axes.add_patch(Rectangle(place, *size, fill=False, edgecolor=INK, linewidth=0.8))
        if size[0] > 12 and size[1] > 9:
            axes.text(
                place[0] + size[0] / 2,
                place[1] + size[1] / 2,
                str(name),
                size=min(9.0, size[1] / 1.6),
                ha="center",
                va="center",
                color=INK,
                bbox={"facecolor": fill, "edgecolor": "none", "pad": 0.6} if hatch else None,
            )


def film(recording: Recording, matrix: str = "") -> Picture:
    """All moments of the step side by side, a row for each rank, with the mirror's axis between them."""
    matrix = matrix or recording.busiest()
    ranks = len(recording.diaries)
    high = max(22.0, min(58.0, 380 / ranks))
    each, left, top = (_WIDTH - 70) / (LAST + 1), 62.0, 92.0
    figure, axes = blank(_WIDTH, round(top + ranks * (high + 10) + 30))
    for moment, title in enumerate(MOMENTS):
        middle = left + (moment + 0.5) * each - 4
        axes.text(
            middle, top - 12, title.replace(" ", "\n", 1), size=7.5, ha="center", va="bottom", color=INK
        )
    for diary in recording.diaries:
        row = top + diary.rank * (high + 10)
        axes.text(10, row + high / 2, f"rank {diary.rank}", size=8.5, va="center", color=INK)
        for moment in range(LAST + 1):
            frame = (left + moment * each, row, each - 12, high)
            _draw_tiles(axes, recording, diary, matrix, moment, frame)
    _draw_phases(axes, left, each)
    axis, bottom = left + AXIS * each - 6, top + ranks * (high + 10)
    axes.plot([axis, axis], [34, bottom], color=INK, linewidth=1.4, dashes=(4, 3))
    axes.text(axis, bottom + 14, "the mirror: Newton–Schulz", size=9, ha="center", va="center", color=INK)
    alt = " ".join(_say_moment(recording, matrix, moment) for moment in range(LAST + 1))
    return finish(figure, f"film-{matrix}", f"{_source(recording, matrix)} {alt}")


def _draw_phases(axes: Axes, left: float, each: float) -> None:
    for number in range(1, LAST + 1):
        middle = left + number * each - 6
        arrow = FancyArrowPatch(
            (middle - 30, 24), (middle + 30, 24), arrowstyle="-|>", mutation_scale=10, color=INK
        )
        axes.add_patch(arrow)
        name = PHASES[number - 1].replace("gradient ", "").replace("parameter ", "")
        axes.text(middle, 14, f"{number} {name}", size=7, ha="center", va="center", color=INK)


def _say(recording: Recording, matrix: str, moment: int) -> str:
    mirror = LAST - moment
    said = [_source(recording, matrix), "Now,", _say_moment(recording, matrix, moment)]
    return " ".join([*said, "Its mirror,", _say_moment(recording, matrix, mirror)])


def _source(recording: Recording, matrix: str) -> str:
    rows, columns = recording.shapes[matrix]
    return f"{recording.source}: matrix {matrix}, {rows} × {columns}."


def _say_moment(recording: Recording, matrix: str, moment: int) -> str:
    held = "; ".join(_say_diary(diary, matrix, moment) for diary in recording.diaries)
    when = f"after phase {moment}, {PHASES[moment - 1]}" if moment else "before the step"
    return f"{when} ({MOMENTS[moment]}): {held}."


def _say_diary(diary: Diary, matrix: str, moment: int) -> str:
    tiles = diary.tiles[matrix][moment]
    told = ", ".join(f"{rows}×{columns} from {name}" for name, _, _, rows, columns in tiles)
    return f"rank {diary.rank} {told or 'nothing'}"


def explore(recording: Recording, live: bool = True, moment: int | None = None) -> Shell | Picture:
    """A slider through the seven phases and a button for each matrix, over all ranks' holdings.

    It starts at ``moment``, which is then its still picture, too; without one, that is all moments.
    """

    def draw(phase: int, matrix: str) -> Picture:
        return render(recording, phase, matrix)

    start = recording.busiest()
    names = {start: start, **{name: name for name in recording.shapes}}
    still = film(recording) if moment is None else render(recording, moment)
    phase = slider("phase", last=LAST, start=moment)
    return show(draw, still, live, phase=phase, matrix=choice("matrix", names))
