"""Audits any optimizer's steps: is it Muon? Which ranks orthogonalized which matrix, and how well?

Hooks on the optimizer copy this rank's parts of some matrices before and after each step. An audit does
nothing else during training. All ranks must call ``report()``: there they put the parts together, judge each
matrix (``update_verdict``) and share the findings.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import UsageError
from ..guard.check_hyperparameters import plain_number
from ..newton_schulz import zeropower_via_newtonschulz
from ..orthogonalizers.iterate import orthogonalize
from ..parameters.describe_matrices import named_params
from ..parameters.dtensor_placements import dtensor_cuts
from ..parameters.mesh_parameters import with_names
from ..plan.bucket import parameter_boxes
from ..plan.layout import Box
from ..plan.matrix import Parts, held_box
from ..step.momentum import MomentumShard
from ..step.parameter_state import group_parts, local_part, placed_alike
from ..step.rank_bucket import AROUND
from ..step.single_process import matrices_in
from ..step.step import PlanStep
from ..worlds.live import LiveWorld, gather_objects, global_rank
from .fused_weights import parts_word
from .muon import Muon
from .muon_with_adamw import MuonWithAdamW
from .split_parameters import split_parameters
from .split_table import SplitVerdict
from .update_verdict import SeenUpdate, UpdateVerdict, judge

ELEMENTS = 1_000_000
"""How many elements to look at: more take over 1 s on slow CPUs. One parameter of each kind is always
seen."""

MOMENTA = ("momentum_buffer", "exp_avg", "momentum", "mu", "m")
"""Keys under which optimizers keep a momentum in a parameter's state."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An audit's finding for one parameter: which ranks orthogonalized it, and how it moved."""

    name: str
    shape: tuple[int, ...]
    parts: str
    ranks: tuple[int, ...] | None
    verdict: UpdateVerdict


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The findings of all ranks.

    ``calls`` counts Newton–Schulz calls of all ranks: ``{(rows, columns): (made, planned)}``. ``calls`` is
    None if they cannot be counted. ``by_rank`` counts the calls of each rank. ``left_out`` counts the
    matrices that were not looked at, or had no update to make.
    """

    findings: tuple[Finding, ...]
    calls: Mapping[tuple[int, int], tuple[int, int]] | None
    by_rank: tuple[int, ...]
    left_out: int

    @property
    def wrong(self) -> dict[str, str]:
        """The faults found, by the name of the parameter."""
        return {it.name: it.verdict.wrong for it in self.findings if it.verdict.wrong}

    @property
    def miscounted(self) -> list[str]:
        """One line for each shape with more or fewer Newton–Schulz calls than planned."""
        counts = (self.calls or {}).items()
        return [
            f"{made} Newton–Schulz calls at {rows} × {columns}, where {planned} are planned"
            for (rows, columns), (made, planned) in counts
            if made != planned
        ]

    @property
    def line(self) -> str:
        seen = f"{len(self.findings)} of {len(self.findings) + self.left_out} parameters"
        if self.wrong:
            name, wrong = next(iter(self.wrong.items()))
            many = f"{len(self.wrong)} of {len(self.findings)}"
            return f"this is not Muon: the update of {name} is {wrong} (wrong in {many} checked parameters)"
        if self.miscounted:
            return f"this is not Muon: {self.miscounted[0]}"
        if not self.findings:
            return (
                "this step shows nothing, because no parameter had an update to make (no gradients, or a "
                "learning rate or gradients of zero): audit another step"
            )
        made = [f"rank {rank}: {calls}" for rank, calls in enumerate(self.by_rank)]
        ranks = f" ({', '.join([*made[:8], *(['…'] if made[8:] else [])])})" if len(made) > 1 else ""
        counted = f"; {sum(self.by_rank)} Newton–Schulz calls, as planned{ranks}" if self.calls else ""
        return f"this is Muon: {seen} moved by their orthogonalized momentum{counted}"

    def __str__(self) -> str:
        head = ("parameter", "shape", "parts", "by ranks", "size", "singular values", "verdict")
        rows = [head, *map(_row, self.findings)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *self.miscounted, self.line])


