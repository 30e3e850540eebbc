"""Pictures of lesson 13: waterfalls from AdamW to Muon, and ratios by setting."""

from __future__ import annotations

import math
from itertools import accumulate

from matplotlib.axes import Axes

from ..bill.costs import DTYPES
from ..pictures.colours import ADAMW, CARD, EMPTY, MARKED, MUON, QUIET
from ..pictures.picture import Picture, blank, centred, finish, rectangle, tile, write
from ..widgets.shell import Shell, choice, play
from . import costs, trace_events
from .costs import FEWER, LINKS, MODEL, RANKS, STRATEGIES, TOKENS, Setting, Waterfall, machine, say_bandwidth

_WIDTH, _LEFT, _WIDE, _ROW = 900, 176, 560, 25


def hero() -> Picture:
    """The first picture: from AdamW to Muon in bytes, seconds and memory, with everything in fp32."""
    return draw_waterfalls(Setting(), "hero")


def draw_waterfalls(at: Setting, name: str) -> Picture:
    falls = costs.waterfalls(at)
    rows = [len(fall.changes) + 2 for fall in falls]
    where = f"{MODEL} on one machine, {RANKS} ranks"
    title = f"From AdamW to Muon: {where}, {at.dtypes}, {at.tokens:,} tokens a step"
    figure, axes = blank(_WIDTH, 84 + sum(34 + _ROW * count for count in rows), title)
    said = f"{at.strategy}; links of {say_bandwidth(at.bandwidth)}; {_said(at.fewer)}"
    write(axes, 16, 44, said, color=QUIET)
    y, words = 70, []
    for fall, count in zip(falls, rows, strict=True):
        words.append(_draw_fall(axes, fall, y))
        y += 34 + _ROW * count
    y += 4
    source = f"the planner's file of “{machine().name}”"
    note = f"Nothing ran. Seconds follow from {source}, which holds estimates."
    write(axes, 16, y, note, color=QUIET)
    return finish(figure, f"cheaper-{name}", f"{title}; {said}. {' '.join(words)} {note}")


def _said(fewer: float) -> str:
    more = f"to the same loss, where AdamW takes {fewer:g} × as many steps"
    return "step for step" if fewer == 1.0 else more


def _draw_fall(axes: Axes, fall: Waterfall, y: float) -> str:
    """Draw one waterfall below ``y``, and return it in words."""
    cheaper = "Muon" if fall.times < 1 else "AdamW"
    winner = "a tie" if math.isclose(fall.times, 1.0, abs_tol=0.005) else f"{cheaper} is cheaper"
    write(axes, 16, y + 8, fall.what, 12, weight="bold")
    write(axes, _LEFT + 72, y + 8, f"{fall.times:.2f} ×: {winner}", 12, weight="bold")
    most = max(fall.first, *accumulate(fall.changes.values(), initial=fall.first))
    scale, at, y = (_WIDE if not fall.note else _WIDE - 190) / most, fall.first, y + 24
    _draw_bar(axes, y, "AdamW", 0.0, fall.first * scale, CARD, ADAMW, fall.say(fall.first) + fall.note)
    for name, change in fall.changes.items():
        y += _ROW
        low, high = sorted((at, at + change))
        hatch = "///" if change < 0 else ""
        begin, width = low * scale, (high - low) * scale
        _draw_bar(axes, y, name, begin, width, MARKED, QUIET, fall.say(change, "+"), hatch)
        at += change
    _draw_bar(axes, y + _ROW, "Muon", 0.0, fall.last * scale, CARD, MUON, fall.say(fall.last))
    changes = ", ".join(f"{name} {fall.say(change, '+')}" for name, change in fall.changes.items())
    ends = f"AdamW {fall.say(fall.first)}{fall.note}, {changes}, Muon {fall.say(fall.last)}"
    return f"{fall.what.capitalize()}: {ends}: {fall.times:.2f} ×, {winner}."


def _draw_bar(
    axes: Axes, y: float, name: str, x: float, width: float, fill: str, edge: str, said: str, hatch: str = ""
) -> None:
    write(axes, _LEFT - 10, y + 10, name, ha="right")
    look = {"edgecolor": edge, "linewidth": 1.8, "hatch": hatch}
    rectangle(axes, _LEFT + x, y + 1, max(width, 1.0), _ROW - 6, fill, **look)
    write(axes, _LEFT + x + width + 8, y + 10, said)


