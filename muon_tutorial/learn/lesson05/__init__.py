"""What notebook 05 imports: five small matrices, their rulers, and the exercises about ranges.

Sizes are odd on purpose, so that buckets need padding and slices cut through matrices. Where time is
measured, it is on matrices of about the shapes that a small GPT has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from ... import Bucket, DistMeta, Grid, Ledger, LiveWorld, Matrix, Muon, Plan, Shard, build_mesh, zero1
from ..checks.exercise import Exercise, numbers, value_of
from ..inputs import measure
from ..pictures.picture import EMPTY, INK, QUIET, Picture, blank, finish, holder_colour
from ..widgets.shell import Shell, choice, show, slider

SHAPES = {"A": (12, 10), "B": (7, 9), "C": (15, 11), "D": (8, 6), "E": (10, 13)}
BUCKETS = (100, 200, 400, 1000)
DATA_PARALLEL = range(1, 7)
GRIDS = ((4, 1), (3, 1), (2, 2), (5, 1), (3, 2), (1, 1))
LAYERS = 4
LAYER = ((61, 61), (61, 61), (61, 61), (61, 61), (245, 61), (61, 245))
BYTES = (10_000, 40_000, 160_000, 640_000)
ITEM = 4

Interval = tuple[int, int]
LocalRange = Callable[[Interval, int, int], Interval]


def plan_of(dp: int, tp: int, bucket: int) -> Plan:
    """The plan of the five matrices; a bucket holds at most ``bucket`` numbers, or one larger matrix."""
    matrices = [
        Matrix(index, name, shape, (("tp", Shard(0)),)) for index, (name, shape) in enumerate(SHAPES.items())
    ]
    return zero1(matrices, Grid.of(dp=dp, tp=tp), bucket_bytes=bucket * ITEM)


def starts_of(plan: Plan) -> list[int]:
    """Where each bucket begins, if all lay one after the other."""
    lengths = [_length(plan, bucket) for bucket in plan.buckets]
    return [sum(lengths[:number]) for number in range(len(lengths))]


def _length(plan: Plan, bucket: Bucket) -> int:
    return bucket.length(bucket.model_layout, plan.grid.at(0))


def padding_of(plan: Plan) -> int:
    """Numbers in the buffers of rank 0 that belong to no matrix."""
    return sum(bucket.padding(plan.grid.at(0)) for bucket in plan.buckets)


_WIDTH, _LEFT, _RIGHT = 900, 96.0, 24.0
_ROWS = {"matrices": 64.0, "buckets": 134.0, "slices": 204.0}
_HIGH = 40.0


def draw_rulers(plan: Plan) -> Picture:
    """Three rulers over the same numbers: matrices, buckets, and the slices that ranks keep."""
    figure, axes = blank(_WIDTH, 276)
    total = sum(_length(plan, bucket) for bucket in plan.buckets)
    scale = (_WIDTH - _LEFT - _RIGHT) / total
    for name, top in _ROWS.items():
        axes.text(12, top + _HIGH / 2, name, size=10, weight="bold", va="center", color=INK)
    axes.text(_LEFT, 30, _headline(plan), size=10, va="center", color=INK)
    for bucket, start in zip(plan.buckets, starts_of(plan), strict=True):
        _draw_bucket(axes, plan, bucket, start, scale)
    ticks = [*starts_of(plan), total]
    for tick in ticks:
        axes.text(_LEFT + tick * scale, 262, str(tick), size=7.5, ha="center", va="center", color=QUIET)
    dp, first = plan.grid.size("dp"), _length(plan, plan.buckets[0])
    return finish(figure, f"rulers-{dp}-{len(plan.buckets)}-{first}", say_rulers(plan))


def _headline(plan: Plan) -> str:
    count, dp = len(plan.buckets), plan.grid.size("dp")
    return f"bucket count {count} · dp {dp} · padding (hatched) {padding_of(plan)} numbers"


def _draw_bucket(axes: Axes, plan: Plan, bucket: Bucket, start: int, scale: float) -> None:
    length, dp = _length(plan, bucket), plan.grid.size("dp")
    left, used = _LEFT + start * scale, 0
    _bar(axes, left, "buckets", length * scale, "#ffffff", f"bucket {bucket.index}", f"{bucket.index}")
    for spot in bucket.buffer_slices(bucket.model_layout, plan.grid.at(0)):
        begin, end = spot.interval
        name = spot.entry.matrix.name
        said = f"{name} · " + " × ".join(map(str, spot.box.shape))
        _bar(axes, left + begin * scale, "matrices", (end - begin) * scale, "#ffffff", said, name)
        used = max(used, end)
    if used < length:
        _bar(axes, left + used * scale, "buckets", (length - used) * scale, EMPTY, hatch="xxxx")
    for place in range(dp):
        rank = place * plan.grid.size("tp")
        edge = left + place * length / dp * scale
        _bar(axes, edge, "slices", length / dp * scale, holder_colour(place), f"rank {rank}", f"{rank}")
        if place:
            axes.plot([edge, edge], [_ROWS["matrices"], _ROWS["slices"]], color=INK, lw=0.9, dashes=(3, 2))


def _bar(axes: Axes, left: float, row: str, width: float, fill: str, *labels: str, hatch: str = "") -> None:
    """A piece of a ruler, with the first of the labels that has room in it."""
    top, high = _ROWS[row], _HIGH
    piece = Rectangle(
        (left, top), width, high, facecolor=fill, edgecolor=INK, linewidth=1.1, hatch=hatch or None
    )
    axes.add_patch(piece)
    label = next((text for text in labels if width > 8 + 6.6 * len(text)), None)
    if label:
        box = {"facecolor": fill, "edgecolor": "none", "pad": 1.5}
        place = (left + width / 2, top + high / 2)
        axes.text(*place, label, size=9, ha="center", va="center", color=INK, zorder=6, bbox=box)


def say_rulers(plan: Plan) -> str:
    """The three rulers, in words."""
    said = [_headline(plan) + "."]
    for bucket in plan.buckets:
        length = _length(plan, bucket)
        metas = bucket.dist_meta(plan.grid.at(0))
        names = ", ".join(
            f"{meta.name} from {meta.global_range[0]} to {meta.global_range[1]}" for meta in metas
        )
        said.append(f"Bucket {bucket.index} of {length} numbers holds {names}.")
        step = length // plan.grid.size("dp")
        slices = "; ".join(
            f"{place}: {place * step} to {(place + 1) * step}" for place in range(length // step)
        )
        said.append(f"Its slices by dp position: {slices}.")
    return " ".join(said)


def explore(plan: Plan, bucket: int, live: bool = True) -> Shell | Picture:
    """Buttons for the size of a bucket and a slider over dp, over the three rulers."""

    def draw(bucket: int, dp: int) -> Picture:
        return draw_rulers(plan_of(dp, plan.grid.size("tp"), bucket))

    sizes = {str(size): size for size in dict.fromkeys((bucket, *BUCKETS))}
    dp = slider("dp", first=1, last=max(DATA_PARALLEL), start=min(plan.grid.size("dp"), max(DATA_PARALLEL)))
    return show(draw, draw_rulers(plan), live, bucket=choice("bucket", sizes), dp=dp)


def say_plan(plan: Plan, rank: int) -> str:
    """The master plan as one rank reads it, a line a matrix."""
    lines = ["matrix  bucket  in the bucket  in the rank's slice"]
    for meta in plan.dist_meta(plan.grid.at(rank)):
        lines.append(
            f"{meta.name:6}  {meta.bucket_idx:6}  {_say(meta.global_range):13}  {_say(meta.local_range)}"
        )
    return "\n".join(lines)


def _say(interval: Interval) -> str:
    return f"{interval[0]} to {interval[1]}" if interval[0] < interval[1] else "nothing"


def whole_buffer(plan: Plan, seed: int) -> list[Tensor]:
    """For each bucket, the flat buffer that no rank keeps whole: momentum of all matrices, and padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 100, (_length(plan, bucket),), generator=generator) for bucket in plan.buckets]


