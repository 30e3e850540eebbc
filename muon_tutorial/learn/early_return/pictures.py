"""Pictures of lesson 12: each rank has a lane for its computation and one for its communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from ...timing.timed_world import Span
from ...timing.timeline import Recording, StepTimeline
from ..pictures.colours import CARD, EMPTY, FAINT, INK, MARKED, QUIET, WRONG, rank_colour
from ..pictures.picture import Picture, blank, centred, finish, rectangle, tile, write
from ..widgets.shell import Shell, choice, play
from .loops import TimedLoop, matrix_of
from .missing_wait import ProgramRun
from .pipelines import TIMES, Schedule, ends_of, most_kept
from .steps import LINKS, LOOPBACK, MOST, PredictedStep, predict, works_and_waits

_WIDTH, _LEFT, _RIGHT = 900, 142, 14
_COMPUTE, _LINK, _GAP = 24, 18, 10
_WAIT_HATCH = "////"
_LEGEND = "solid: computes · pale: copies and all else · hatched: waits · grey, below: on its way, by number"


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline under a heading; ``wrong``: when data was spoiled (in seconds), and which data."""

    heading: str
    timeline: StepTimeline
    ranks: tuple[int, ...]
    wrong: tuple[float, str] | None = None

    @property
    def height(self) -> int:
        return 30 + len(self.ranks) * (_COMPUTE + _LINK + _GAP)


def draw_panels(panels: Sequence[Panel], title: str, name: str, foot: str = "") -> Picture:
    """Timelines below each other on one axis of time."""
    last = max(panel.timeline.seconds for panel in panels)
    height = 40 + sum(panel.height for panel in panels) + (44 if foot else 26)
    figure, axes = blank(_WIDTH, height, title, 14, 20)
    scale, y = (_WIDTH - _LEFT - _RIGHT) / last, 40.0
    for panel in panels:
        write(axes, 14, y + 12, panel.heading)
        y += 26
        end = _LEFT + scale * panel.timeline.seconds
        axes.plot([end, end], [y - 4, y + panel.height - 34], color=INK, linewidth=1.4)
        for rank in panel.ranks:
            write(axes, 14, y + _COMPUTE / 2, f"rank {rank} computes")
            write(axes, 14, y + _COMPUTE + _LINK / 2, "its link", color=QUIET)
            for span in panel.timeline.of(rank):
                _draw_span(axes, span, y, scale, panel)
            if panel.wrong is not None and rank == panel.ranks[0]:
                x = _LEFT + scale * panel.wrong[0]
                axes.plot([x, x], [y - 4, y + _COMPUTE + _LINK + 4], color=WRONG, linewidth=2.2)
            y += _COMPUTE + _LINK + _GAP
        y += 4
    write(axes, 14, y + 8, _LEGEND, color=QUIET)
    if foot:
        write(axes, 14, y + 28, foot, color=QUIET)
    said = " ".join(_say_panel(panel) for panel in panels)
    return finish(figure, f"lanes-{name}", f"{title}. {said} {foot}".strip())


def _draw_span(axes: Axes, span: Span, y: float, scale: float, panel: Panel) -> None:
    x, width = _LEFT + scale * span.begin, scale * (span.end - span.begin)
    number = matrix_of(span.label)
    words = str(number) if number is not None and width > 13 else ""
    if span.doing == "transfer":
        edge: dict[str, Any] = {"edgecolor": QUIET, "linewidth": 0.6}
        if panel.wrong is not None and span.label == panel.wrong[1]:
            edge = {"edgecolor": WRONG, "linewidth": 2.0, "zorder": 3}
        rectangle(axes, x, y + _COMPUTE, width, _LINK, MARKED, **edge)
        words = f"{span.label[0]}{number}" if words and "matrix" in span.label and width > 22 else words
        centred(axes, x + width / 2, y + _COMPUTE + _LINK / 2, words)
        return
    look: dict[str, Any] = {"edgecolor": QUIET, "linewidth": 0.5}
    if span.doing == "wait":
        look |= {"hatch": _WAIT_HATCH, "edgecolor": FAINT}
    fill = {"product": rank_colour(span.rank), "copy": EMPTY}.get(span.doing, CARD)
    tile(axes, (x, y, width, _COMPUTE), fill, words if span.doing == "product" else "", **look)


def _say_panel(panel: Panel) -> str:
    told = []
    for rank in panel.ranks:
        said = ", ".join(f"{word} {1000 * panel.timeline.total(d, rank):.0f}" for d, word in _WORDS.items())
        overlap = panel.timeline.total("transfer", rank) > panel.timeline.seconds
        told.append(f"rank {rank} {said}{' (in all; several at a time)' if overlap else ''}")
    return f"{panel.heading}: {1000 * panel.timeline.seconds:.0f} ms; {'; '.join(told)}."


_WORDS: dict[Any, str] = {"product": "computes", "copy": "copies", "wait": "waits"}
_WORDS["transfer"] = "has messages on their way for"


def _panel(step: PredictedStep, window: int) -> Panel:
    took, waited = 1000 * step.timeline.seconds, 1000 * step.timeline.total("wait", 0)
    times = f"{took:.0f} ms, of which rank 0 waits {waited:.0f}"
    return Panel(f"window {window}: {times}; buffers up to {step.peak / 1e6:.1f} MB", step.timeline, (0, 1))


