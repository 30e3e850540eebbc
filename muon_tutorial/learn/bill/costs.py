"""Lesson 10: a rank's bytes on rings in a step of Muon or AdamW, without the phase ``gradient flags``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch

from ... import Coordinate, Grid, Matrix, Plan, Shard, owner, replicated, round_robin, zero1
from ...evidence.formulas import ddp_adamw, rho
from ...evidence.ledger import Ledger
from ...evidence.memory import plan_memory
from ...evidence.predict import predict
from ...plan.strategies import Builder
from ..the_mirror.on_ranks import MATRICES, small_matrices

FLAGS = "gradient flags"
AVERAGE = "gradient all_reduce"
STRATEGIES: Mapping[str, Builder] = {
    "replicated": replicated,
    "round_robin": partial(round_robin, order="index"),
    "zero1": zero1,
    "owner": owner,
}
"""The strategies of the lesson, by name."""
Gather = Literal["all", "boundary"]
BOUNDARY = "zero1, boundary"
BUILDERS: Mapping[str, Builder] = {**STRATEGIES, BOUNDARY: partial(zero1, gather="boundary")}
"""``STRATEGIES``, and a ``zero1`` that gathers only matrices which a slice boundary cuts."""
LAYERS, WIDTH = 4, 768
DTYPES = {
    "all fp32": (torch.float32, torch.float32),
    "weights bf16": (torch.bfloat16, torch.float32),
    "all bf16": (torch.bfloat16, torch.bfloat16),
}
"""Dtypes of weights and gradients, by their names in the widget."""


@dataclass(frozen=True, slots=True)
class StepBill:
    """What a step costs one rank: bytes sent by phase, and bytes of optimizer state kept between steps."""

    name: str
    sent: Mapping[str, int]
    state: int

    @property
    def total(self) -> int:
        return sum(self.sent.values())


def gpt_matrices(
    layers: int = LAYERS, width: int = WIDTH, dtypes: tuple[torch.dtype, torch.dtype] = DTYPES["all fp32"]
) -> list[Matrix]:
    """The hidden matrices of a GPT: qkv, o, up and down of every layer, cut by tp as they usually are."""
    kinds = {"qkv": (3, 1, 0), "o": (1, 1, 1), "up": (4, 1, 0), "down": (1, 4, 1)}
    found: list[Matrix] = []
    for layer in range(layers):
        for kind, (rows, columns, dim) in kinds.items():
            shape, cut = (rows * width, columns * width), (("tp", Shard(dim)),)
            name = f"{layer}.{kind}"
            found.append(Matrix(len(found), name, shape, cut, dtype=dtypes[0], grad_dtype=dtypes[1]))
    return found


def plans_of(dp: int, tp: int) -> dict[str, Plan]:
    return {name: build(small_matrices(), Grid.of(dp=dp, tp=tp)) for name, build in BUILDERS.items()}


def entries_of_rank(plan: Plan) -> int:
    """Entries of all buckets at one tp position, padding included."""
    return sum(bucket.length(bucket.model_layout, plan.grid.at(0)) for bucket in plan.buckets)


def touched_entries(plan: Plan, at: Coordinate) -> int:
    """The number of entries that a rank holds in the matrices that it orthogonalizes."""
    touched = (each for bucket in plan.buckets for each in bucket.entries if bucket.works_on(each, at))
    return sum(each.matrix.box(at).numel for each in touched)


def rows_of(ledger: Ledger, rank: int) -> dict[str, int]:
    """Bytes that a rank sent according to the ledger, by phase; phases without bytes are left out."""
    return {row.phase: row.ring for row in ledger.rows(rank) if row.ring and row.phase != FLAGS}


def bill_of(name: str, plan: Plan, rank: int = 0) -> StepBill:
    """The bill of a plan's step, with the all_reduce of gradients if the plan expects averaged gradients."""
    at = plan.grid.at(rank)
    sent = rows_of(predict(plan, at), rank)
    before = int(ddp_adamw(at.size("dp"), entries_of_rank(plan), _item(plan, "gradient")))
    if plan.expects == "averaged" and before:
        sent = {AVERAGE: before, **sent}
    return StepBill(name, sent, plan_memory(plan, at).momentum)


def adamw_bill(plan: Plan) -> StepBill:
    """The bill of ZeRO-1 AdamW over the buckets of a ``zero1`` plan; its state is two moments per entry."""
    at = plan.grid.at(0)
    each = rho(at.size("dp")) * entries_of_rank(plan)
    travels = {"gradient reduce_scatter": "gradient", "parameter all_gather": "parameter"}
    sent = {phase: int(each * _item(plan, route)) for phase, route in travels.items()}
    return StepBill("AdamW, ZeRO-1", sent, 2 * plan_memory(plan, at).momentum)


def _item(plan: Plan, route: str) -> int:
    return int(getattr(plan.buckets[0], route).dtype.itemsize)


def runs_of(plans: Mapping[str, Plan], name: str) -> dict[str, int]:
    """The number of ranks that run Newton–Schulz on a matrix, by strategy."""
    return {strategy: len(plans[strategy].workers(list(MATRICES).index(name))) for strategy in STRATEGIES}


@cache
def bills_at(dp: int, tp: int, dtype: str, gather: Gather, size: int) -> tuple[StepBill, StepBill, float]:
    """AdamW's bill, Muon's bill, and how many ranks work on a matrix on average; a bucket has ``size`` MB."""
    matrices, grid = gpt_matrices(dtypes=DTYPES[dtype]), Grid.of(dp=dp, tp=tp)
    plan = zero1(matrices, grid, gather=gather, round_bytes=size * 1_000_000)
    entries = [entry for bucket in plan.buckets for entry in bucket.entries]
    runs = sum(len(entry.workers) for entry in entries) * tp / len(entries)
    return adamw_bill(plan), bill_of("Muon, zero1", plan), runs


def holders(matrix: tuple[int, int], length: int) -> range:
    """The dp positions that hold a part of a matrix, if each keeps a slice of ``length`` entries."""
    return range(matrix[0] // length, (matrix[1] - 1) // length + 1)
