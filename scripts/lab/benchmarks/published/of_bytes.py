"""Published figures of bytes, collectives and balance, which follow from the plan on any hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, groupby

import torch

from muon_tutorial import Grid, Matrix, Shard
from muon_tutorial.evidence import formulas
from muon_tutorial.evidence.predict import predict
from muon_tutorial.plan.strategies import Builder, Plan, layerwise, owner, replicated, zero1
from muon_tutorial.timing.model_shape import stage_matrices
from muon_tutorial.timing.models import find_model

ONE_LIST = 10**15  # more bytes than any model has
DP = 64
FLAGS = "gradient flags"
BOUNDARY: Builder = partial(zero1, gather="boundary")


@cache
def moonlight() -> tuple[Matrix, ...]:
    """Moonlight's hidden matrices, including experts, in one list; parameters and gradients in fp32."""
    dense, experts = stage_matrices(find_model("moonlight-16b-a3b"), dtype=torch.float32)
    return tuple(_counted([*dense, *experts]))


def in_one(builder: Builder, matrices: Sequence[Matrix], grid: Grid) -> Plan:
    """A plan that sends all matrices in one round, as the published methods do. Our default is several
    rounds."""
    return builder(matrices, grid, round_bytes=ONE_LIST)


def _sent(plan: Plan, rank: int) -> Counter[str]:
    """Bytes that a rank sends by phase, without the agreement on which gradients exist."""
    found = Counter[str]()
    for row in predict(plan, plan.grid.at(rank)).rows():
        if row.phase != FLAGS:
            found[row.phase] += row.ring
    return found


def upper_bound() -> float:
    """Bytes of Distributed Muon that gathers whole buckets, divided by those of ZeRO-1 AdamW."""
    dense = [matrix for matrix in moonlight() if "experts" not in matrix.name]
    sent = _sent(in_one(zero1, dense, Grid.of(dp=DP)), 0)
    return sum(sent.values()) / (sent["gradient reduce_scatter"] + sent["parameter all_gather"])


def lower_bound() -> float:
    """Like ``upper_bound``, with experts; only matrices on several ranks are gathered. The ranks' mean."""
    plan = in_one(BOUNDARY, moonlight(), Grid.of(dp=DP))
    entries = [entry for bucket in plan.buckets for entry in bucket.entries]
    shared = [(len(entry.workers) * entry.size, entry.size) for entry in entries]  # summed over holders
    adamw = formulas.zero1_adamw(DP, sum(matrix.numel for matrix in moonlight()), 4, 4)
    return 1 + formulas.boundary_received(shared) / DP / float(adamw)


def straddling(bucket: int = ONE_LIST) -> float:
    """The fraction of the matrices that must be gathered, because they lie on several ranks.

    ``bucket``: bytes of gradients in a bucket, which dp cuts into slices. Megatron-LM's default is
    ``max(40_000_000, 1_000_000 * DP)`` elements, here in fp32 (its ``distributed_data_parallel.py``).
    """
    ends = accumulate(4 * matrix.numel for matrix in moonlight())
    cut = groupby(zip(ends, moonlight(), strict=True), lambda pair: (pair[0] - 1) // bucket)
    parts = [_counted([matrix for _, matrix in pairs]) for _, pairs in cut]
    plans = (in_one(BOUNDARY, part, Grid.of(dp=DP)) for part in parts)
    entries = [entry for plan in plans for one in plan.buckets for entry in one.entries]
    return sum(len(entry.workers) > 1 for entry in entries) / len(entries)


def _counted(part: Sequence[Matrix]) -> list[Matrix]:
    return [replace(matrix, index=i) for i, matrix in enumerate(part)]


def requests(plan: Plan) -> int:
    """Collectives of a step, without the agreement on which gradients exist."""
    return sum(entry.phase != FLAGS for entry in predict(plan, plan.grid.at(0)).entries)


@cache
def megatron_domain() -> tuple[tuple[Matrix, ...], tuple[Matrix, ...]]:
    """Qwen3-235B-A22B, 19 layers: the dense matrices for 16 ranks, an eighth of the experts for 2 ranks."""
    dense, experts = stage_matrices(find_model("qwen3-235b-a22b"), tp=16, ep=8, pp=5)
    cut = tuple(replace(matrix, cuts=(("tp", Shard(0)),)) for matrix in experts)
    return tuple(dense), cut


def fewer_collectives() -> float:
    """The number of collectives if all ranks gather all matrices, divided by the number that two plans
    with owners make together."""
    dense, experts = megatron_domain()
    repeated = requests(in_one(replicated, dense, Grid.of(dp=1, tp=16)))
    homes = [(dense, Grid.of(tp=16)), (experts[:48], Grid.of(tp=2))]  # any number takes one exchange
    return repeated / sum(requests(in_one(owner, part, grid)) for part, grid in homes)


def step_moves_nothing() -> float:
    """Bytes that ``layerwise`` sends besides gradients and parameters, divided by the bytes of gathering
    every matrix."""
    own = [Matrix(i, f"layer {i}", (256, 256)) for i in range(64)]
    gathered = _sent(zero1(own, Grid.of(dp=8)), 0)["dp gather"]
    moved = _sent(layerwise(own, Grid.of(dp=8)), 0)
    beside = sum(size for phase, size in moved.items() if phase.split()[0] not in ("gradient", "parameter"))
    return beside / gathered


def submatrices(D: int) -> list[Matrix]:
    """Rows that Dion2 orthogonalizes in eight layers of width 5120: a quarter of each matrix, in D shards.

    The shapes follow from the published all_to_alls: each of two ranks sends 640 rows of a matrix with 5120
    rows, and 2560 rows of one with 20480.
    """
    shapes = [(1280, 5120)] * 32 + [(5120, 5120)] * 16
    cuts = (("dp", Shard(0)),) if D > 1 else ()
    return [
        Matrix(i, f"m{i}", shape, cuts, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
        for i, shape in enumerate(shapes)
    ]


def megabytes_to_an_owner(D: int) -> float:
    """MB that a rank sends to each other rank, to owners and back."""
    plan = in_one(owner, submatrices(D), Grid.of(dp=D))
    return sum(_sent(plan, 0).values()) / (D - 1) / 1e6


def saved_by_state(momentum: int) -> float:
    """GiB that a rank saves, compared with AdamW's 8 bytes per element (8 ranks, Qwen2.5-3B, ZeRO)."""
    hidden = 36 * (2 * 2048 * 2048 + 2 * 256 * 2048 + 3 * 11008 * 2048)  # q and o, k and v, the MLP
    return (8 - momentum) * hidden / 8 / 2**30
