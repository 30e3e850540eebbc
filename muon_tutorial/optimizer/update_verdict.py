"""Judges an update: is it the orthogonalized momentum, and if not, what is it?

This module sees whole parameters before and after a step, and knows no rank. Each matrix's update is compared
with the correct update, and with the updates that known mistakes would make. The distance of A from B is ‖A −
bB‖ / ‖A‖, with the number b for which this is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from ..adjusted_lr_and_decay import adjusted_lr
from ..newton_schulz import DEFAULT_EPS, DEFAULT_STEPS, KELLER_JORDAN
from ..plan.layout import Box
from ..plan.matrix import Index, Parts
from ..step.orthogonalize import newton_schulz_update
from ..step.single_process import matrices_in

FAR = 0.25
"""Updates of two recipes are closer to each other than this, because singular values are 0.7 to 1.2."""

CLOSE = 0.1
"""Within this distance an update counts as correct, and no other explanation is sought."""

SCALES: tuple[Callable[[int, int], float], ...] = (
    lambda rows, columns: math.sqrt(max(1, rows / columns)),  # Keller Jordan
    lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),  # Moonlight
    lambda rows, columns: math.sqrt(rows / columns),  # dion
    lambda rows, columns: 1.0,  # plain optimizers
    lambda rows, columns: math.sqrt(max(rows, columns)),  # Megatron-LM
)
"""Published scales of updates."""

ADAMW = "divided elementwise, as by AdamW, and not orthogonalized"
SGD = "the momentum or the gradient itself, as in SGD: it was not orthogonalized"
NO_STEPS = "the momentum, normalized: Newton–Schulz took no steps"
LOST = "the gradient, orthogonalized: the momentum of earlier steps is lost"
MICRO = "each micro-batch orthogonalized alone, then summed"
STILL = "none: the parameter has not moved"


@dataclass(frozen=True, slots=True, eq=False)
class SeenUpdate:
    """One whole parameter before and after a step, with its group, gradient and momentum.

    ``micro`` holds the gradients of the step's micro-batches, rank by rank. ``shards`` are the boxes that
    ranks hold. ``dropped`` is whether the momentum has changed between the previous step and this one.
    """

    group: Mapping[str, Any]
    parts: Parts
    transposed: bool
    before: Tensor
    after: Tensor
    gradient: Tensor
    momentum_before: Tensor | None = None
    momentum: Tensor | None = None
    second_moment: Tensor | None = None
    micro: Sequence[Sequence[Tensor]] = ()
    shards: Sequence[Box] = ()
    dropped: bool = False

    @property
    def update(self) -> Tensor:
        """The update that was subtracted from the parameter, divided by the learning rate."""
        lr, decay = float(self.group["lr"]), float(self.group.get("weight_decay", 0.0))
        return (self.before.float() * (1 - lr * decay) - self.after.float()) / lr

    @property
    def rounded(self) -> float:
        """How large the rounding of the parameter may be, relative to the update."""
        moved = float((self.before.float() - self.after.float()).norm())
        unit = torch.finfo(self.before.dtype).eps / 4
        return unit * float(self.before.float().norm()) / moved if moved else 0.0

    @property
    def rate(self) -> float:
        """The share of the old momentum in the new momentum."""
        return float(self.group.get("momentum", self.group.get("mu", 0.95)))

    def places(self, parts: Parts) -> list[tuple[EllipsisType | Index, tuple[int, int]]]:
        """Return each matrix's index in the parameter, and its rows and columns."""
        return list(matrices_in(tuple(self.before.shape), parts, self.transposed))

    def scale(self, rule: Callable[[int, int], float], sides: tuple[int, int]) -> float:
        """Return a rule's scale for a matrix. Rules take outputs and inputs, in this order."""
        return rule(*(sides[::-1] if self.transposed else sides))


@dataclass(frozen=True, slots=True)
class UpdateVerdict:
    """An update's size relative to the correct size, its singular values (mean, spread), and its fault.

    ``is_due`` is False if no update could be expected, because the learning rate was zero, or both the
    momentum and the gradient were zero.
    """

    size: float
    values: tuple[float, float]
    wrong: str = ""
    is_due: bool = True


