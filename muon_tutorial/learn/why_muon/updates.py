"""Lesson 01: updates without momentum from one gradient, the loss after each, Muon's whole update."""

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
MOMENTUM, DECAY = 0.95, 0.1
Orthogonalize = Callable[[Tensor], Tensor]
SVDUpdate = Callable[[Tensor, Tensor], Tensor]
"""Returns the update from a gradient and a momentum buffer, and updates the buffer in place."""


def updates_of(run: TrainedGPT, name: str, orthogonalize: Orthogonalize) -> dict[str, Tensor]:
    """Each optimizer's update of one parameter, all made from the same gradient."""
    gradient = run.gradients[name]
    return {
        "SGD": gradient,
        "Adam": gradient / (run.squares[name].sqrt() + 1e-8),
        "Muon, exact": orthogonalize(gradient),
        "Muon, as it runs": zeropower_via_newtonschulz(gradient).float(),
    }


def say_run(run: TrainedGPT, steps: int, seconds: float) -> str:
    count = sum(parameter.numel() for parameter in run.model.parameters())
    rows, columns = run.gradients[EXAMPLE].shape
    return (
        f"a GPT of {GPT_SHAPE.layers} layers and {count:,} parameters, {steps} steps "
        f"on Python's own library, {seconds:.1f} s\n"
        f"one gradient of it: {EXAMPLE}, {rows} × {columns}"
    )


def svd_muon(G: Tensor) -> Tensor:
    """The orthogonal factor of a matrix: its directions, each with singular value 1."""
    U, _, Vt = torch.linalg.svd(G, full_matrices=False)
    return U @ Vt


def svd_update(G: Tensor, buffer: Tensor) -> Tensor:
    """The exercise's reference: Muon's update by SVD after Nesterov momentum; ``buffer`` changes in place."""
    buffer.lerp_(G, 1 - MOMENTUM)
    return svd_muon(G.lerp(buffer, MOMENTUM))


def without_momentum(update: SVDUpdate) -> Orthogonalize:
    """The same update as a function of the gradient alone. Its buffer is zero, as in the first step."""
    return lambda G: update(G, torch.zeros_like(G))


def muon_step(
    W: Tensor, G: Tensor, buffer: Tensor, lr: float, momentum: float = MOMENTUM, weight_decay: float = DECAY
) -> None:
    """The exercise's reference: Muon's whole update of a matrix, in place, as in ``torch.optim.Muon``."""
    buffer.lerp_(G, 1 - momentum)
    ahead = G.lerp(buffer, momentum)
    update = zeropower_via_newtonschulz(ahead)
    factor = max(1, W.shape[0] / W.shape[1]) ** 0.5
    W.mul_(1 - lr * weight_decay)
    W.add_(update, alpha=-lr * factor)


def say_stages(run: TrainedGPT) -> str:
    """One matrix after each line of the update: its loudest and quietest direction, and its RMS."""
    lr = 0.02
    W, G = dict(run.model.named_parameters())[EXAMPLE].detach(), run.gradients[EXAMPLE]
    buffer = run.momenta[EXAMPLE].lerp(G, 1 - MOMENTUM)
    ahead = G.lerp(buffer, MOMENTUM)
    update = zeropower_via_newtonschulz(ahead).float()
    factor = max(1, W.shape[0] / W.shape[1]) ** 0.5
    stages = {
        "gradient": G,
        "momentum": buffer,
        "Nesterov": ahead,
        "orthogonalize": update,
        "× size factor × lr": lr * factor * update,
        "weight decay": lr * DECAY * W,
    }
    rows = [f"{'':>18}  {'loudest':>9}  {'quietest':>9}  {'RMS entry':>9}"]
    for stage, matrix in stages.items():
        values, rms = torch.linalg.svdvals(matrix), matrix.square().mean().sqrt()
        rows.append(f"{stage:>18}  {values[0]:>9.2g}  {values[-1]:>9.2g}  {rms:>9.2g}")
    return "\n".join(rows)