def hero() -> Picture:
    link, windows = "200 Mbit/s", (1, 3)
    panels = [_panel(predict(link, window), window) for window in windows]
    return draw_panels(panels, f"One step of Muon, two schedules (predicted for a link of {link})", "hero")


def draw_step(link: str, window: int) -> Picture:
    step, where = predict(link, window), f"{link}, a core for each rank"
    where = "a bare loopback, one core for both ranks" if link == LOOPBACK else where
    return draw_panels([_panel(step, window)], f"Predicted: {where}", f"step-{LINKS.index(link)}-{window}")


def explore_windows(live: bool = True) -> Shell | Picture:
    still, links = draw_step("200 Mbit/s", 1), choice("link", LINKS)
    return play(draw_step, MOST, still, live, label="window", interval=1500, first=1, link=links)


def draw_loops(loops: dict[str, TimedLoop], title: str, name: str = "loops") -> Picture:
    """Rank 0 of each loop on the toy machine."""
    panels = [
        Panel(f"{heading}: {loop.milliseconds:g} ms, holds up to {loop.watch.held}", loop.timeline, (0,))
        for heading, loop in loops.items()
    ]
    return draw_panels(panels, title, name)


def draw_run(timeline: StepTimeline, title: str) -> Picture:
    return draw_panels([Panel(f"{1000 * timeline.seconds:.1f} ms", timeline, timeline.ranks)], title, "run")


def draw_slow_links(
    runs: Sequence[StepTimeline], with_window_3: Callable[[float, float, int], float], count: int = 6
) -> Picture:
    """A loop's runs with windows 1 and 3 on slow links, and the function's prediction for window 3."""
    one, three = runs
    yours = with_window_3(*works_and_waits(one), count)
    panels = [Panel(f"window 1: {1000 * one.seconds:.0f} ms", one, one.ranks)]
    said = f"window 3: {1000 * three.seconds:.0f} ms; yours says {yours:.0f}"
    panels.append(Panel(said, three, three.ranks))
    return draw_panels(panels, "Your loop on this machine, and a slow link for each rank", "slow")


def draw_program(run: ProgramRun, title: str) -> Picture:
    """The program and its buffers on rank 0. A red line marks where a buffer is overwritten too early."""
    mark, foot = None, ""
    if run.wrong is not None and run.overwritten is not None:
        mark = run.overwritten, f"share of matrix {run.wrong}"
        foot = f"red: buffer {run.wrong % 2} is written again while s{run.wrong} still reads it"
    panel = Panel(f"{run.milliseconds:g} ms", run.timeline, (0,), mark)
    return draw_panels([panel], title, f"program-{run.wrong}", foot)


def draw_recorded(recording: Recording, said: StepTimeline, strategy: str, window: int, link: str) -> Picture:
    """A recorded step, and above it its prediction, on the first two ranks."""
    step = recording.step(strategy, window, link)
    ranks = step.timeline.ranks[:2]
    pair = {"predicted": said, "recorded": step.timeline}
    panels = [Panel(f"{how}: {1000 * each.seconds:.0f} ms", each, ranks) for how, each in pair.items()]
    title = f"{strategy}, window {window}, {link}; ranks 0 and 1 of {len(step.timeline.ranks)}"
    foot = "recorded: " + ", ".join(recording.about[what] for what in ("machine", "date"))
    return draw_panels(panels, title, f"recorded-{strategy}-{window}-{link}", foot)


def draw_pipelines(schedules: Mapping[str, Schedule], stages: int = 4, micro: int = 6) -> Picture:
    """The work of all stages under each schedule, the idle part of the time, and what each stage keeps."""
    title = f"{micro} micro-batches on {stages} stages"
    figure, axes = blank(_WIDTH, 60 + len(schedules) * (40 + 26 * stages), title)
    y, told = 50, []
    for name, schedule in schedules.items():
        ends = ends_of(schedule, stages, micro)
        idle = 1 - sum(TIMES[doing] for _, doing, _ in ends) / (stages * max(ends.values()))
        kept = ", ".join(str(most_kept(schedule(stage, stages, micro))) for stage in range(stages))
        told.append(f"{name}: idle {idle:.0%} of the time; stages keep up to {kept} micro-batches")
        write(axes, 16, y, told[-1])
        scale, y = (_WIDTH - 110) / max(ends.values()), y + 16
        for stage in range(stages):
            write(axes, 16, y + 11 + 26 * stage, f"stage {stage}")
            lane = 90, y + 26 * stage, _WIDTH - 110, 22
            rectangle(axes, *lane, CARD, hatch=_WAIT_HATCH, edgecolor=FAINT)
        for (stage, doing, number), end in ends.items():
            frame = 90 + scale * (end - TIMES[doing]), y + 26 * stage, scale * TIMES[doing], 22
            tile(axes, frame, MARKED if doing == "F" else rank_colour(stage), str(number), edgecolor=QUIET)
        y += 24 + 26 * stages
    write(axes, 16, y - 6, "grey: forward · in colour: backward · hatched: idle", color=QUIET)
    return finish(figure, f"pipelines-{len(schedules)}", f"{title}. {'. '.join(told)}.")
