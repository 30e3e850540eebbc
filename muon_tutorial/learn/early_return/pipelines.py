"""Lesson 12: pipelines. A stage's order has a forward (F) and a backward (B) for each micro-batch.

With recomputing, a stage keeps a micro-batch's input from F to B, and B computes forward once more. To show
recomputing, real stages run real micro-batches in their order of work, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...errors import UsageError
from ...evidence.memory import PeakMemory
from ..exercises.judge import Diagnosis, Exercise, MistakeError, OpenAnswerError, first, value_of

Schedule = Callable[[int, int, int], str]
"""``schedule(stage, stages, micro)``: the order of a stage, such as "FFBB" for two micro-batches."""
Piece = tuple[int, str, int]
"""A piece of work: its stage, F or B, and the number of its micro-batch."""
Forward = Callable[[nn.Module, Tensor], tuple[Tensor, Any]]
"""``forward(stage, x)``: the output, and what the stage keeps until B."""
Backward = Callable[[nn.Module, Any, Tensor], Tensor | None]
"""``backward(stage, kept, gradient)``: the gradient of the stage's input."""
TIMES = {"F": 1, "B": 2}
WIDTH, ROWS, STAGES, MICRO = 32, 256, 4, 6
SLACK = 4 * ROWS * WIDTH + 8192
"""Bytes that F may keep besides its input: enough for its output and the state of random numbers."""


def one_f_one_b(stage: int, stages: int, micro: int) -> str:
    """The exercise's reference: some forwards, then a backward and a forward in turn, then more backwards."""
    ahead = min(micro, stages - stage)
    return "F" * ahead + "BF" * (micro - ahead) + "B" * ahead


def most_kept(order: str) -> int:
    """The most micro-batches whose activations a stage keeps at once."""
    return max(order[:n].count("F") - order[:n].count("B") for n in range(len(order) + 1))


def ends_of(schedule: Schedule, stages: int, micro: int) -> dict[Piece, int]:
    """When each piece of work ends. Raises UsageError if stages wait for each other for ever."""
    needs: dict[Piece, list[Piece]] = {}
    for stage in range(stages):
        order, before = schedule(stage, stages, micro), list[Piece]()
        for n, doing in enumerate(order):
            number = order[:n].count(doing)
            last = (stage, "F", number) if stage == stages - 1 else (stage + 1, "B", number)
            neighbour = [last] if doing == "B" else [(stage - 1, "F", number)][:stage]
            needs[stage, doing, number] = before + neighbour
            before = [(stage, doing, number)]
    ends: dict[Piece, int] = {}
    while len(ends) < len(needs):
        ready = [piece for piece in needs if piece not in ends and all(each in ends for each in needs[piece])]
        if not ready:
            raise UsageError("the stages wait for each other for ever")
        for piece in ready:
            ends[piece] = TIMES[piece[1]] + max((ends[each] for each in needs[piece]), default=0)
    return ends


