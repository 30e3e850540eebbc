"""The film of lesson 04: a training with the early code, all ranks in one process, one of them at fault.

A tiny GPT with the lesson's matrices learns random targets. In step 1, one rank loses the gradient of one
matrix, or one row of it gets the wrong sign. The results are compared with a training without a fault.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from ...engine.collective import Collective, Label, Walk
from ...plan.grid import Grid
from ...worlds.local import LocalWorld
from ..inputs import measure
from ..pictures.colours import EMPTY, INK, QUIET, RIGHT_FILL, WRONG, WRONG_FILL, rank_colour
from ..pictures.picture import Picture, blank, centred, finish, rectangle, verdict, write
from ..widgets.shell import Shell, choice, play, rank_choice
from .on_ranks import LENGTH, PLACES, SHAPES, fill, parameters

STEPS = 3
PHASES = ("gradients", "own updates", "weights")
FAULTS = {"gradient lost": "lost", "a wrong sign": "sign"}
LR = 0.1
_TOKENS, _WIDTH = 8, SHAPES["q1"][0]
Record = list[dict[str, Tensor]]
"""What a rank holds after each phase of each step, flat."""


@dataclass(frozen=True, slots=True)
class SabotagedRun:
    """Which (moment, rank, matrix) differ from the run without a fault, and whether ranks agree."""

    ranks: int
    rank: int
    matrix: str
    fault: str
    wrong: frozenset[tuple[int, int, str]]
    agree: tuple[bool, ...]

    def wrong_at(self, moment: int) -> list[str]:
        """The matrices that are wrong on any rank after a phase."""
        found = {name for when, _, name in self.wrong if when == moment}
        return [name for name in SHAPES if name in found]


@functools.cache
def sabotaged(ranks: int, rank: int, matrix: str, fault: str, seed: int = 0) -> SabotagedRun:
    """The training with one fault; ``rank`` -1 stands for no fault."""
    sound, mine = _train(ranks, seed), _train(ranks, seed, rank, matrix, fault)
    wrong = {
        (moment, each, place.name)
        for moment in range(STEPS * len(PHASES))
        for each in range(ranks)
        for place in PLACES
        if not torch.equal(*(r[each][moment // 3][PHASES[moment % 3]][place.slice] for r in (sound, mine)))
    }
    weights = [[run[step]["weights"] for run in mine] for step in range(STEPS)]
    same = [True, *(all(torch.equal(one, copies[0]) for one in copies) for copies in weights)]
    agree = tuple(same[(moment + 1) // 3] for moment in range(STEPS * len(PHASES)))
    return SabotagedRun(ranks, rank, matrix, fault, frozenset(wrong), agree)


@functools.lru_cache(maxsize=8)
def _train(ranks: int, seed: int, rank: int = -1, matrix: str = "", fault: str = "") -> list[Record]:
    world = LocalWorld(Grid.of(dp=ranks))
    with measure.one_thread():
        return world.run([_program(each, ranks, seed, each == rank, matrix, fault) for each in range(ranks)])


def _program(rank: int, ranks: int, seed: int, is_hit: bool, matrix: str, fault: str) -> Walk:
    """One rank's training: average, orthogonalize its own matrices, share with the early code, update."""
    weights, record = parameters(seed), []
    for step in range(STEPS):
        own = _gradient(weights, seed=1000 * seed + ranks * step + rank)
        summed = yield _sum_of(own, "average")
        averaged = summed / ranks
        for place, weight in zip(PLACES, weights, strict=True):
            weight.grad = averaged[place.slice].view_as(weight).clone()
            if is_hit and step == 0 and place.name == matrix:
                weight.grad[0] *= -1
                weight.grad = None if fault == "lost" else weight.grad
        held = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = fill(weights, rank, ranks, skips=True)
        updates = yield _sum_of(flat, "share")
        for place, weight in zip(PLACES, weights, strict=True):
            weight.data -= LR * updates[place.slice].view_as(weight).float()
        kept = (_flat(held), flat, _flat([weight.detach() for weight in weights]))
        record.append({name: tensor.clone() for name, tensor in zip(PHASES, kept, strict=True)})
    return record


def _sum_of(mine: Tensor, phase: str) -> Collective:
    return Collective("all_reduce", ("dp",), mine.dtype, mine, LENGTH, Label(phase))


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _gradient(weights: list[nn.Parameter], seed: int) -> Tensor:
    """The flat gradient of the mean squared error on this rank's batch. Layers are attention and an MLP."""
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(_TOKENS, _WIDTH, generator=generator) for _ in range(2))
    named: dict[str, Any] = dict(zip(SHAPES, weights, strict=True))
    for layer in (1, 2):
        q, k, v, o, up, down = (named[f"{kind}{layer}"] for kind in ("q", "k", "v", "o", "up", "down"))
        h = nn.functional.rms_norm(x, (_WIDTH,))
        query, key, value = ((h @ weight.T)[None] for weight in (q, k, v))
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0] @ o.T
        x = x + nn.functional.gelu(nn.functional.rms_norm(x, (_WIDTH,)) @ up.T) @ down.T
    return _flat(list(torch.autograd.grad((x - target).square().mean(), weights)))


