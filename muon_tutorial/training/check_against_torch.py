"""The built-in check: compares one step of the job with torch's single-process optimizers.

Before the step, the reduced gradients, the momentum and the parameters are gathered to full size on every
rank. Then ``torch.optim.Muon`` and ``torch.optim.AdamW`` take the same step in a single process, and every
rank compares its parameters with theirs, bit by bit: no strategy may change the numbers. The exception is
``gram``, where a matrix that stays cut is compared with the Gram form in one process, within a stated bound.

The reduced gradients are compared with a bound, too, because a reduction may add the ranks' gradients in any
order. A mean of D numbers always takes D−1 additions and one division. Each of these operations has a
relative rounding error of at most u (2⁻²⁴ in fp32), and no partial sum exceeds Σ|gᵢ|. Hence |mean − exact
mean| ≤ γ·Σ|gᵢ|/D with γ = D·u / (1 − D·u). We add D times the smallest positive number, because rounding
errors of numbers near zero are not relative.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.collective import Label
from ..engine.travel import all_reduce
from ..guard.check_clipping import the_plan_step
from ..guard.guard import params_of
from ..optimizer.audit import Audit, audit, joined
from ..optimizer.muon import Muon
from ..optimizer.muon_with_adamw import MuonWithAdamW
from ..optimizer.update_verdict import STILL
from ..orthogonalizers.gram import DIFFERENCE
from ..plan.bucket import Bucket, matrix_boxes
from ..plan.exchange import BufferSlice
from ..step.parameter_state import local_part, placed_as
from ..worlds.live import LiveWorld, gather_objects
from .records import CheckVerdict


def sum_over(world: LiveWorld, axis: str, tensor: Tensor, label: str = "built-in check") -> Tensor:
    """The sum of the ranks' tensors along ``axis``, with the same bits on all ranks. All must call it."""
    return world.run(all_reduce(tensor, axis, world.at, Label(label)))


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over dp, in float64: of one parameter's gradients (``total``), and of their absolute values."""

    total: Tensor
    magnitude: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Single-process optimizers with copies of everything that the coming step uses.

    ``muon`` and ``adamw`` hold full-size copies, in the order of the job's own optimizer. ``gram`` has an
    optimizer for each matrix that stays cut, by the matrix's index; ``before`` has the matrix's value before
    the step. ``gradient_error`` is in units of its bound. ``seen`` audits the step.
    """

    muon: torch.optim.Optimizer
    adamw: torch.optim.Optimizer
    gram: dict[int, Muon]
    before: dict[int, Tensor]
    gradient_error: float
    seen: Audit

    @classmethod
    def sums(cls, world: LiveWorld, optimizer: MuonWithAdamW) -> list[Sums]:
        """The exact gradient sums. All ranks must call it, before gradients are readied."""
        return [
            Sums(*(_whole(param, sum_over(world, "dp", its)) for its in (grad, grad.abs())))
            for param in params_of(optimizer)
            for grad in [_gradient(param).double()]
        ]

    @classmethod
    def take(cls, world: LiveWorld, optimizer: MuonWithAdamW, sums: list[Sums]) -> Snapshot:
        """Copy everything that the coming step uses. All ranks must call it, after gradients are readied."""
        reduced = _reduced_gradients(world, optimizer.muon)
        others = [_gradient(param) for param in params_of(optimizer.adamw)]
        errors = [
            gradient_error(grad, exact, world.grid.size("dp"))
            for grad, exact in zip([*reduced, *others], sums, strict=True)
        ]
        lone = _lone_muon(world, optimizer.muon, reduced)
        buckets = the_plan_step(optimizer.muon.steps).plan.buckets
        cut = sorted({it.matrix.param for its in buckets for it in its.entries if it.gram is not None})
        before = {index: params_of(lone)[index].detach().clone() for index in cut}
        gram = {index: _gram_form(lone, index) for index in cut}
        adamw = copy.deepcopy(optimizer.adamw)  # parameters and state, but no gradients
        for twin, param in zip(params_of(adamw), params_of(optimizer.adamw), strict=True):
            twin.grad = None if param.grad is None else param.grad.clone()
        return cls(lone, adamw, gram, before, max(errors), audit(optimizer))


def compare(optimizer: MuonWithAdamW, snapshot: Snapshot, step: int) -> CheckVerdict:
    """Step the single-process optimizers and compare. All ranks must call it, after the job's own step."""
    report = snapshot.seen.report()
    snapshot.muon.step()
    snapshot.adamw.step()
    ours = [*_full_parameters(optimizer.muon), *(param.detach() for param in params_of(optimizer.adamw))]
    theirs = [param.detach() for param in (*params_of(snapshot.muon), *params_of(snapshot.adamw))]
    cut = {index: _error_of_cut(ours[index], snapshot, index) for index in snapshot.gram}
    pairs = [pair for index, pair in enumerate(zip(ours, theirs, strict=True)) if index not in snapshot.gram]
    bits = [(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)) for a, b in pairs]
    mine = [
        sum(int((a != b).sum()) for a, b in bits),
        max(float((a - b).abs().max()) for a, b in pairs),
        snapshot.gradient_error,
        max(cut.values(), default=0.0),
    ]
    words = gather_objects(mine)
    differing, largest, error, cut_error = zip(*words, strict=True)
    elements = sum(a.numel() for a in ours)
    worst = sum(differing), max(largest), max(error), max(cut_error)
    # If all bits are equal, torch's matrix did not move either, so this is no fault.
    wrong = {*report.wrong.values()} - ({STILL} if not worst[0] else set())
    return CheckVerdict(step, elements, *worst, report.line, not (wrong or report.miscounted))