@dataclass(slots=True, eq=False)
class _Held:
    """This rank's part of a parameter, before and after a step, and the boxes that the part covers."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    momentum_boxes: tuple[Box, ...]
    averages: bool
    group: dict[str, Any]
    parts: Parts
    transposed: bool
    ranks: tuple[int, ...] | None
    tensors: dict[str, Tensor]
    micro: list[Tensor] = field(default_factory=list)
    dropped: bool = False

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors |= {key: local_part(it.detach()).clone() for key, it in tensors.items()}

    @property
    def is_whole(self) -> bool:
        """Whether this rank can judge the parameter on its own."""
        return len(self.boxes) == 1 and self.boxes[0].shape == self.shape and not self.averages

    @property
    def sent(self) -> _Held:
        """What this rank sends: if ``is_whole``, only gradients of micro-batches, else all its tensors."""
        if not self.is_whole:
            return self
        return replace(self, tensors={}, micro=self.micro if len(self.micro) > 1 else [])


def _call(function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


class Audit:
    """Records an optimizer's steps until ``stop`` is called, and keeps only the last step. See ``audit``."""

    def __init__(self, optimizer: Any, model: nn.Module | None) -> None:
        self.optimizer, self.model = _bare(optimizer), model
        self.left_out = self.steps = 0
        self._before: dict[str, _Held] = {}
        self._held: dict[str, _Held] = {}
        self._micro: dict[Tensor, list[Tensor]] = {}
        self._calls: Counter[tuple[int, int]] = Counter()
        self._planned: Counter[tuple[int, int]] | None = None
        self._marks: dict[Tensor, Any] = {}
        hooks = self.optimizer.register_step_pre_hook, self.optimizer.register_step_post_hook
        self._hooks = [hooks[0](self._look), hooks[1](self._look_again)]
        self._follow(self._targets())

    def stop(self) -> None:
        for handle in (*self._hooks, *self._marks.values()):
            handle.remove()
        self._hooks, self._marks = [], {}
        AROUND.set(_call)  # the last step may have failed before its post hook

    def report(self) -> AuditReport:
        """Stop, and report on the last step. All ranks must call it.

        Raises:
            UsageError: no step was seen.
        """
        self.stop()
        sent = {name: held.sent for name, held in self._held.items()}
        everybody = gather_objects((self.steps, sent, self._calls, self._planned))
        if not all(steps for steps, *_ in everybody):
            raise UsageError("no step was audited: call optimizer.step() between audit() and report()")
        names = sorted(set().union(*(its for _, its, *_ in everybody)))
        mine = {}
        for name in names[global_rank() :: len(everybody)]:
            held = [its[name] for _, its, *_ in everybody if name in its]
            own = self._held.get(name)
            mine[name] = _found(name, [own, *held] if own is not None and own.is_whole else held)
        found = {name: it for its in gather_objects(mine) for name, it in its.items()}
        order = dict.fromkeys([*self._held, *names])
        by_rank = tuple(calls.total() for *_, calls, _ in everybody)
        due = tuple(found[name] for name in order if found[name].verdict.is_due)
        left_out = self.left_out + len(order) - len(due)
        return AuditReport(due, _counted(everybody), by_rank, left_out)

    def _look(self, *_: Any) -> None:
        """Before a step: copy parameters, gradients and momenta."""
        targets = self._targets()
        self._follow(targets)
        before, self._before = self._held, {}
        groups = {param: group for group in self.optimizer.param_groups for param in group["params"]}
        steps = muon.plan_steps if (muon := _muon_of(self.optimizer)) else ()
        places = {it.parameter.param: (it, step) for step in steps for it in step.momentum_shards.values()}
        for it in targets:
            if it.param.grad is not None and it.param in groups:
                held = _holding(it, groups[it.param], places.get(it.param))
                held.keep({"before": it.param, "gradient": _gradient(it.param)})
                held.keep(_momentum(self.optimizer, it.param, "momentum_before"))
                held.micro, self._micro[it.param] = self._micro.get(it.param, []), []
                held.dropped = _differs(before.get(it.name), held)
                self._before[it.name] = held
        self._now = Counter[tuple[int, int]](), _planned_calls(self.optimizer)
        AROUND.set(self._count)

    def _count(self, function: Callable[..., Any], *given: Any) -> Any:
        if function in (zeropower_via_newtonschulz, orthogonalize):
            *stack, rows, columns = given[0].shape
            self._now[0][rows, columns] += math.prod(stack)
        return function(*given)

    def _look_again(self, *_: Any) -> None:
        """After a step: copy parameters and momenta."""
        AROUND.set(_call)
        self._calls, self._planned = self._now
        params = {it.name: it.param for it in self._targets()}
        for name, held in self._before.items():
            held.keep({"after": params[name]})
            held.keep(_momentum(self.optimizer, params[name], "momentum", squares=True))
            if "momentum" not in held.tensors and name in self._held:  # the state has no momentum
                held.tensors.setdefault("momentum_before", _followed(self._held[name]))
        self._held, self._before, self.steps = self._before, {}, self.steps + 1

    def _targets(self) -> list[SplitVerdict]:
        """The parameters to look at: the first few of each kind."""
        targets = list(_hidden(self.optimizer, self.model))
        if not targets:
            raise UsageError(
                "no parameter to audit: pass the model, as in audit(optimizer, model), so that "
                "split_parameters(model) can find the matrices that Muon should step"
            )
        kinds: dict[Any, list[SplitVerdict]] = {}
        for it in targets:
            kinds.setdefault((it.param.shape, it.parts), []).append(it)
        chosen, room = set[str](), ELEMENTS
        for turn, its in enumerate(zip_longest(*kinds.values())):
            for it in filter(None, its):
                room -= it.param.numel()
                if room >= 0 or not turn:
                    chosen.add(it.name)
        self.left_out = len(targets) - len(chosen)
        return [it for it in targets if it.name in chosen]

    def _follow(self, targets: Iterable[SplitVerdict]) -> None:
        """Record what each backward adds to the gradients of these parameters."""
        for it in targets:
            if it.param not in self._marks and it.param.requires_grad:
                self._micro[it.param] = []
                self._marks[it.param] = it.param.register_post_accumulate_grad_hook(self._note)

    def _note(self, param: Tensor) -> None:
        assert param.grad is not None
        now, before = local_part(param.grad.detach()).clone(), self._micro[param]
        self._micro[param] = [*before, now - sum(before, torch.zeros_like(now))]