def say_size(matrix: Tensor) -> str:
    return " × ".join(map(str, matrix.shape))


@dataclass(frozen=True, slots=True)
class LossDrop:
    """How far the loss falls after one update: as predicted from the gradient, and as measured."""

    promised: float
    measured: float


def loss_drops(run: TrainedGPT, orthogonalize: Orthogonalize) -> dict[str, LossDrop]:
    """How far the loss falls when hidden matrices get each optimizer's updates, scaled to ``LOUDNESS``."""
    names = split_parameters(run.model).hidden_names
    by_name = {name: updates_of(run, name, orthogonalize) for name in names}
    with measure.one_thread():
        return {who: _drop(run, {name: by_name[name][who] for name in names}) for who in by_name[names[0]]}


@torch.no_grad()
def _drop(run: TrainedGPT, updates: Mapping[str, Tensor]) -> LossDrop:
    norms = {name: torch.linalg.matrix_norm(update, 2) for name, update in updates.items()}
    scaled = {name: update * (LOUDNESS / norms[name]) for name, update in updates.items()}
    promised = sum((run.gradients[name] * update).sum().item() for name, update in scaled.items())
    weights = {name: weight.detach() - scaled.get(name, 0) for name, weight in run.model.named_parameters()}
    logits = torch.func.functional_call(run.model, weights, (run.batch.inputs,))
    after = torch.nn.functional.cross_entropy(logits.flatten(0, 1), run.batch.targets.flatten())
    return LossDrop(promised, run.loss - after.item())


@dataclass(frozen=True, slots=True)
class RowChanges:
    """In the embedding's update, how much other bytes' rows change when one byte's gradient is erased.

    ``changes``: by optimizer, the norm of each row's change, divided by the row's norm.
    """

    erased: int
    changes: Mapping[str, Tensor]


def erase_a_byte(run: TrainedGPT) -> RowChanges:
    """Erase the gradient of the byte that was read most often, and compare the updates of all others."""
    counts = torch.bincount(run.batch.inputs.flatten(), minlength=256)
    G, usual = run.gradients[EMBEDDING], run.squares[EMBEDDING].sqrt() + 1e-8
    erased = int(counts.argmax())
    others = counts > 0
    others[erased] = False
    less = G.clone()
    less[erased] = 0.0
    updates = {"SGD": (G, less), "Adam": (G / usual, less / usual), "Muon": (svd_muon(G), svd_muon(less))}
    pairs = {who: (full[others], part[others]) for who, (full, part) in updates.items()}
    changes = {who: (full - part).norm(dim=1) / full.norm(dim=1) for who, (full, part) in pairs.items()}
    return RowChanges(erased, changes)


def say_rows(rows: RowChanges) -> str:
    """How much the updates of other bytes' rows change when one byte's gradient is erased."""
    erased = {10: "newline", 32: "space"}.get(rows.erased, chr(rows.erased))
    others = f"the updates of the batch's other {len(rows.changes['Muon'])} bytes"
    lines = [f"without the gradient of {erased}, the most frequent byte, {others} change by"]
    for who, changes in rows.changes.items():
        lines.append(f"{who:>6}  median {changes.median():>4.0%}, at most {changes.max():>4.0%}")
    return "\n".join(lines)


def say_cost(G: Tensor, times: int = 5) -> str:
    """Seconds of the SVD and of Newton–Schulz, for ``G`` and for a matrix with sides four times as long."""
    lines = [f"{'matrix':>12}  {'U Vᵀ by SVD':>12}  {'Newton–Schulz':>14}"]
    with measure.one_thread():
        for matrix in (G, G.repeat(4, 4) + torch.randn(4 * G.shape[0], 4 * G.shape[1]) * G.std()):
            svd = measure.median_seconds(partial(svd_muon, matrix), times)
            fast = measure.median_seconds(partial(zeropower_via_newtonschulz, matrix), times)
            lines.append(f"{say_size(matrix):>12}  {svd * 1e3:>9.1f} ms  {fast * 1e3:>11.1f} ms")
    return "\n".join(lines)