def judge(seen: SeenUpdate) -> UpdateVerdict:
    """Judge the update of a parameter.

    >>> start, gradient = torch.zeros(4, 4), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    >>> judge(SeenUpdate({"lr": 0.1}, None, False, start, start - 0.1 * gradient, gradient)).wrong
    'the momentum or the gradient itself, as in SGD: it was not orthogonalized'
    """
    if not float(seen.group["lr"]):
        return UpdateVerdict(0.0, (0.0, 0.0), is_due=False)
    update, dues = seen.update, [_orthogonalized(seen, it, seen.parts) for it in _inputs(seen)]
    rounding = torch.finfo(seen.before.dtype).eps * seen.before.float().norm() / float(seen.group["lr"])
    if update.norm() <= rounding and not any(due.any() for due in dues):
        return UpdateVerdict(0.0, (0.0, 0.0), is_due=False)
    if not update.any():
        return UpdateVerdict(0.0, (0.0, 0.0), STILL)
    far = [_distance(seen, update, due) for due in dues]
    due, least = dues[far.index(min(far))], min(far)
    size = _size(seen, update, due)
    values, blur = _singular_values(update, seen, seen.parts), 2 * seen.rounded
    wrong = _explain(seen, update, least, blur) if least > CLOSE + blur else ""
    if not wrong and (seen.dropped or abs(_shares(seen)[0]) < 0.05):
        wrong = LOST
    wrong = wrong or _micro_batches(seen)
    if not wrong and abs(size - 1) > 0.05 + blur:
        wrong = f"{size:.2g} times the correct size"
    return UpdateVerdict(size, values, wrong)


def _explain(seen: SeenUpdate, update: Tensor, least: float, blur: float) -> str:
    """Name the mistake that explains an update; empty if no mistake does and the update is nearly correct."""
    nearest, what = 1.0, ""
    for name, other in _others(seen):
        if (distance := _distance(seen, update, other)) < nearest:
            nearest, what = distance, name
        if nearest < CLOSE / 2:
            break
    if nearest < min(least / 2, FAR) + blur:
        return _itself(seen, update) if what == SGD else what
    if least < FAR + blur:
        return ""
    even = float(update.abs().mean() / update.norm() * math.sqrt(update.numel()))
    if even > 0.95:  # Gaussian elements give 0.8; elements of equal size (AdamW's first step) give 1
        return ADAMW
    return f"not the orthogonalized momentum, {least:.0%} away from it"


def _others(seen: SeenUpdate) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each known mistake, and the update that it would make."""
    inputs, matrices = _inputs(seen), len(seen.places(seen.parts))
    yield from ((SGD, it) for it in (*inputs, seen.gradient))
    if seen.second_moment is not None and seen.momentum is not None:
        yield ADAMW, seen.momentum / (seen.second_moment.sqrt() + 1e-12)
    yield LOST, _orthogonalized(seen, seen.gradient, seen.parts)
    for it in inputs:
        if matrices > 1:
            yield f"its {matrices} matrices orthogonalized as one", _orthogonalized(seen, it, None)
        for count, made in _cut(seen, it):
            yield f"each of {count} shards orthogonalized alone", made
    if any(len(its) > 1 for its in seen.micro):
        yield from ((MICRO, _by_micro_batch(seen, rate)) for rate in (seen.rate, 0.0))


def _inputs(seen: SeenUpdate) -> list[Tensor]:
    """Return the correct inputs of Newton–Schulz: momentum with Nesterov or without, or both if unknown.

    The gradient's share of the new momentum is measured, because packages average and clip differently.
    """
    (_, share), momentum = _shares(seen), seen.momentum
    if momentum is None:
        before = torch.zeros_like(seen.gradient) if seen.momentum_before is None else seen.momentum_before
        momentum = seen.rate * before + share * seen.gradient
    ahead, nesterov = share * seen.gradient + seen.rate * momentum, seen.group.get("nesterov")
    return [it for it, said in ((ahead, True), (momentum, False)) if nesterov in (None, said)]


def _shares(seen: SeenUpdate) -> tuple[float, float]:
    """Fit the new momentum by the old one and the gradient (least squares), and return their two shares."""
    if seen.momentum is None:
        return math.nan, 1 - seen.rate
    now, gradient = seen.momentum.flatten().double(), seen.gradient.flatten().double()
    before = None if seen.momentum_before is None else seen.momentum_before.flatten().double()
    if before is None or not before.any() or _angle(before, gradient) > 0.999:
        return math.nan, float(now @ gradient / (gradient @ gradient).clamp(min=1e-300))
    both = torch.stack([before, gradient], 1)
    norms = both.norm(dim=0).clamp(min=1e-300)
    kept, share = (torch.linalg.lstsq(both / norms, now[:, None]).solution[:, 0] / norms).tolist()
    return kept, share


def _micro_batches(seen: SeenUpdate) -> str:
    """Return ``MICRO`` if each micro-batch's part of the gradient was already orthogonal, otherwise ""."""
    added = [it for its in seen.micro for it in its]
    if len(added) == len(seen.micro) or seen.before.ndim != 2 or min(seen.before.shape) < 4:
        return ""
    for parts in (seen.parts, None):
        values = [_singular_values(it, seen, parts) for it in added]
        if all(spread < 0.35 * mean for mean, spread in values):
            return MICRO
    return ""