def audit(optimizer: Any, model: nn.Module | None = None) -> Audit:
    """Audit an optimizer's steps: call ``seen = audit(optimizer)``, train, then ``print(seen.report())``.

    Start the audit before the first ``backward()`` that it should record. An audit needs two steps to find
    that momentum is missing from the state, or is lost between steps.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or the wrapper that Accelerate or Fabric has made for it.
        model: the model in which ``split_parameters`` finds the hidden matrices. You may leave it out if the
            optimizer is from this package, or its groups have the keys ``use_muon`` or ``ns_steps``.

    >>> weight = nn.Parameter(torch.eye(4))
    >>> optimizer = Muon([("weight", weight)])
    >>> seen = audit(optimizer)
    >>> weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    >>> optimizer.step()
    >>> seen.report().wrong
    {}
    """
    return Audit(optimizer, model)


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers of Accelerate or Fabric."""
    while not isinstance(optimizer, MuonWithAdamW | Muon) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"audit takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return optimizer


def _hidden(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> Iterator[SplitVerdict]:
    """Yield the parameters that Muon should step, according to ``MuonWithAdamW``, the model or the groups."""
    if isinstance(optimizer, MuonWithAdamW) and optimizer.verdicts:
        verdicts = tuple(optimizer.verdicts_now())
    elif model is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdicts = split_parameters(model).verdicts
    else:
        for number, group in enumerate(optimizer.param_groups):
            if group.get("use_muon", "ns_steps" in group):
                for name, param in named_params(group, number):
                    yield SplitVerdict(name, cast(nn.Parameter, param), "Muon", "", *group_parts(group))
        return
    yield from (it for it in verdicts if it.who == "Muon")


def _muon_of(optimizer: torch.optim.Optimizer) -> Muon | None:
    muon = optimizer.muon if isinstance(optimizer, MuonWithAdamW) else optimizer
    return muon if isinstance(muon, Muon) else None


def _holding(
    it: SplitVerdict, group: Mapping[str, Any], place: tuple[MomentumShard, PlanStep] | None
) -> _Held:
    """Find where this rank's parts lie in a parameter and in its momentum."""
    said = {key: plain_number(value) for key, value in group.items() if not key.startswith("param")}
    if place is None:
        shape = tuple(it.param.shape)
        own = (Box((0,) * len(shape), shape),)
        if isinstance(it.param, DTensor):
            at = LiveWorld(with_names(it.param.device_mesh)).at
            own = (held_box(shape, dtensor_cuts(it.name, it.param, at.grid.axes), at),)
        return _Held(shape, own, own, False, said, it.parts, it.transposed, None, {})
    shard, step = place
    matrix = shard.shards[0].entry.matrix
    shape = matrix.shape if matrix.part is None else matrix.part.shape
    own = (held_box(shape, matrix.cuts, step.at),)
    momentum = (
        tuple(box for its in shard.shards for box in parameter_boxes(its, step.at)) if shard.flat else own
    )
    ranks = sorted({rank for its in shard.shards for rank in step.plan.workers(its.entry.matrix.index)})
    return _Held(shape, own, momentum, step.averages, said, it.parts, it.transposed, tuple(ranks), {})


