"""The core: one step over a plan. Read ``step_bucket`` first: it is the algorithm, top to bottom.

The functions here are generators that yield requests for collectives. A world runs them and answers the
requests. A world may be real processes, all ranks in one process, or one rank without data. One process
without a strategy needs no plan and no world: see ``single_process``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from ..engine.collective import Label, Walk
from ..engine.order import abreast, pipeline
from ..engine.sum_over_grid import sum_over_grid
from ..errors import GradientError
from ..orthogonalizers.workspace import Workspace
from ..plan.grid import Coordinate
from ..plan.strategies import Plan
from .agreement import HASHES, NOTHING_TO_COMPARE, Fingerprint, OwnGradients, Ranks, agree_on_gradients
from .clipping import clip_gradients
from .momentum import MomentumShard, momentum_shards, stored_gradient, update_momentum
from .orthogonalize import orthogonalize
from .parameter_state import ParameterState, local_gradient, place_gradient
from .rank_bucket import RankBucket
from .reduce_gradients import average_others, reduce_gradients
from .write_parameters import publish_parameters, update_parameters


def step_bucket(
    bucket: RankBucket,
    present: Collection[int],
    gradient: Tensor | None = None,  # [stored]: the bucket's elements that this rank stores; gradient dtype
    scale: Tensor | None = None,  # []
) -> Walk:
    """One step of the matrices in a bucket, in seven phases.

    ``present`` are the parameters that have a gradient. If phase 1 has run already, ``gradient`` is its
    result. ``scale`` multiplies gradients that stay in the model. Between the phases, flat buffers contain
    the part of the bucket that this rank stores. An empty route needs no buffer. The plan's routes say which
    collectives run: reduce_scatter and all_gather, or reduces and broadcasts if ranks own whole matrices.
    """
    if gradient is None and bucket.plan.gradient.hops:  # without hops it stays in the model, already averaged
        gradient = yield from reduce_gradients(bucket)  # 1: over dp, to the ranks that store the sums
    inputs = update_momentum(bucket, gradient, present, scale)  # [stored], bf16
    del gradient
    updates = yield from orthogonalize(bucket, inputs)  # 2 to 6: dp, tp; Newton–Schulz; tp, dp
    del inputs
    stepped = update_parameters(bucket, updates, present)  # [stored], the parameters' dtype
    del updates
    yield from publish_parameters(bucket, stepped)  # 7: over dp, to all ranks


@dataclass(eq=False)
class PlanStep:
    """One rank's step over a plan. ``parameters`` are in the order of the plan's parameter indices.

    ``averaged`` has the gradients that ``ready`` has averaged, one flat buffer per bucket. If a bucket has no
    buffer in ``averaged``, its gradients are in the model, and ``walk`` multiplies them by ``scale``.
    ``present`` are the parameters that have a gradient. ``sent_early`` is whether gradients were averaged
    during backward.
    """

    plan: Plan
    at: Coordinate
    parameters: Sequence[ParameterState]
    window: int = 1
    averaged: dict[int, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None
    present: frozenset[int] | None = None
    sent_early: bool = False
    workspace: Workspace = field(default_factory=Workspace)

    @cached_property
    def momentum_shards(self) -> dict[int, MomentumShard]:
        return momentum_shards(self.plan, self.at, self.parameters)

    @cached_property
    def buckets(self) -> tuple[RankBucket, ...]:
        index = {
            shard.entry.matrix.index: momentum.index(shard, self.at)
            for momentum in self.momentum_shards.values()
            for shard in momentum.shards
        }
        given = self.at, self.parameters, index, self.workspace
        return tuple(RankBucket.of(bucket, *given) for bucket in self.plan.buckets)

    def fill_state(self) -> None:
        """Fill each parameter's state with the momentum that this rank stores; see ``MomentumShard.fill``."""
        for shard in self.momentum_shards.values():
            shard.fill(self.at)

    def forget(self) -> None:
        """Drop averaged gradients, because they have been used or have changed."""
        self.averaged.clear()
        self.present, self.scale, self.sent_early = None, None, False

    def averaged_gradient(self, index: int) -> Tensor:
        """Return this rank's part of a bucket's averaged gradients, flat; do not write to the result."""
        if index in self.averaged:
            return self.averaged[index]
        bucket = next(it for it in self.buckets if it.plan.index == index)
        flat = torch.zeros(bucket.model_numel, dtype=bucket.plan.gradient.dtype, device=bucket.device)
        for matrix in bucket.matrices:
            flat[matrix.stored] = stored_gradient(bucket, matrix, None, self.scale)
        return flat

    def agree(self, fingerprint: Fingerprint = NOTHING_TO_COMPARE, rest: Sequence[Tensor] = ()) -> Walk:
        """Compare fingerprints, and find out which parameters have gradients, before anything changes.

        If ``ready`` has found out already which gradients exist, ranks compare only fingerprints. Returns the
        parameters of ``rest`` that have a gradient on any rank. All ranks of the grid must run it.
        """
        own = OwnGradients()
        if self.present is None and fingerprint.error is None:
            for param in rest:
                place_gradient(param)
            try:
                tensors = [local_gradient(it) for it in (*(its.param for its in self.parameters), *rest)]
            except GradientError as error:  # the fingerprint tells the other ranks of the error
                fingerprint = replace(fingerprint, error=error)
            else:
                names = [*self._names, *(f"parameter {i} of the rest" for i in range(len(rest)))]
                limits, remedy = None, None
                if self.averages:
                    limits = [*self._limits, *(torch.finfo(param.dtype).max for param in rest)]
                if self.plan.expects == "averaged":
                    remedy = (
                        f"; strategy {self.plan.strategy!r} expects gradients already averaged over dp: "
                        "give it to all ranks or to none"
                    )
                empty = [not param.numel() for param in (*(it.param for it in self.parameters), *rest)]
                own = OwnGradients(tensors, names, remedy, limits, self._tp_groups, empty, self._torn)
        found = yield from agree_on_gradients(own, self.ranks, fingerprint)
        if self.present is not None:
            return []
        edge = len(self.parameters)
        self.present = frozenset(index for index, there in enumerate(found[:edge]) if there)
        return [param for param, there in zip(rest, found[edge:], strict=True) if there]

    def _tp_groups(self) -> list[tuple[int, ...]]:
        grid = self.plan.grid
        return sorted({grid.at(rank).group("tp") for rank in grid.ranks})

    @cached_property
    def _torn(self) -> float:
        """This rank's ``OwnGradients.torn``: a hash of the tp group. The group's last rank has the negative
        sum of the others' hashes instead, so that a whole group adds up to 0.
        """
        group = self.at.group("tp")
        number = 1 + group[0] * 2_654_435_761 % HASHES
        return float(number if self.at.rank != group[-1] else -number * (len(group) - 1))

    def trust(self) -> None:
        """Assume that all ranks have gradients for the same parameters as this rank."""
        if self.present is None:
            here = (i for i, each in enumerate(self.parameters) if each.param.grad is not None)
            self.present = frozenset(here)

    @cached_property
    def ranks(self) -> Ranks:
        """The ranks of the grid, and how they sum a few numbers."""
        at = self.at
        return Ranks(
            at.rank, at.grid.world_size, self._device, lambda x, phase: sum_over_grid(x, at, Label(phase))
        )

    @cached_property
    def averages(self) -> bool:
        """Whether the step averages gradients over dp."""
        return self.plan.expects == "local" and self.at.size("dp") > 1

    def walk(self) -> Walk:
        """Take one optimizer step. All ranks of the grid must run it."""
        if self.present is None:
            yield from self.agree()
        assert self.present is not None
        present, averaged, scale = self.present, self.averaged, self.scale
        rounds = (
            [step_bucket(each, present, averaged.pop(each.plan.index, None), scale) for each in together]
            for _, together in groupby(self.buckets, lambda bucket: bucket.plan.round)
        )
        yield from pipeline(map(abreast, rounds), self.window)
        for shard in self.momentum_shards.values():
            if shard.flat:
                shard.parameter.state["steps"] += 1
        self.forget()

    def ready(
        self,
        rest: Sequence[Tensor] = (),
        max_norm: float | None = None,
        fingerprint: Fingerprint = NOTHING_TO_COMPARE,
    ) -> Walk:
        """Reduce gradients before ``walk``, and average the gradients of ``rest`` in place.

        If ``max_norm`` is given, all gradients are clipped by their common norm, and the norm is returned.
        All ranks of the grid must run it.
        """
        found = yield from self.agree(fingerprint, rest)
        if not self.sent_early:
            moving = [bucket for bucket in self.buckets if bucket.plan.gradient.hops]
            flat = yield from pipeline(map(reduce_gradients, moving), self.window)
            self.averaged = {bucket.plan.index: it for bucket, it in zip(moving, flat, strict=True)}
        if self.averages:
            yield from average_others(found, self.at)
        if max_norm is None:
            return None
        clipped = clip_gradients(self.buckets, self.averaged, found, max_norm, self._device, self.at)
        norm, self.scale = yield from clipped
        return norm

    @cached_property
    def _names(self) -> list[str]:
        matrices = [entry.matrix for bucket in self.plan.buckets for entry in bucket.entries]
        names = {matrix.param: matrix.name for matrix in reversed(matrices)}
        return [names.get(index, f"parameter {index}") for index in range(len(self.parameters))]

    @cached_property
    def _limits(self) -> list[float]:
        """The largest number that the dtype of each gradient's sum can hold."""
        dtypes = {
            entry.matrix.param: bucket.gradient.dtype
            for bucket in self.plan.buckets
            for entry in bucket.entries
        }
        return [
            torch.finfo(dtypes.get(index, each.param.dtype)).max for index, each in enumerate(self.parameters)
        ]

    @cached_property
    def _device(self) -> torch.device:
        return self.parameters[0].param.device if self.parameters else torch.device("cpu")