def _itself(seen: SeenUpdate, update: Tensor) -> str:
    """Name the mistake behind an update that is a multiple of the momentum."""
    if _micro_batches(seen):
        return MICRO
    norms = [(float(update[here].norm()), sides) for here, sides in seen.places(seen.parts)]
    for rule in SCALES:
        if all(abs(norm / seen.scale(rule, sides) - 1) < 0.01 for norm, sides in norms):
            return NO_STEPS
    return SGD


def _size(seen: SeenUpdate, update: Tensor, due: Tensor) -> float:
    """Return an update's size relative to the correct size.

    If there are several matrices, the one with the largest error counts. If the group names no rule, the size
    is measured with a rule that gives about 1, or with the first rule if none does.
    """
    shares = []
    for here, sides in seen.places(seen.parts):
        along = (update[here] * due[here]).sum() / due[here].square().sum().clamp(min=1e-30)
        shares.append((float(along), sides))
    rules = SCALES
    if "adjust_lr_fn" in seen.group:
        rules = (lambda *sides: float(adjusted_lr(1.0, seen.group["adjust_lr_fn"], sides)),)
    sizes = [
        max((share / seen.scale(rule, sides) for share, sides in shares), key=lambda it: abs(it - 1))
        for rule in rules
    ]
    return next((size for size in sizes if abs(size - 1) < 0.05), sizes[0])


def _angle(one: Tensor, other: Tensor) -> float:
    """The cosine of the angle between two tensors."""
    return float((one * other).sum() / (one.norm() * other.norm()).clamp(min=1e-30))


def _distance(seen: SeenUpdate, update: Tensor, other: Tensor) -> float:
    left = total = 0.0
    for here, _ in seen.places(seen.parts):
        whole = float(update[here].norm()) ** 2
        left += whole * (1 - max(0.0, _angle(update[here], other[here])) ** 2)
        total += whole
    return math.sqrt(max(0.0, left) / total) if total else 1.0


def _orthogonalized(seen: SeenUpdate, whole: Tensor, parts: Parts, shards: int = 1, dim: int = 0) -> Tensor:
    """Orthogonalize each matrix of a parameter (or each of its equal shards) alone, as the group says."""
    made = torch.zeros_like(whole)
    for here, sides in seen.places(parts):
        its = whole[here].reshape(sides).chunk(shards, dim)
        made[here] = torch.cat([_newton_schulz(it, seen.group) for it in its], dim).reshape(whole[here].shape)
    return made


def _newton_schulz(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Run Newton–Schulz as the group says, or like ``torch.optim.Muon`` where it says nothing."""
    steps = group.get("ns_steps") or DEFAULT_STEPS
    stock = {"ns_coefficients": KELLER_JORDAN, "eps": DEFAULT_EPS}
    return newton_schulz_update(matrix, matrix.shape, {**stock, **group, "ns_steps": steps}).float()


def _cut(seen: SeenUpdate, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Orthogonalize shards alone: first the ranks' shards, then 2, 4 and 8 equal runs of rows or columns."""
    if len(seen.shards) > 1:
        made = torch.zeros_like(whole)
        for box in seen.shards:
            made[box.slices] = _newton_schulz(whole[box.slices].flatten(0, -2), seen.group).view(box.shape)
        yield len(seen.shards), made
    for count, dim in product((2, 4, 8), (0, 1)):
        if all(sides[dim] % count == 0 for _, sides in seen.places(seen.parts)):
            yield count, _orthogonalized(seen, whole, seen.parts, count, dim)


def _by_micro_batch(seen: SeenUpdate, rate: float) -> Tensor:
    """Sum the micro-batches' updates. Each micro-batch also updates the momentum; with a ``rate`` of 0,
    updates do not use the momentum."""
    made = torch.zeros_like(seen.gradient)
    for added in seen.micro:
        momentum = torch.zeros_like(made) if seen.momentum_before is None else seen.momentum_before.clone()
        for gradient in added:
            momentum.lerp_(gradient, 1 - rate)
            made += _orthogonalized(seen, gradient.lerp(momentum, rate), seen.parts)
    return made


def _singular_values(update: Tensor, seen: SeenUpdate, parts: Parts) -> tuple[float, float]:
    """Return the mean and spread of all singular values, from the sums of their second and fourth powers."""
    second = fourth = count = 0.0
    for here, sides in seen.places(parts):
        matrix = update[here].reshape(sides)
        gram = matrix @ matrix.T if sides[0] < sides[1] else matrix.T @ matrix
        second, fourth = second + float(gram.trace()), fourth + float(gram.norm()) ** 2
        count += min(sides)
    square = second / count
    spread = math.sqrt(max(0.0, fourth / count - square**2))
    return math.sqrt(square), spread / (2 * math.sqrt(square)) if square else 0.0
