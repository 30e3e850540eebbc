"""Pictures of lesson 05: three rulers over the same numbers, for matrices, buckets and slices."""

from __future__ import annotations

from matplotlib.axes import Axes

from ... import Bucket, Plan
from ..pictures.colours import EMPTY, INK, QUIET, rank_colour
from ..pictures.picture import Picture, blank, finish, rectangle, write
from ..widgets.shell import Shell, choice, show, slider
from .ranges import BUCKETS, length_of, padding_of, plan_of, starts_of

DATA_PARALLEL = range(1, 7)
_WIDTH, _LEFT, _RIGHT = 900, 96.0, 24.0
_ROWS = {"matrices": 64.0, "buckets": 134.0, "slices": 204.0}
_HIGH = 40.0


def draw_rulers(plan: Plan) -> Picture:
    """Three rulers over the same numbers: matrices, buckets, and the slices that ranks keep."""
    figure, axes = blank(_WIDTH, 276)
    total = sum(length_of(plan, bucket) for bucket in plan.buckets)
    scale = (_WIDTH - _LEFT - _RIGHT) / total
    for name, top in _ROWS.items():
        write(axes, 12, top + _HIGH / 2, name, 10, weight="bold")
    write(axes, _LEFT, 30, _headline(plan), 10)
    for bucket, start in zip(plan.buckets, starts_of(plan), strict=True):
        _draw_bucket(axes, plan, bucket, start, scale)
    ticks = [*starts_of(plan), total]
    for tick in ticks:
        write(axes, _LEFT + tick * scale, 262, str(tick), 7.5, ha="center", color=QUIET)
    dp, first = plan.grid.size("dp"), length_of(plan, plan.buckets[0])
    return finish(figure, f"rulers-{dp}-{len(plan.buckets)}-{first}", say_rulers(plan))


def _headline(plan: Plan) -> str:
    count, dp = len(plan.buckets), plan.grid.size("dp")
    return f"bucket count {count} · dp {dp} · padding (hatched) {padding_of(plan)} numbers"


def _draw_bucket(axes: Axes, plan: Plan, bucket: Bucket, start: int, scale: float) -> None:
    length, dp = length_of(plan, bucket), plan.grid.size("dp")
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
        _bar(axes, edge, "slices", length / dp * scale, rank_colour(place), f"rank {rank}", f"{rank}")
        if place:
            axes.plot([edge, edge], [_ROWS["matrices"], _ROWS["slices"]], color=INK, lw=0.9, dashes=(3, 2))


def _bar(axes: Axes, left: float, row: str, width: float, fill: str, *labels: str, hatch: str = "") -> None:
    """A piece of a ruler, with the first of the labels that has room in it."""
    top, high = _ROWS[row], _HIGH
    rectangle(axes, left, top, width, high, fill, linewidth=1.1, hatch=hatch or None)
    label = next((text for text in labels if width > 8 + 6.6 * len(text)), None)
    if label:
        box = {"facecolor": fill, "edgecolor": "none", "pad": 1.5}
        write(axes, left + width / 2, top + high / 2, label, 9, ha="center", zorder=6, bbox=box)


def say_rulers(plan: Plan) -> str:
    """The three rulers, in words."""
    said = [_headline(plan) + "."]
    for bucket in plan.buckets:
        length = length_of(plan, bucket)
        metas = bucket.dist_meta(plan.grid.at(0))
        names = [f"{meta.name} from {meta.global_range[0]} to {meta.global_range[1]}" for meta in metas]
        said.append(f"Bucket {bucket.index} of {length} numbers holds {', '.join(names)}.")
        step = length // plan.grid.size("dp")
        slices = [f"{place}: {place * step} to {(place + 1) * step}" for place in range(length // step)]
        said.append(f"Its slices by dp position: {'; '.join(slices)}.")
    return " ".join(said)


def explore(plan: Plan, bucket: int, live: bool = True) -> Shell | Picture:
    """Buttons for the size of a bucket and a slider over dp, over the three rulers."""

    def draw(bucket: int, dp: int) -> Picture:
        return draw_rulers(plan_of(dp, plan.grid.size("tp"), bucket))

    sizes = {str(size): size for size in dict.fromkeys((bucket, *BUCKETS))}
    dp = slider("dp", first=1, last=max(DATA_PARALLEL), start=min(plan.grid.size("dp"), max(DATA_PARALLEL)))
    return show(draw, draw_rulers(plan), live, bucket=choice("bucket", sizes), dp=dp)
