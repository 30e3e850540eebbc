"""Lesson 13 on ranks: counts the bytes of an AdamW step that the reader writes, and of Muon's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import Coordinate, Grid, Ledger, LiveWorld, LocalWorld, Matrix, Plan, build_mesh, owner, zero1
from ...engine.collective import Label, Walk
from ...engine.travel import all_reduce, travel
from ...evidence.ledger import LedgerEntry
from ...plan.bucket import Bucket
from ...plan.strategies import Builder, layerwise
from ..bill.costs import FLAGS
from ..the_mirror.on_ranks import count_step, local_gradients, small_matrices, weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STRATEGIES: Mapping[str, Builder] = {"zero1": zero1, "layerwise": layerwise, "owner": owner}
ADAMW, AVERAGED = "AdamW, yours", "owner + average"
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01

StepOfAdamW = Callable[[Tensor, Tensor, Bucket, Coordinate], Any]


def adamw(weights: Tensor, mean: Tensor) -> Tensor:
    """New weights after AdamW's first step, from the mean gradient; elementwise, so slices suffice."""
    moment, square = (1 - BETAS[0]) * mean, (1 - BETAS[1]) * mean**2
    update = (moment / (1 - BETAS[0])) / ((square / (1 - BETAS[1])).sqrt() + EPS)
    return weights * (1 - LR * DECAY) - LR * update


def adamw_step(gradients: Tensor, weights: Tensor, bucket: Bucket, at: Coordinate) -> Walk:
    """The exercise's reference: ZeRO-1 AdamW's step over a bucket; returns all weights of the bucket."""
    summed = yield from travel(gradients, bucket.gradient, at, Label("gradients"))
    fresh = adamw(weights, summed / bucket.summands)
    return (yield from travel(fresh, bucket.parameter, at, Label("weights")))


def matrices_of(dtype: torch.dtype) -> list[Matrix]:
    """The three matrices of lesson 09, weights and gradients of one dtype."""
    return [replace(matrix, dtype=dtype, grad_dtype=dtype) for matrix in small_matrices()]


def plan_of(dp: int, tp: int, dtype: torch.dtype = torch.float32) -> Plan:
    return zero1(matrices_of(dtype), Grid.of(dp=dp, tp=tp))


def pieces(at: Coordinate, dtype: torch.dtype, seed: int) -> list[tuple[str, torch.nn.Parameter]]:
    """One rank's tp pieces of the matrices, each with the gradient of the rank's own text."""
    found = []
    for matrix in matrices_of(dtype):
        cut = matrix.box(at).slices
        parameter = torch.nn.Parameter(weights(seed)[matrix.name][cut].to(dtype))
        parameter.grad = local_gradients(seed, at["dp"])[matrix.name][cut].to(dtype)
        found.append((matrix.name, parameter))
    return found


def buffers(at: Coordinate, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Bucket]:
    """AdamW's inputs: the rank's own gradients, as a flat tensor; its slice of the weights; the bucket."""
    [bucket] = plan_of(at.size("dp"), at.size("tp"), dtype).buckets
    length = bucket.length(bucket.model_layout, at)
    grads, params = torch.zeros(2, length, dtype=dtype)
    for entry, (_, parameter) in zip(bucket.entries, pieces(at, dtype, seed), strict=True):
        assert parameter.grad is not None
        place = slice(entry.offset, entry.offset + entry.size)
        grads[place], params[place] = parameter.grad.flatten(), parameter.detach().flatten()
    mine = length // at.size("dp")
    return grads, params[at["dp"] * mine : (at["dp"] + 1) * mine].clone(), bucket


def walk_adamw(step: StepOfAdamW, at: Coordinate, dtype: torch.dtype, seed: int) -> Walk:
    """A step as a generator of requests; returns ``...`` if it is still a stub."""
    asked = step(*buffers(at, dtype, seed), at)
    return (yield from asked) if hasattr(asked, "send") else asked