def _error_of_cut(ours: Tensor, snapshot: Snapshot, index: int) -> float:
    """How far a cut matrix is from the single-process result in the Gram form, in units of the bound."""
    snapshot.gram[index].step()
    (theirs,) = (param.detach() for param in params_of(snapshot.gram[index]))
    return float((ours - theirs).norm() / (DIFFERENCE * (theirs - snapshot.before[index]).norm()))


def gradient_error(reduced: Tensor, exact: Sums, summands: int) -> float:
    """The largest error of a reduced gradient, in units of its bound (see the module's docstring)."""
    kind = torch.finfo(reduced.dtype)
    u = kind.eps / 2
    gamma = summands * u / (1 - summands * u)
    smallest = summands * kind.smallest_normal * kind.eps
    bound = gamma * exact.magnitude / summands + smallest
    error = (reduced.double() - exact.total / summands).abs()
    return float((error / bound).max())


def _lone_muon(world: LiveWorld, muon: Muon, reduced: list[Tensor]) -> torch.optim.Muon:
    parameters = [nn.Parameter(full.clone()) for full in _full_parameters(muon)]
    remaining = iter(parameters)
    known = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))]).defaults
    groups = [
        {**{key: group[key] for key in known}, "params": [next(remaining) for _ in group["params"]]}
        for group in muon.param_groups
    ]
    lone = torch.optim.Muon(groups)
    for parameter, gradient, momentum in zip(parameters, reduced, _momenta(world, muon), strict=True):
        parameter.grad = gradient.clone()
        lone.state[parameter]["momentum_buffer"] = momentum.clone()
    return lone


def _gram_form(lone: torch.optim.Muon, index: int) -> Muon:
    """A single-process Muon in the Gram form, over copies of one parameter of ``lone`` and of its state."""
    theirs = params_of(lone)[index]
    group = next(group for group in lone.param_groups if any(param is theirs for param in group["params"]))
    param = nn.Parameter(theirs.detach().clone())
    assert theirs.grad is not None
    param.grad = theirs.grad.clone()
    muon = Muon([{**group, "params": [param]}], orthogonalize="gram")
    muon.state[param]["momentum_buffer"] = lone.state[theirs]["momentum_buffer"].clone()
    return muon


def _reduced_gradients(world: LiveWorld, muon: Muon) -> list[Tensor]:
    """The whole gradient of each matrix that the coming step uses."""
    if the_plan_step(muon.steps).plan.expects == "averaged":
        return [_whole(param, _gradient(param)) for param in params_of(muon)]
    averaged = the_plan_step(muon.steps).averaged_gradient
    return _assembled(world, muon, lambda bucket, held: averaged(bucket.index)[slice(*held.interval)])


def _momenta(world: LiveWorld, muon: Muon) -> list[Tensor]:
    params = params_of(muon)

    def kept(bucket: Bucket, held: BufferSlice) -> Tensor:
        return local_part(muon.state[params[held.entry.matrix.param]]["momentum_buffer"]).reshape(-1)

    return _assembled(world, muon, kept)


def _full_parameters(muon: Muon) -> list[Tensor]:
    return [_whole(param, local_part(param.detach())) for param in params_of(muon)]


def _assembled(world: LiveWorld, muon: Muon, kept: Callable[[Bucket, BufferSlice], Tensor]) -> list[Tensor]:
    """Gather the ranks' parts into whole matrices, in the optimizer's order. If a part has copies, the first
    is used."""
    full: dict[int, Tensor] = {}
    for bucket in the_plan_step(muon.steps).plan.buckets:
        for held in bucket.stored_shards(world.at):
            elements, matrix = kept(bucket, held)[: held.numel], held.entry.matrix
            pieces = gather_objects((matrix_boxes(held, world.at), elements.cpu().clone()))
            full[matrix.param] = joined(matrix.sides, reversed(pieces)).to(elements.device)
    return [full[param] for param in sorted(full)]


def _whole(param: Tensor, local: Tensor) -> Tensor:
    """Gather the whole of a tensor that is cut like ``param`` from each rank's ``local`` part."""
    spread = placed_as(local, param)
    return spread.full_tensor() if isinstance(spread, DTensor) else spread


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return local_part(param.grad)