def my_slice(plan: Plan, bucket: int, place: int, seed: int) -> Tensor:
    """What the rank at a dp position keeps of a bucket."""
    whole = whole_buffer(plan, seed)[bucket]
    return whole.chunk(plan.grid.size("dp"))[place].clone()


def whole_matrix(plan: Plan, meta: DistMeta, seed: int) -> Tensor:
    """A matrix of the buffer, flat, read where it would lie if one rank kept all."""
    return whole_buffer(plan, seed)[meta.bucket_idx][slice(*meta.global_range)]


def split_matrices(plan: Plan) -> list[str]:
    """The matrices of which more than one slice has a part."""
    entries = [entry for bucket in plan.buckets for entry in bucket.entries]
    return [entry.matrix.name for entry in entries if len(_keepers(plan, entry.matrix.name)) > 1]


def _keepers(plan: Plan, name: str) -> list[int]:
    """The ranks that keep a part of a matrix: as in the rulers, of those at the first place along tp."""
    tp = plan.grid.size("tp")
    metas = [(rank, plan.dist_meta(plan.grid.at(rank))) for rank in plan.grid.ranks if rank % tp == 0]
    return [
        rank
        for rank, mine in metas
        for meta in mine
        if meta.name == name and meta.local_range[0] < meta.local_range[1]
    ]


