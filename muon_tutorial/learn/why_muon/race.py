"""Lesson 01: SGD, AdamW and Muon race on the small GPT. A recording of the race comes with the package.

In every lane, AdamW steps embedding, head and norms, at one learning rate tuned for AdamW. Only the optimizer
of the hidden matrices differs. ``python -m muon_tutorial.learn.why_muon.race`` tunes and records again.
"""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ... import split_parameters
from ...training.gpt import GPT, build_gpt, next_byte_loss
from ...training.text import Batch, Text, batch_at, held_out_batches, load_text
from .. import inputs
from ..inputs import measure
from ..inputs.small_gpt import BATCH, GPT_SHAPE

RECORDED = "race.json"
RACERS = ("SGD", "AdamW", "Muon")
SHORT_REST_RATE = 0.005
STEPS, EVERY, HELD_OUT = 200, 8, 4
SEEDS = (0, 1, 2)
RATES: Mapping[str, Sequence[float]] = {
    "SGD": (0.005, 0.01, 0.02, 0.04, 0.08),
    "AdamW": (0.00125, 0.0025, 0.005, 0.01, 0.02),
    "Muon": (0.01, 0.02, 0.04, 0.08, 0.16),
}
MUON_TOO = {"Muon, embedding too": "embedding.weight", "Muon, head too": "head.weight"}
"""Lanes in which Muon steps one more matrix: of interest, but not in the race."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """One run: the optimizer of the hidden matrices, its rate, and the loss every ``EVERY`` steps."""

    who: str
    rate: float
    seed: int
    losses: tuple[float, ...]

    @property
    def last(self) -> float:
        return self.losses[-1]


@dataclass(frozen=True, slots=True)
class Race:
    """All runs of a race, including those for tuning, and their settings and versions."""

    steps: int
    every: int
    rest_rate: float
    python: str
    torch: str
    curves: tuple[LossCurve, ...]

    def tried(self, who: str) -> list[LossCurve]:
        """The tuning runs of one lane, which have the first seed, sorted by learning rate."""
        found = [curve for curve in self.curves if curve.who == who and curve.seed == SEEDS[0]]
        return sorted(found, key=lambda curve: curve.rate)

    def best(self, who: str, seed: int = SEEDS[0]) -> LossCurve:
        """The run of one lane at its tuned learning rate."""
        rate = min(self.tried(who), key=lambda curve: curve.last).rate
        [found] = [c for c in self.curves if (c.who, c.rate, c.seed) == (who, rate, seed)]
        return found

    def ranking(self, seed: int = SEEDS[0]) -> list[str]:
        """The racers, sorted by their last loss, the lowest first."""
        return sorted(RACERS, key=lambda who: self.best(who, seed).last)

    def caught_at(self, seed: int = SEEDS[0]) -> int:
        """The step at which the winner first reaches the runner-up's last loss."""
        first, second, *_ = self.ranking(seed)
        goal = self.best(second, seed).last
        reached = next(n for n, loss in enumerate(self.best(first, seed).losses) if loss <= goal)
        return reached * self.every

    def __str__(self) -> str:
        with_what = f"Python {self.python} and torch {self.torch}"
        return f"recorded with {with_what}, {self.steps} steps, loss on held-out text"


@functools.cache
def recorded_race() -> Race:
    found = json.loads((resources.files(inputs) / "recorded" / RECORDED).read_text(encoding="utf-8"))
    curves = tuple(LossCurve(c["who"], c["rate"], c["seed"], tuple(c["losses"])) for c in found.pop("curves"))
    return Race(**found, curves=curves)


@functools.cache
def course() -> tuple[Text, Sequence[Batch]]:
    """The text that all lanes learn from, and the batches on which they are judged."""
    text = load_text(None, GPT_SHAPE.context)
    return text, held_out_batches(text, BATCH, GPT_SHAPE.context, HELD_OUT)


