"""Lesson 01: three updates from one gradient of a small GPT, the loss they save, and what energy is.

All three updates are without momentum, so that they see the same gradient: SGD's is the gradient itself,
Adam's divides each number by its running size, Muon's is orthogonalized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ... import split_parameters
from ...newton_schulz import zeropower_via_newtonschulz
from ..inputs import measure
from ..inputs.small_gpt import GPT_SHAPE, TrainedGPT

EXAMPLE = "blocks.1.mlp.up.weight"
EMBEDDING = "embedding.weight"
KINDS = {name: f"attention.{name}" for name in "qkvo"} | {"up": "mlp.up", "down": "mlp.down"}
LOUDNESS = 1e-3
Orthogonalize = Callable[[Tensor], Tensor]


def updates_of(run: TrainedGPT, name: str, orthogonalize: Orthogonalize) -> dict[str, Tensor]:
    """What each optimizer would make of the gradient of one parameter."""
    gradient = run.gradients[name]
    return {
        "SGD": gradient,
        "Adam": gradient / (run.squares[name].sqrt() + 1e-8),
        "Muon, exact": orthogonalize(gradient),
        "Muon, as it runs": zeropower_via_newtonschulz(gradient).float(),
    }


def say_run(run: TrainedGPT, steps: int, seconds: float) -> str:
    """What was trained, in words."""
    count = sum(parameter.numel() for parameter in run.model.parameters())
    rows, columns = run.gradients[EXAMPLE].shape
    return (
        f"a GPT of {GPT_SHAPE.layers} layers and {count:,} numbers, {steps} steps "
        f"on Python's own library, {seconds:.1f} s\n"
        f"one gradient of it: {EXAMPLE}, {rows} × {columns}"
    )


def svd_muon(G: Tensor) -> Tensor:
    """The orthogonal factor of a matrix: its directions, each with singular value 1.

    >>> svd_muon(torch.diag(torch.tensor([3.0, 2.0])))
    tensor([[1., 0.],
            [0., 1.]])
    """
    U, _, Vt = torch.linalg.svd(G, full_matrices=False)
    return U @ Vt


def say_size(matrix: Tensor) -> str:
    return " × ".join(map(str, matrix.shape))


def half_of_energy(G: Tensor) -> int:
    """How many of the loudest directions carry half of a matrix's energy, the sum of its squares."""
    return int((energy_shares(G) < 0.5).sum()) + 1


def energy_shares(G: Tensor) -> Tensor:
    squares = torch.linalg.svdvals(G.double()) ** 2
    return squares.cumsum(0) / squares.sum()


@dataclass(frozen=True, slots=True)
class LossDrop:
    """How far the loss falls after one update: as the gradient promises, and as measured."""

    promised: float
    measured: float


def loss_drops(run: TrainedGPT, orthogonalize: Orthogonalize) -> dict[str, LossDrop]:
    """One update of all hidden matrices by each optimizer, its loudest direction scaled to ``LOUDNESS``."""
    names = split_parameters(run.model).hidden_names
    by_name = {name: updates_of(run, name, orthogonalize) for name in names}
    with measure.one_thread():
        return {who: _drop(run, {name: by_name[name][who] for name in names}) for who in by_name[names[0]]}


@torch.no_grad()
def _drop(run: TrainedGPT, updates: Mapping[str, Tensor]) -> LossDrop:
    scaled = {
        name: update * (LOUDNESS / torch.linalg.matrix_norm(update, 2)) for name, update in updates.items()
    }
    promised = sum((run.gradients[name] * update).sum().item() for name, update in scaled.items())
    weights = {name: weight.detach() - scaled.get(name, 0) for name, weight in run.model.named_parameters()}
    logits = torch.func.functional_call(run.model, weights, (run.batch.inputs,))
    after = torch.nn.functional.cross_entropy(logits.flatten(0, 1), run.batch.targets.flatten())
    return LossDrop(promised, run.loss - after.item())


def say_cost(G: Tensor, times: int = 5) -> str:
    """Seconds of the SVD and of Newton–Schulz, for ``G`` and for a matrix four times as large each way."""
    lines = [f"{'matrix':>12}  {'U Vᵀ by SVD':>12}  {'Newton–Schulz':>14}"]
    with measure.one_thread():
        for matrix in (G, G.repeat(4, 4) + torch.randn(4 * G.shape[0], 4 * G.shape[1]) * G.std()):
            svd = measure.median_seconds(partial(svd_muon, matrix), times)
            fast = measure.median_seconds(partial(zeropower_via_newtonschulz, matrix), times)
            lines.append(f"{say_size(matrix):>12}  {svd * 1e3:>9.1f} ms  {fast * 1e3:>11.1f} ms")
    return "\n".join(lines)
