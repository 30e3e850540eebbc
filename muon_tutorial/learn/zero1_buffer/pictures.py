"""Pictures of lesson 05: rulers, one entry, straddling matrices, and what bucket sizes cost.

Rulers show matrices, buckets and slices over the same entries. A fill shows which rank keeps an entry.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from ... import Bucket, Plan
from ..pictures.colours import CARD, EMPTY, INK, QUIET, rank_colour
from ..pictures.picture import Picture, blank, card, centred, finish, rectangle, tile, write
from ..pictures.spectra import style
from ..widgets.shell import Shell, choice, play, show, slider
from . import on_ranks
from .on_ranks import BUCKETS, CUTS, SHAPES, EntryPlace, kept_of, length_of, plan_of, slice_length, starts_of

DATA_PARALLEL = range(1, 7)
STOPS = 12
_WIDTH, _LEFT, _RIGHT = 900, 96.0, 24.0
_ROWS = {"matrices": 0.0, "buckets": 66.0, "slices": 132.0}
_HIGH = 40.0


def hero() -> Picture:
    plan = plan_of(4, 1, 400)
    return draw_rulers(plan, "zero1_buffer-hero", "C", f" · {len(kept_of(plan, 'C'))} ranks keep C")


def draw_rulers(plan: Plan, name: str = "", lit: str = "", more: str = "") -> Picture:
    """The three rulers. ``more`` ends the headline, and the matrix ``lit`` is marked on all three."""
    figure, axes = blank(_WIDTH, 264)
    count, dp, padding = len(plan.buckets), plan.grid.size("dp"), on_ranks.padding_of(plan)
    headline = f"{count} bucket{'s' * (count > 1)} · dp {dp} · {padding} entries of padding (grey){more}"
    write(axes, 12, 22, headline, 12)
    _draw_rulers(axes, plan, 48, lit)
    said = [headline + "."]
    for bucket in plan.buckets:
        length = length_of(plan, bucket)
        metas = bucket.dist_meta(plan.grid.at(0))
        names = [f"{meta.name} from {meta.global_range[0]} to {meta.global_range[1]}" for meta in metas]
        said.append(f"Bucket {bucket.index} of {length} entries holds {', '.join(names)}.")
        step = length // dp
        slices = [f"{place}: {place * step} to {(place + 1) * step}" for place in range(length // step)]
        said.append(f"Its slices by dp position: {'; '.join(slices)}.")
    first = length_of(plan, plan.buckets[0])
    return finish(figure, name or f"rulers-{dp}-{count}-{first}", " ".join(said))


def _scale(plan: Plan) -> float:
    return (_WIDTH - _LEFT - _RIGHT) / sum(length_of(plan, bucket) for bucket in plan.buckets)


def _draw_rulers(axes: Axes, plan: Plan, top: float, lit: str = "") -> None:
    """The rulers, with their upper edge at ``top``. The matrix ``lit`` is marked on all three."""
    for name, down in _ROWS.items():
        write(axes, 12, top + down + _HIGH / 2, name, weight="bold")
    for bucket, start in zip(plan.buckets, starts_of(plan), strict=True):
        _draw_bucket(axes, plan, bucket, _LEFT + start * _scale(plan), top, lit)


def _draw_bucket(axes: Axes, plan: Plan, bucket: Bucket, left: float, top: float, lit: str) -> None:
    length, dp, scale = length_of(plan, bucket), plan.grid.size("dp"), _scale(plan)
    rows = {name: top + down for name, down in _ROWS.items()}
    used = 0
    _bar(axes, left, rows["buckets"], length * scale, CARD, f"bucket {bucket.index}", f"{bucket.index}")
    for spot in bucket.buffer_slices(bucket.model_layout, plan.grid.at(0)):
        (begin, end), name = spot.interval, spot.entry.matrix.name
        said = f"{name} · " + " × ".join(map(str, spot.box.shape))
        _bar(axes, left + begin * scale, rows["matrices"], (end - begin) * scale, CARD, said, name)
        if name == lit:
            x, wide = left + begin * scale, (end - begin) * scale
            rectangle(axes, x, rows["matrices"], wide, _HIGH, "none", linewidth=3, zorder=6)
            for edge in (row + down for row in list(rows.values())[1:] for down in (0, _HIGH)):
                axes.plot([x, x + wide], [edge, edge], color=INK, lw=3.5, solid_capstyle="butt", zorder=6)
        used = max(used, end)
    if used < length:
        _bar(axes, left + used * scale, rows["buckets"], (length - used) * scale, EMPTY)
    last = -99.0
    for place in range(dp + 1):
        x = left + place * length / dp * scale
        if place < dp:
            rank = place * plan.grid.size("tp")
            _bar(axes, x, rows["slices"], length / dp * scale, rank_colour(rank), f"rank {rank}", f"{rank}")
        if 0 < place < dp:
            axes.plot([x, x], [rows["matrices"], rows["slices"]], color=INK, lw=1.1, dashes=(3, 2), zorder=7)
        is_end = bucket is plan.buckets[-1] and place == dp  # elsewhere, the next bucket begins at 0 again
        if is_end or (x - last > 34 and place < dp and (not place or x + 34 < left + length * scale)):
            centred(axes, x, rows["slices"] + _HIGH + 14, f"{place * length // dp}", color=QUIET)
            last = x


def _bar(axes: Axes, left: float, top: float, width: float, fill: str, *labels: str) -> None:
    """A piece of a ruler, with the first of the labels that fits."""
    rectangle(axes, left, top, width, _HIGH, fill, linewidth=1.1)
    label = next((text for text in labels if width > 6 + 8.6 * len(text)), None)
    if label:
        box = {"facecolor": fill, "edgecolor": "none", "pad": 1.5}
        centred(axes, left + width / 2, top + _HIGH / 2, label, zorder=8, bbox=box)


def explore(plan: Plan, bucket: int, live: bool = True) -> Shell | Picture:
    sizes = {str(size): size for size in dict.fromkeys((bucket, *BUCKETS))}
    dp = slider("dp", first=1, last=max(DATA_PARALLEL), start=min(plan.grid.size("dp"), max(DATA_PARALLEL)))
    tp, buttons = plan.grid.size("tp"), choice("bucket", sizes)
    still = draw_rulers(plan)
    return show(lambda bucket, dp: draw_rulers(plan_of(dp, tp, bucket)), still, live, bucket=buttons, dp=dp)


def draw_entry(plan: Plan, found: EntryPlace) -> Picture:
    """One entry: in its matrix, on the three rulers, and in the memory of the rank that keeps it."""
    ranks = plan.grid.at(0).group("dp")
    top, memory = 236, 462
    figure, axes = blank(_WIDTH, memory + 32 * len(ranks) + 8)
    _draw_matrix(axes, plan, found)
    lines = (
        f"{found.matrix}[{found.row}, {found.column}]",
        f"entry {found.entry} of {found.matrix}, row after row",
        f"entry {found.in_bucket} of bucket {found.bucket}",
        f"rank {found.rank} keeps it",
        f"at {found.offset} of its slice",
    )
    for number, line in enumerate(lines):
        weight = "bold" if number in (0, 3) else "normal"
        write(axes, 380, 62 + 32 * number, line, 14, weight=weight)
    _draw_rulers(axes, plan, top, found.matrix)
    x = _LEFT + (starts_of(plan)[found.bucket] + found.in_bucket + 0.5) * _scale(plan)
    axes.plot([x, x], [top - 12, top + _ROWS["slices"] + _HIGH], color=INK, lw=3, zorder=9)
    axes.plot(x, top - 14, marker="v", markersize=11, color=INK, zorder=9)
    for row, rank in enumerate(ranks):  # the slices of all buckets that the rank keeps, one after the other
        top, is_keeper, x = memory + 32 * row, rank == found.rank, _LEFT
        write(axes, 12, top + 12, f"rank {rank}", weight="bold" if is_keeper else "normal")
        for bucket in plan.buckets:
            wide = slice_length(plan, bucket.index) * _scale(plan)
            rectangle(axes, x, top, wide, 24, rank_colour(rank), linewidth=2.4 if is_keeper else 0.8)
            if is_keeper and found.bucket == bucket.index:
                spot = x + (found.offset + 0.5) * _scale(plan)
                axes.plot([spot, spot], [top - 3, top + 27], color=INK, lw=3, zorder=9)
            x += wide + 3
        write(axes, x + 10, top + 12, f"keeps {say_memory(plan, rank)} entries", color=QUIET)
    name = f"zero1_buffer-entry-{found.matrix}-{found.entry}"
    return finish(figure, name, f"{found} The rank keeps {say_memory(plan, found.rank)} entries.")


def _draw_matrix(axes: Axes, plan: Plan, found: EntryPlace) -> None:
    """A matrix's entries in the colours of the ranks that keep them. One entry is highlighted."""
    meta = next(meta for meta in plan.dist_meta(plan.grid.at(0)) if meta.name == found.matrix)
    rows, columns = meta.shape
    side = min(20.0, 190 / rows, 260 / columns)
    spots = [(row, column) for row in range(rows) for column in range(columns)]
    cells = [Rectangle((_LEFT + column * side, 22 + row * side), side, side) for row, column in spots]
    step = slice_length(plan, meta.bucket_idx)
    places = [(meta.global_range[0] + number) // step for number in range(rows * columns)]
    fills = [rank_colour(place * plan.grid.size("tp")) for place in places]
    axes.add_collection(PatchCollection(cells, facecolors=fills, edgecolors=CARD, linewidths=0.8))
    x, y = _LEFT + (found.column + 0.5) * side, 22 + (found.row + 0.5) * side
    axes.plot(x, y, marker="s", markersize=side * 0.6, color=INK, zorder=6)
    write(axes, 12, 22 + rows * side / 2, found.matrix, 14, weight="bold")


def say_memory(plan: Plan, rank: int) -> str:
    return " + ".join(str(slice_length(plan, bucket.index)) for bucket in plan.buckets)


def explore_entry(plan: Plan, live: bool = True) -> Shell | Picture:

    def draw(matrix: str, entry: int) -> Picture:
        meta = next(meta for meta in plan.dist_meta(plan.grid.at(0)) if meta.name == matrix)
        rows, columns = meta.shape
        place = divmod(entry * (rows * columns - 1) // STOPS, columns)
        return draw_entry(plan, on_ranks.locate(plan, matrix, *place))

    metas = [meta.name for meta in plan.dist_meta(plan.grid.at(0)) if meta.shape[0] * meta.shape[1] > STOPS]
    names = choice("matrix", metas)
    names.value = "C" if "C" in metas else metas[0]
    return play(draw, STOPS, draw(names.value, STOPS // 2), live, label="entry", matrix=names)


def draw_straddling(plan: Plan) -> Picture:
    """Each matrix that a slice boundary cuts: the entries that each of its ranks has and sends."""
    names = on_ranks.split_matrices(plan)
    title = "straddling matrices: the entries that each rank keeps, and how many it sends"
    shown = title if names else "no matrix straddles a boundary"
    figure, axes = blank(_WIDTH, 52 + 46 * max(1, len(names)), shown, 12, 22)
    scale = 420 / max(rows * columns for rows, columns in SHAPES.values())
    said = []
    for number, name in enumerate(names):
        kept, top, x = kept_of(plan, name), 46 + 46 * number, 60.0
        write(axes, 20, top + 16, name, 12, weight="bold")
        for rank, size in kept.items():
            wide = size * scale
            tile(axes, (x, top, wide, 32), rank_colour(rank), str(size) if wide > 32 else "", linewidth=1.1)
            x += wide
        others = len(kept) - 1
        sends = [f"rank {rank} sends {others * size}" for rank, size in kept.items()]
        shown = " · ".join(sends) if others < 3 else f"each sends its part to {others} others"
        write(axes, x + 14, top + 16, shown)
        keeps = ", ".join(f"rank {r} keeps {s} and sends {others * s}" for r, s in kept.items())
        said.append(f"Of {name}, {keeps}.")
    return finish(figure, f"zero1_buffer-straddling-{plan.grid.size('dp')}", " ".join([f"{title}.", *said]))


def draw_cuts(dp: int, tp: int) -> Picture:
    """The matrices in the colours of their keepers: first with a bucket for each matrix, then in one list."""
    figure, axes = blank(_WIDTH, 204)
    said = []
    for row, cut in enumerate(CUTS):
        plan, x, top = plan_of(dp, tp, 1, cut=cut), 20.0, 38 + 98 * row
        kept = {name: kept_of(plan, name) for name in SHAPES}
        runs = sum(map(len, kept.values())) / dp
        title = f'cut="{cut}": a rank works on {runs:.1f} of {len(kept)} matrices, on average'
        write(axes, 20, top - 18, title, 12, weight="bold")
        scale = (_WIDTH - 44) / sum(rows * columns for rows, columns in SHAPES.values()) * tp
        for name, ranks in sorted(kept.items(), key=lambda item: (list(item[1]), item[0])):
            centred(axes, x + sum(ranks.values()) * scale / 2, top + _HIGH + 12, name, weight="bold")
            rectangle(axes, x, top, sum(ranks.values()) * scale, _HIGH, "none", linewidth=3.4, zorder=9)
            for rank, size in ranks.items():
                _bar(axes, x, top, size * scale, rank_colour(rank), f"rank {rank}", f"{rank}")
                x += size * scale
        said.append(f"{title}: " + "; ".join(f"{name} on {list(ranks)}" for name, ranks in kept.items()))
    return finish(figure, "zero1_buffer-cuts", ". ".join(said) + ".")


def draw_buckets(costs: Sequence[Sequence[on_ranks.BucketCost]]) -> Picture:
    """What a step costs by bucket size; matrices are counted on the busiest rank, and time on the slowest."""
    mine = costs[0]
    slowest = [max(each.seconds for each in one_size) * 1e3 for one_size in zip(*costs, strict=True)]
    worked = [max(each.worked for each in one_size) for one_size in zip(*costs, strict=True)]
    panels: dict[str, Sequence[float]] = {
        "collectives": [cost.collectives for cost in mine],
        "padding": [cost.padding for cost in mine],
        "kB sent": [cost.sent / 1e3 for cost in mine],
        "matrices on a rank": worked,
        "milliseconds": slowest,
    }
    figure = card(_WIDTH, 236)
    for number, (title, values) in enumerate(panels.items()):
        axes = style(figure.add_subplot(1, len(panels), number + 1), title, "bucket's limit, kB", "")
        axes.bar([f"{cost.size // 1000}" for cost in mine], values, color=QUIET, width=0.6)
        for place, value in enumerate(values):
            axes.text(place, value, f"{value:.0f}", size=10, ha="center", va="bottom", color=INK)
        axes.set_yticks([])
        axes.set_ylim(0, 1.18 * max([*values, 1]))
    figure.tight_layout()
    said = [
        f"Buckets of at most {cost.size:,} bytes: {cost.buckets} buckets, {cost.collectives} collectives, "
        f"{cost.padding} entries of padding, a rank sends {cost.sent:,} bytes, the busiest works on {most} "
        f"matrices, {time:.1f} ms."
        for cost, most, time in zip(mine, worked, slowest, strict=True)
    ]
    return finish(figure, "zero1_buffer-buckets", " ".join(said))