MOMENTS = STEPS * len(PHASES)
_LEFT, _TOP, _WIDE, _ROW, _HIGH = 152.0, 92.0, 61.0, 31.0, 25.0
_SAID = {"lost": "loses its gradient of", "sign": "turns the sign of one row of its gradient of"}


def draw_sabotage(run: SabotagedRun, moment: int) -> Picture:
    """What every rank holds after each phase up to a moment; red marks what the fault has changed."""
    bottom = _TOP + MOMENTS * _ROW + 8 * (STEPS - 1)
    title = f"In step 1, rank {run.rank} {_SAID[run.fault]} {run.matrix}"
    figure, axes = blank(900, round(bottom + 58), title, 12, 22)
    said = f"each box: ranks 0 to {run.ranks - 1} from left to right · stripe: the owner"
    write(axes, 12, 46, said, color=QUIET)
    for column, place in enumerate(PLACES):
        x = _LEFT + column * _WIDE
        centred(axes, x + _WIDE / 2 - 2, _TOP - 22, place.name)
        rectangle(axes, x, _TOP - 11, _WIDE - 4, 6, rank_colour(place.owner(run.ranks)), linewidth=0.6)
    for row in range(MOMENTS):
        top = _TOP + row * _ROW + 8 * (row // len(PHASES))
        write(axes, 12, top + _HIGH / 2, f"{row // 3 + 1} · {PHASES[row % 3]}")
        _draw_row(axes, run, row, top, is_past=row < moment)
    agrees, wrong = _state(run, moment)
    same = f"all ranks hold the same weights: {'yes' if agrees else 'no'}"
    verdict(axes, (12, bottom + 6, 432, 34), same, agrees)
    alike = f"weights equal to those without the saboteur: {12 - len(wrong)} of 12"
    verdict(axes, (452, bottom + 6, 432, 34), alike, not wrong)
    name = f"first_muon-saboteur-{run.ranks}-{run.rank}-{run.matrix}-{run.fault}-{moment}"
    return finish(figure, name, say_sabotage(run, moment))


def _draw_row(axes: Axes, run: SabotagedRun, row: int, top: float, *, is_past: bool) -> None:
    slot = (_WIDE - 4) / run.ranks
    slots, fills, crosses = [], [], []
    for column, name in enumerate(SHAPES):
        for rank in range(run.ranks):
            x = _LEFT + column * _WIDE + rank * slot
            is_wrong = is_past and (row, rank, name) in run.wrong
            slots.append(Rectangle((x, top), slot, _HIGH))
            fills.append(WRONG_FILL if is_wrong else RIGHT_FILL if is_past else EMPTY)
            crosses += [(x + slot / 2, top + _HIGH / 2)] if is_wrong else []
    edge = WRONG if crosses else INK if is_past else QUIET
    axes.add_collection(PatchCollection(slots, facecolors=fills, edgecolors=QUIET, linewidths=0.5))
    if crosses:
        xs, ys = zip(*crosses, strict=True)
        axes.plot(xs, ys, "x", color=edge, markersize=min(9.0, slot * 0.55), markeredgewidth=2.2, zorder=6)


def _state(run: SabotagedRun, moment: int) -> tuple[bool, list[str]]:
    """Whether ranks agree on the weights after ``moment`` phases, and which weights are wrong."""
    if not moment:
        return True, []
    last = moment // 3 * 3 - 1
    return run.agree[moment - 1], run.wrong_at(last) if last > 0 else []


def say_sabotage(run: SabotagedRun, moment: int) -> str:
    agrees, wrong = _state(run, moment)
    said = [f"In step 1, rank {run.rank} of {run.ranks} {_SAID[run.fault]} {run.matrix}."]
    for row in range(moment):
        names = run.wrong_at(row)
        found = "everything" if len(names) == len(SHAPES) else ", ".join(names) or "nothing"
        said.append(f"Step {row // 3 + 1}, {PHASES[row % 3]}: {found} not as in a sound training.")
    same = "the same weights" if agrees else "different weights"
    said.append(f"After {moment} phases all ranks hold {same}; wrong weights: {', '.join(wrong) or 'none'}.")
    return " ".join(said)


def explore_sabotage(dp: int, live: bool = True) -> Shell | Picture:

    def draw(rank: int, matrix: str, fault: str, moment: int) -> Picture:
        return draw_sabotage(sabotaged(dp, rank, matrix, fault), moment)

    ranks = rank_choice(dp)
    matrices, faults = choice("matrix", list(SHAPES)), choice("fault", FAULTS, width=120)
    ranks.value, matrices.value, matrices.style.button_width = 1 % dp, "k1", "52px"
    still = draw(1 % dp, "k1", "lost", MOMENTS)
    return play(draw, MOMENTS, still, live, rank=ranks, matrix=matrices, fault=faults)