def split_exercise(plan: Plan) -> Exercise:
    """The prediction: which matrices does a slice boundary cut?"""

    def judge(said: Iterable[str]) -> str | None:
        if isinstance(said, str) or not all(name in SHAPES for name in said):
            return 'Give a list of names, such as ["A", "D"].'
        right = split_matrices(plan)
        if extra := [name for name in said if name not in right]:
            return f"{extra[0]} lies whole in the slice of rank {_keepers(plan, extra[0])[0]}."
        if missing := [name for name in right if name not in said]:
            return f"{missing[0]} is shared, too: ranks {_keepers(plan, missing[0])} keep parts of it."
        return None

    return Exercise(
        judge,
        ("Follow each dashed line up to the first ruler: which letters does it cut?",),
        "Ranges do not care where a matrix ends.",
    )


def local_range(global_range: Interval, place: int, length: int) -> Interval:
    """Where a matrix lies in a slice, counted from the start of the slice: the exercise's reference."""
    begin = place * length
    first = max(global_range[0], begin) - begin
    last = min(global_range[1], begin + length) - begin
    return (first, last) if first < last else (0, 0)


def range_exercise() -> Exercise:
    """The interval of a matrix within a slice, judged against ``plan.dist_meta`` on several grids."""

    def judge(local_range: LocalRange) -> str | None:
        for dp, tp in GRIDS:
            for bucket in BUCKETS:
                if wrong := _judge_plan(local_range, plan_of(dp, tp, bucket)):
                    return wrong
        return None

    hints = (
        "Slice number place begins at place * length in the bucket, and ends length later.",
        "Two intervals share what lies between the larger of their starts and the smaller of their ends.",
    )
    return Exercise(judge, hints, "The same as plan.dist_meta, on every grid that was tried.")


def _judge_plan(local_range: LocalRange, plan: Plan) -> str | None:
    for rank in plan.grid.ranks:
        at = plan.grid.at(rank)
        for meta in plan.dist_meta(at):
            bucket = plan.buckets[meta.bucket_idx]
            length = bucket.length(bucket.storage_layout, at)
            said = value_of(local_range, meta.global_range, at["dp"], length)
            if wrong := _judge_range(said, meta, at["dp"], length):
                return f"{meta.name} at {meta.global_range}, slice {at['dp']} of length {length}: {wrong}"
    return None