def keep_all(stage: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    """F without recomputing: all activations stay until B, because the output's graph holds them."""
    x.requires_grad_()
    y = stage(x)
    return y, (x, y)


def back_through_all(stage: nn.Module, kept: Any, gradient: Tensor) -> Tensor | None:
    """B without recomputing."""
    x, y = kept
    y.backward(gradient)
    return x.grad


def forward(stage: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    """The exercise's reference: F keeps its input, and the state of random numbers before it."""
    before = torch.get_rng_state()
    with torch.no_grad():
        return stage(x), (x, before)


def backward(stage: nn.Module, kept: Any, gradient: Tensor) -> Tensor | None:
    """The exercise's reference: B computes forward again, with the same random numbers."""
    x, before = kept
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    y = stage(x.requires_grad_())
    torch.set_rng_state(after)
    y.backward(gradient)
    return x.grad


def stage_of(dropout: float) -> nn.Module:
    """A stage: two blocks, whose weights are small beside the activations of a micro-batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH))
        again = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH))
        return nn.Sequential(*parts, *again)


@dataclass(slots=True)
class StageRun:
    """A stage's outputs, the gradients of its inputs and weights, and how often it computed forward.

    ``kept``: the bytes that F leaves besides its input. ``peak``: the most bytes of tensors at a time,
    without the weights. Results are arrays, so that they do not count.
    """

    outputs: list[NDArray] = field(default_factory=list)
    gradients: list[NDArray] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    forwards: int = 0
    kept: int = 0
    peak: int = 0


def run_stage(forward: Forward, backward: Backward, order: str, dropout: float = 0.2) -> StageRun:
    """Run a stage on micro-batches in its order, from the same random numbers each time.

    Raises:
        MistakeError: ``forward`` or ``backward`` raised an error, or returned something else than it should.
        OpenAnswerError: one of them is a stub.
    """
    stage, run, waiting = stage_of(dropout), StageRun(), list[Any]()
    computed = list[Any]()
    stage.register_forward_pre_hook(lambda *given: computed.append(None))
    with torch.random.fork_rng(devices=[]), PeakMemory() as memory:
        torch.manual_seed(1)
        draw = torch.Generator().manual_seed(2)
        for doing in order:
            if doing == "F":
                x = torch.randn(ROWS, WIDTH, generator=draw)
                before = memory.now
                y, kept = _pair(value_of(forward, stage, x, told="In forward: {}"))
                run.outputs.append(_array(y))
                waiting.append(kept)
                del x, y, kept  # the next stage has the output now
                run.kept = max(run.kept, memory.now - before)
            else:
                gradient = torch.randn(ROWS, WIDTH, generator=draw)
                given = stage, waiting.pop(0), gradient
                run.gradients.append(_array(_tensor(value_of(backward, *given, told="In backward: {}"))))
                del given
    run.weights = [None if weight.grad is None else _array(weight.grad) for weight in stage.parameters()]
    run.peak, run.forwards = memory.peak, len(computed)
    return run


def _array(tensor: Tensor) -> NDArray:
    return tensor.detach().numpy().copy()


def _pair(value: Any) -> tuple[Tensor, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise MistakeError("forward returns two things: the output, and what to keep until B.")
    if value[0] is ... or value[1] is ...:
        raise OpenAnswerError
    if not isinstance(value[0], Tensor):
        raise MistakeError(f"First, forward returns the stage's output; yours is {type(value[0]).__name__}.")
    return value


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    said = f"backward returns the gradient of the stage's input; yours returns {type(value).__name__}."
    raise MistakeError(f"{said} An input that requires a gradient has it in .grad afterwards.")


def recomputing_exercise() -> Exercise:
    """The exercise: F and B of a stage that recomputes, judged by bits, kept bytes, and forward passes."""

    def judge(forward: Forward, backward: Backward) -> Diagnosis | None:
        return first(_judge(forward, backward, dropout) for dropout in (0.0, 0.2))

    praise = "Each micro-batch costs its input from F to B, and one more forward."
    return Exercise(judge, (), praise, optional=True)


def _judge(forward: Forward, backward: Backward, dropout: float) -> Diagnosis | None:
    order = one_f_one_b(1, STAGES, MICRO)
    mine = run_stage(forward, backward, order, dropout)
    due = run_stage(keep_all, back_through_all, order, dropout)
    if found := _judge_outputs(mine.outputs, due.outputs, order.index("B")):
        return found
    if mine.kept > SLACK:
        kept, needed = mine.kept / 1e3, 4 * ROWS * WIDTH / 1e3
        said = f"Between F and B you keep {kept:.0f} kB besides the input, which has {needed:.0f}."
        hints = ("An output that has a graph keeps all activations.", "Compute under torch.no_grad().")
        return Diagnosis(said, hints)
    if not all(map(np.array_equal, mine.gradients, due.gradients)):
        if dropout:
            said = "Without dropout, your gradients are right."
            said += " With it, your second forward drops other entries."
            hint = "torch.get_rng_state() before F tells where the random numbers stood."
            return Diagnosis(said, (hint, "Before you compute again: torch.set_rng_state(…)."))
        return Diagnosis("The gradient of the stage's input is wrong.", ("Where does `gradient` come in?",))
    if any(weight is None for weight in mine.weights):
        said = "The gradient of the input is right, but the stage's parameters got none."
        return Diagnosis(said, ("y.backward(gradient) gives them theirs, too.",))
    if not all(map(np.array_equal, mine.weights, due.weights)):
        said = "The gradients of the stage's parameters are not the sum over all micro-batches."
        return Diagnosis(said, ("Each y.backward(gradient) adds to .grad. Leave what is there.",))
    if mine.forwards != 2 * MICRO:
        said = f"For {MICRO} micro-batches the stage computes forward {mine.forwards} times, not {2 * MICRO}."
        return Diagnosis(said, ("Once in F, and once in B.",))
    return None


def _judge_outputs(mine: Sequence[NDArray], due: Sequence[NDArray], first_back: int) -> Diagnosis | None:
    """Where an output is wrong only after a B, that B has moved the random numbers."""
    pairs = enumerate(zip(mine, due, strict=True))
    wrong = [i for i, (one, right) in pairs if not np.array_equal(one, right)]
    if not wrong:
        return None
    if wrong[0] < first_back:
        said = f"The output of micro-batch {wrong[0]} is not stage(x)."
        return Diagnosis(said, ("Compute forward once in F, and return what comes out.",))
    said = f"Outputs are right up to the first B. Then micro-batch {wrong[0]} loses other entries to dropout."
    hint = "When B is done, restore the random state that B found: the next forward goes on from there."
    return Diagnosis(said, (hint,))


def say_recomputing(order: Schedule, forward: Forward, backward: Backward) -> str:
    """A table from real runs: each stage's peak of memory and its forwards, without and with recomputing."""
    ways: dict[str, tuple[Forward, Backward]] = {"keeps all": (keep_all, back_through_all)}
    ways["recomputes"] = forward, backward
    lines = [f"{'stage':<24}" + "".join(f"{stage:>8}" for stage in range(STAGES))]
    for name, way in ways.items():
        runs = [run_stage(*way, order(stage, STAGES, MICRO)) for stage in range(STAGES)]
        lines.append(f"{name + ', peak in MB':<24}" + "".join(f"{run.peak / 1e6:>8.2f}" for run in runs))
        lines.append(f"{'  times forward':<24}" + "".join(f"{run.forwards:>8}" for run in runs))
    return "\n".join(lines)