def run_lane(who: str, rate: float, rest_rate: float, steps: int, seed: int) -> LossCurve:
    """Train the small GPT in one lane; both learning rates fall linearly to 0."""
    with measure.one_thread():
        model = build_gpt(GPT_SHAPE, seed)
        optimizers = _optimizers(model, who, rate, rest_rate)
        falls = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.0, steps) for each in optimizers]
        losses, text = [_judge(model)], course()[0]
        for step in range(steps):
            _learn(model, batch_at(text, step, BATCH, GPT_SHAPE.context, seed))
            for optimizer in optimizers:
                optimizer.step()
            for fall in falls:
                fall.step()
            if (step + 1) % EVERY == 0:
                losses.append(_judge(model))
    return LossCurve(who, rate, seed, tuple(round(loss, 4) for loss in losses))


def _optimizers(model: GPT, who: str, rate: float, rest_rate: float) -> list[torch.optim.Optimizer]:
    lane = {*split_parameters(model).hidden_names, MUON_TOO.get(who)}
    named = dict(model.named_parameters())
    hidden = [named[name] for name in named if name in lane]
    rest = [named[name] for name in named if name not in lane]
    sgd = functools.partial(torch.optim.SGD, momentum=0.95, nesterov=True)
    make: Any = {"SGD": sgd, "AdamW": torch.optim.AdamW}.get(who, torch.optim.Muon)
    return [make(hidden, lr=rate), torch.optim.AdamW(rest, lr=rest_rate)]


def _learn(model: GPT, batch: Batch) -> float:
    model.zero_grad()
    loss = next_byte_loss(model, batch.inputs, batch.targets)
    loss.backward()
    return loss.item()


@torch.no_grad()
def _judge(model: GPT) -> float:
    losses = [next_byte_loss(model, batch.inputs, batch.targets).item() for batch in course()[1]]
    return sum(losses) / len(losses)


def train_with(step: Callable[..., object] | None, steps: int, seed: int) -> list[float]:
    """Losses of a short training with ``step(weight, gradient, buffer, lr)``; None means torch's Muon."""
    rate = 0.02
    with measure.one_thread():
        text, model = load_text(None, GPT_SHAPE.context), build_gpt(GPT_SHAPE, seed)
        optimizer, rest = _optimizers(model, "Muon", rate, SHORT_REST_RATE)
        buffers = [(p, torch.zeros_like(p)) for group in optimizer.param_groups for p in group["params"]]
        losses = []
        for number in range(steps):
            losses.append(_learn(model, batch_at(text, number, BATCH, GPT_SHAPE.context, seed)))
            rest.step()
            if step is None:
                optimizer.step()
            else:
                with torch.no_grad():
                    for weight, buffer in buffers:
                        step(weight, weight.grad, buffer, rate)
    return losses


def record(steps: int = STEPS) -> Race:
    """Tune and run every lane.

    First AdamW trains the whole model, and its best rate is used for embedding, head and norms. Then
    each lane runs at each of its rates, and the racers run again at their best rates with other seeds.
    """
    whole = [run_lane("AdamW", rate, rate, steps, SEEDS[0]) for rate in RATES["AdamW"]]
    rest_rate = min(whole, key=lambda curve: curve.last).rate
    curves = []
    for who in (*RACERS, *MUON_TOO):
        rates = RATES.get(who, RATES["Muon"])
        tried = [run_lane(who, rate, rest_rate, steps, SEEDS[0]) for rate in rates]
        best = min(tried, key=lambda curve: curve.last).rate
        again = SEEDS[1:] if who in RACERS else ()
        curves += [*tried, *(run_lane(who, best, rest_rate, steps, seed) for seed in again)]
    return Race(steps, EVERY, rest_rate, platform.python_version(), torch.__version__, tuple(curves))


if __name__ == "__main__":
    target = Path(inputs.__file__).with_name("recorded") / RECORDED
    target.write_text(json.dumps(asdict(record())) + "\n", encoding="utf-8")
    print(target)