def step_to_profile(dp: int, tp: int, seed: int, step: StepOfAdamW) -> Callable[[], Any]:
    """A function that takes one AdamW step on this rank. All ranks must call this, and then the result."""
    world = LiveWorld(build_mesh({"dp": dp, "tp": tp}))
    return lambda: world.run(walk_adamw(step, world.at, torch.float32, seed))


def step_in_one_process(step: StepOfAdamW, dp: int, tp: int, seed: int) -> tuple[list[Any], Ledger]:
    """AdamW's step on all ranks in this process: what each rank returns, and the ledger of all ranks."""
    world, ledger = LocalWorld(Grid.of(dp=dp, tp=tp)), Ledger()
    world.observers.append(ledger)
    walks = [walk_adamw(step, world.grid.at(rank), torch.float32, seed) for rank in world.grid.ranks]
    return world.run(walks), ledger


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Bytes that one rank sent along dp in a step: counted as on a ring, and as Gloo sends them."""

    ring: int
    gloo: int


Counted = Mapping[str, Mapping[str, SentBytes]]
"""What one rank sent, by dtype and by optimizer."""


def sent_along_dp(entries: Sequence[LedgerEntry]) -> SentBytes:
    """The sum of a ledger's entries, without gradient flags and without what is sent only along tp."""
    along = [entry for entry in entries if entry.phase != FLAGS and entry.axis != "tp"]
    return SentBytes(sum(entry.ring for entry in along), sum(entry.gloo for entry in along))


def count(rank: int, dp: int, tp: int, seed: int, step: StepOfAdamW) -> dict[str, dict[str, SentBytes]]:
    """Bytes sent in a step of AdamW and of each strategy of Muon, in both dtypes. All ranks must call."""
    world = LiveWorld(build_mesh({"dp": dp, "tp": tp}))
    return {name: _count(world, step, dtype, seed) for name, dtype in DTYPES.items()}


def _count(world: LiveWorld, step: StepOfAdamW, dtype: torch.dtype, seed: int) -> dict[str, SentBytes]:
    found = {ADAMW: _count_walk(world, walk_adamw(step, world.at, dtype, seed))}
    for name, build in STRATEGIES.items():
        _, ledger = count_step(world, pieces(world.at, dtype, seed), build)
        found[name] = sent_along_dp(ledger.entries)
    ddp = all_reduce(buffers(world.at, dtype, seed)[0], "dp", world.at, Label("gradients"))
    average, muon = _count_walk(world, ddp), found["owner"]
    return {**found, AVERAGED: SentBytes(muon.ring + average.ring, muon.gloo + average.gloo)}


def _count_walk(world: LiveWorld, walk: Walk) -> SentBytes:
    ledger = Ledger()
    world.observers.append(ledger)
    world.run(walk)
    world.observers.remove(ledger)
    return sent_along_dp(ledger.entries)


def mean_of_group(counted: Sequence[Counted], tp: int) -> dict[str, dict[str, SentBytes]]:
    """The bytes that a rank of the first dp group sent on average."""
    group = counted[::tp]

    def mean(dtype: str, name: str) -> SentBytes:
        sent = (astuple(each[dtype][name]) for each in group)
        return SentBytes(*(sum(each) // len(group) for each in zip(*sent, strict=True)))

    return {dtype: {name: mean(dtype, name) for name in names} for dtype, names in group[0].items()}


def say_counted(counted: Sequence[Counted], tp: int) -> str:
    lines = [f"{'':6}{'':16}{'ring':>12}{'':10}{'Gloo':>12}   bytes that one rank sends along dp"]
    for dtype, found in mean_of_group(counted, tp).items():
        base = found[ADAMW]
        for name, sent in found.items():
            ring, gloo = sent.ring / max(1, base.ring), sent.gloo / max(1, base.gloo)
            lines.append(f"{dtype:6}{name:16}{sent.ring:12,} {ring:5.2f} ×  {sent.gloo:12,} {gloo:5.2f} ×")
    return "\n".join(lines)