def _gradient(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and not placed_alike(grad, param):
        return grad.redistribute(placements=param.placements)
    return grad.as_subclass(Tensor) if not isinstance(grad, DTensor) else grad


def _momentum(
    optimizer: torch.optim.Optimizer, param: Tensor, key: str, squares: bool = False
) -> dict[str, Tensor]:
    """Return ``{key: momentum}`` from a parameter's state. ``squares`` adds AdamW's second moment."""
    entry = optimizer.state.get(param) or {}
    found = next((entry[name] for name in MOMENTA if isinstance(entry.get(name), Tensor)), None)
    second = {"second_moment": entry["exp_avg_sq"]} if squares and "exp_avg_sq" in entry else {}
    return {} if found is None else {key: found, **second}


def _followed(before: _Held) -> Tensor:
    """Compute the momentum from the gradients seen so far, because the optimizer's state does not hold it."""
    rate, gradient = before.group.get("momentum", 0.95) or 0.95, before.tensors["gradient"]
    return rate * before.tensors.get("momentum_before", torch.zeros_like(gradient)) + (1 - rate) * gradient


def _differs(before: _Held | None, now: _Held) -> bool:
    """Whether the momentum has changed since the previous step ended."""
    if before is None or "momentum" not in before.tensors:
        return False
    left, found = before.tensors["momentum"], now.tensors.get("momentum_before")
    return found is None or (left.shape == found.shape and not torch.equal(left, found))


def _planned_calls(optimizer: torch.optim.Optimizer) -> Counter[tuple[int, int]] | None:
    """Return how many matrices this rank should orthogonalize, by rows and columns; None if unknown."""
    muon = _muon_of(optimizer)
    if muon is None or not (muon.guard.steps.alone or muon.plans):  # a user's own functions have no plan
        return None
    if not muon.plan_steps:
        return Counter(
            sides
            for group in muon.param_groups
            for param in group["params"]
            if param.grad is not None
            for _, sides in matrices_in(tuple(param.shape), *group_parts(group))
        )
    pairs = [(step, bucket) for step in muon.plan_steps for bucket in step.plan.buckets]
    return Counter(
        it.matrix.sides
        for step, bucket in pairs
        for it in bucket.entries
        if it.gram is None and bucket.works_on(it, step.at)
    )


def _counted(everybody: Sequence[tuple[Any, ...]]) -> dict[tuple[int, int], tuple[int, int]] | None:
    if any(planned is None for *_, planned in everybody):
        return None
    made = sum((calls for *_, calls, _ in everybody), Counter[tuple[int, int]]())
    planned = sum((its for *_, its in everybody), Counter[tuple[int, int]]())
    return {sides: (made[sides], planned[sides]) for sides in sorted({*made, *planned})}


def _found(name: str, held: Sequence[_Held]) -> Finding:
    """Judge one parameter from all ranks' parts. If this rank has the whole parameter, its part is first."""
    first = held[0]
    by_box: dict[tuple[Box, ...], list[_Held]] = {}
    for it in held[first.is_whole :]:
        by_box.setdefault(it.boxes, []).append(it)
    copies = [copy for copy in zip(*by_box.values(), strict=False) if all(it.micro for it in copy)]
    micro = [
        [joined(first.shape, [(it.boxes, it.micro[i]) for it in copy]) for i in range(len(copy[0].micro))]
        for copy in copies
    ]
    whole: dict[str, Any] = {key: _whole(key, held[:1] if first.is_whole else held) for key in first.tensors}
    seen = SeenUpdate(
        *(first.group, first.parts, first.transposed),
        **whole,
        micro=micro,
        shards=[box for boxes in by_box for box in boxes if box.numel],
        dropped=any(it.dropped for it in held),
    )
    return Finding(name, first.shape, parts_word(first.parts) or "one", first.ranks, judge(seen))


def _whole(key: str, held: Sequence[_Held]) -> Tensor:
    """Put one tensor together from all ranks' parts. Average the gradients if the step averages them."""
    momentum = key.startswith(("momentum", "second"))
    pieces = [(it.momentum_boxes if momentum else it.boxes, it.tensors[key]) for it in held]
    return joined(held[0].shape, pieces, mean=key == "gradient" and held[0].averages)


def joined(
    shape: tuple[int, ...], pieces: Iterable[tuple[Sequence[Box], Tensor]], mean: bool = False
) -> Tensor:
    """Put a whole fp32 tensor together on the CPU. Where pieces overlap, take the last piece or the mean."""
    whole, counts = None, torch.zeros(shape)
    for boxes, tensor in pieces:
        whole = torch.zeros(shape, dtype=tensor.dtype) if whole is None else whole
        runs = tensor.cpu().flatten().split([box.numel for box in boxes]) if boxes else ()
        for box, run in zip(boxes, runs, strict=True):
            if mean:
                whole[box.slices] += run.view(box.shape)
            elif box.numel:
                whole[box.slices] = run.view(box.shape)
            counts[box.slices] += 1
    assert whole is not None
    return (whole / counts.clamp(min=1) if mean else whole).float()


def _row(it: Finding) -> tuple[str, ...]:
    mean, spread = it.verdict.values
    ranks = "" if it.ranks is None else ", ".join(map(str, it.ranks[:4])) + ", …" * (len(it.ranks) > 4)
    shape = " × ".join(map(str, it.shape))
    values = f"{mean:.2f} ± {spread:.2f}"
    return it.name, shape, it.parts, ranks, f"{it.verdict.size:.2f}", values, it.verdict.wrong or "fine"