def draw_gpu_step() -> Picture:
    """The report's step with ``async_op=True`` on rank 0: the call, gathers, and the GPU's other work."""
    events = trace_events.gpu_step()
    call, run = (event for event in events if event.name.startswith("Optimizer"))
    along_dp, along_tp = trace_events.at_work(events)
    rest = [event for event in events if event.thread == run.thread and event.sort == "kernel"]
    products = [event for event in rest if "gemm" in event.name]
    title = "One step with async_op=True, on rank 0 of four RTX A4000 (the report's trace)"
    lanes = {
        "call, on the CPU": ([call], QUIET),
        "dp gather": ([along_dp], MARKED),
        "tp gather": ([along_tp], MARKED),
        "Newton–Schulz": (products, MUON),
        "other kernels": ([event for event in rest if event not in products], QUIET),
    }
    figure, axes = blank(_WIDTH, 88 + 34 * len(lanes), title)
    scale, said = (_WIDTH - 190) / run.end, []
    for row, (name, (shown, colour)) in enumerate(lanes.items()):
        y = 48 + 34 * row
        write(axes, 16, y + 12, name)
        rectangle(axes, 140, y, scale * run.end, 24, CARD, edgecolor=EMPTY)
        for event in shown:
            rectangle(axes, 140 + scale * event.begin, y, scale * event.duration, 24, colour, linewidth=0.4)
        begin, end = shown[0].begin / 1e6, shown[-1].end / 1e6
        what = f"{len(shown)} kernels from" if len(shown) > 1 else "from"
        said.append(f"{name}: {what} {begin:.2f} to {end:.2f} ms")
    for at in range(0, 50, 10):
        centred(axes, 140 + scale * at * 1e6, 60 + 34 * len(lanes), f"{at} ms", color=QUIET)
    return finish(figure, "cheaper-gpu-step", f"{title}. {'. '.join(said)}.")


def explore_costs(live: bool = True) -> Shell | Picture:

    def draw(tokens: int, dtypes: str, link: float, strategy: str, fewer: float) -> Picture:
        at = Setting(dtypes, TOKENS[tokens], link, strategy, fewer)
        return draw_waterfalls(at, f"at-{tokens}")

    still = draw_turns(Setting(fewer=FEWER["1.1 ×"]))
    buttons = {"dtypes": choice("dtypes", list(DTYPES)), "link": choice("links", LINKS)}
    buttons |= {"strategy": choice("strategy", list(STRATEGIES)), "fewer": choice("AdamW’s steps", FEWER)}
    return play(draw, len(TOKENS) - 1, still, live, label="tokens", interval=1200, **buttons)


def draw_turns(at: Setting) -> Picture:
    """Which optimizer is ahead, by tokens per step, strategy and link speed."""
    columns = [(strategy, LINKS[link]) for strategy in STRATEGIES for link in ("full speed", "1 / 64")]
    wide, high, left, top = 112, 30, 190, 92
    title = f"Muon's time over AdamW's, {at.dtypes}, {_said(at.fewer)}"
    figure, axes = blank(_WIDTH, top + high * len(TOKENS) + 44, title)
    words = []
    for column, (strategy, link) in enumerate(columns):
        x = left + column * wide
        centred(axes, x + wide / 2, 52, strategy)
        centred(axes, x + wide / 2, 74, say_bandwidth(link), color=QUIET)
    for row, tokens in enumerate(TOKENS):
        y = top + row * high
        write(axes, left - 12, y + high / 2, f"{tokens:,} tokens", ha="right")
        for column, (strategy, link) in enumerate(columns):
            one = Setting(at.dtypes, tokens, link, strategy, at.fewer)
            times = one.muon_seconds / one.adamw_seconds
            who, edge, fill = ("Muon", MUON, CARD) if times < 1 else ("AdamW", ADAMW, EMPTY)
            frame = left + column * wide + 3, y + 3, wide - 6, high - 6
            tile(axes, frame, fill, f"{times:.2f}  {who}", edgecolor=edge, linewidth=1.8)
            words.append(f"{tokens:,} tokens, {strategy}, {say_bandwidth(link)}: {times:.2f}, {who}")
    note = f"{MODEL}, {RANKS} ranks. Nothing ran: seconds follow from the file of “{machine().name}”."
    write(axes, 16, top + high * len(TOKENS) + 22, note, color=QUIET)
    return finish(figure, "cheaper-turns", f"{title}. {'; '.join(words)}. {note}")