def _judge_range(said: Any, meta: DistMeta, place: int, length: int) -> str | None:
    if not isinstance(said, (tuple, list)) or len(said) != 2:
        return f"give a pair (start, stop), not {said!r}."
    start, stop = said
    right = meta.local_range
    if (start, stop) == right:
        return None
    if right == (0, 0):
        return f"they share nothing; say (0, 0), not ({start}, {stop})."
    if place and (start - place * length, stop - place * length) == right:
        return f"({start}, {stop}) counts from the start of the bucket. Count from the start of the slice."
    if start < 0 or stop > length:
        return f"({start}, {stop}) reaches out of the slice, which goes from 0 to {length}."
    if (start, stop + 1) == right:
        return f"({start}, {stop}) leaves out the last number: a range ends before its stop."
    return f"({start}, {stop}) is not the part that lies in the slice."


def quiz(plan: Plan) -> Exercise:
    """Numbers that the notebook has measured."""
    at = plan.grid.at(0)
    expected = {
        "kept": sum(held.numel for bucket in plan.buckets for held in bucket.stored_shards(at)),
        "padding": padding_of(plan),
        "buckets": len(plan_of(plan.grid.size("dp"), plan.grid.size("tp"), BUCKETS[0]).buckets),
    }
    why = {
        "kept": "Add up the last column of the plan, as rank 0 reads it.",
        "padding": "It is written above the rulers.",
        "buckets": f"Press the button {BUCKETS[0]} above the rulers, and count.",
    }
    return numbers(expected, why)


def exercises(plan: Plan) -> tuple[Exercise, Exercise, Exercise]:
    """The notebook's exercises in order: split, ranges, quiz."""
    return split_exercise(plan), range_exercise(), quiz(plan)


@dataclass(frozen=True, slots=True)
class BucketCost:
    """One step with buckets of one size: what rank 0 asked for, and seconds."""

    size: int
    buckets: int
    collectives: int
    padding: int
    kept: int
    seconds: float


def measure_buckets(rank: int, dp: int, tp: int, seed: int, steps: int) -> list[BucketCost]:
    """Steps with buckets of several sizes, on real ranks. Must be called by all ranks."""
    world = LiveWorld(build_mesh({"dp": dp, "tp": tp}))
    return [_measure_bucket(world, size, seed, steps) for size in BYTES]


def _measure_bucket(world: LiveWorld, size: int, seed: int, steps: int) -> BucketCost:
    ledger = Ledger()
    muon = Muon(_matrices(seed), strategy=partial(zero1, bucket_bytes=size), mesh=world, tp_dim=None)
    world.observers.append(ledger)
    muon.step()
    world.observers.remove(ledger)
    plan = muon.plan
    assert plan is not None
    rows = [row for row in ledger.rows(world.at.rank) if row.phase != "gradient flags"]
    return BucketCost(
        size,
        len(plan.buckets),
        sum(row.collectives for row in rows),
        padding_of(plan),
        sum(state["momentum_buffer"].numel() for state in muon.state.values()),
        measure.median_seconds(muon.step, steps),
    )


def _matrices(seed: int) -> list[tuple[str, torch.nn.Parameter]]:
    """Matrices of about the shapes that a small GPT has, whole on every rank, each with a gradient."""
    generator, named = torch.Generator().manual_seed(seed), []
    for number, shape in enumerate(LAYER * LAYERS):
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        named.append((f"matrix {number}", parameter))
    return named


def say_buckets(costs: Sequence[Sequence[BucketCost]]) -> str:
    """The table of bucket sizes; seconds are those of the slowest rank."""
    lines = ["bucket, at most   buckets   collectives   padding   numbers kept   a step"]
    for number, cost in enumerate(costs[0]):
        slowest = max(of_rank[number].seconds for of_rank in costs)
        lines.append(
            f"{cost.size:9,} bytes   {cost.buckets:7}   {cost.collectives:11}   {cost.padding:7}   "
            f"{cost.kept:12,}   {slowest * 1e3:.1f} ms"
        )
    return "\n".join(lines)
