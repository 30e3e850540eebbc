"""Published figures of bytes, collectives and balance: what the plan alone decides, whatever the hardware."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from ...evidence import formulas
from ...evidence.memory import plan_memory
from ...evidence.predict import predict
from ...plan.grid import Grid
from ...plan.layout import Shard
from ...plan.matrix import Matrix
from ...plan.strategies import Plan, layerwise, owner, replicated, zero1
from ...timing.model_shape import stage_matrices
from ...timing.models import find_model
from ...timing.planner import busiest
from .claim import Claim

ONE_LIST = 10**15  # bytes of gradients that no model has: everything in one bucket
DP = 64
MEGATRON_BUCKET = max(40_000_000, 1_000_000 * DP) * 4  # fp32; Megatron-LM, distributed_data_parallel.py
FLAGS = "gradient flags"


@cache
def moonlight() -> tuple[Matrix, ...]:
    """Moonlight's hidden matrices, experts and all, in one list; parameters and gradients in fp32."""
    dense, experts = stage_matrices(find_model("moonlight-16b-a3b"), dtype=torch.float32)
    return tuple(replace(matrix, index=i) for i, matrix in enumerate([*dense, *experts]))


def _sent(plan: Plan, rank: int) -> Counter[str]:
    """Bytes that a rank sends by phase, the agreement on which gradients exist left out."""
    found = Counter[str]()
    for row in predict(plan, plan.grid.at(rank)).rows():
        if row.phase != FLAGS:
            found[row.phase] += row.ring
    return found


def upper_bound() -> float:
    """Distributed Muon's bytes over ZeRO-1 AdamW's where whole buckets are gathered."""
    dense = [matrix for matrix in moonlight() if "experts" not in matrix.name]
    sent = _sent(zero1(dense, Grid.of(dp=DP), bucket_bytes=ONE_LIST), 0)
    return sum(sent.values()) / (sent["gradient reduce_scatter"] + sent["parameter all_gather"])


def lower_bound() -> float:
    """The same where one list is cut, and only matrices that straddle a cut are gathered; mean over ranks."""
    plan = zero1(moonlight(), Grid.of(dp=DP), gather="boundary", bucket_bytes=ONE_LIST)
    entries = [entry for bucket in plan.buckets for entry in bucket.entries]
    shared = [(len(entry.workers) * entry.size, entry.size) for entry in entries]  # all holders together
    adamw = formulas.zero1_adamw(DP, sum(matrix.numel for matrix in moonlight()), 4, 4)
    return 1 + formulas.boundary_received(shared) / DP / float(adamw)


def straddling(bucket_bytes: int) -> float:
    """What part of the matrices several ranks hold pieces of, so that they must be gathered."""
    plan = zero1(moonlight(), Grid.of(dp=DP), gather="boundary", bucket_bytes=bucket_bytes)
    entries = [entry for bucket in plan.buckets for entry in bucket.entries]
    return sum(len(entry.workers) > 1 for entry in entries) / len(entries)


def requests(plan: Plan) -> int:
    """Collectives of a step, the agreement on which gradients exist left out."""
    return sum(entry.phase != FLAGS for entry in predict(plan, busiest(plan)).entries)


@cache
def megatron_domain() -> tuple[tuple[Matrix, ...], tuple[Matrix, ...]]:
    """19 layers of Qwen3-235B-A22B over 16 ranks, and its experts of one of 8 positions over 2 ranks."""
    dense, experts = stage_matrices(find_model("qwen3-235b-a22b"), tp=16, ep=8, pp=5)
    cut = tuple(replace(matrix, cuts=(("tp", Shard(0)),)) for matrix in experts)
    return tuple(dense), cut


def fewer_collectives() -> float:
    """Collectives of gather-and-repeat over those of one home rank a matrix, both domains in the latter."""
    dense, experts = megatron_domain()
    repeated = requests(replicated(dense, Grid.of(dp=1, tp=16), bucket_bytes=ONE_LIST))
    homes = [(dense, Grid.of(tp=16)), (experts[:48], Grid.of(tp=2))]  # one exchange carries any number
    return repeated / sum(requests(owner(part, grid, bucket_bytes=ONE_LIST)) for part, grid in homes)


def ranks_a_matrix() -> float:
    """Ranks that orthogonalize a matrix: gather and repeat, over one home rank."""
    dense, _ = megatron_domain()
    grid, last = Grid.of(dp=1, tp=16), dense[-1].index
    return len(replicated(dense, grid).workers(last)) / len(owner(dense, grid).workers(last))


def step_moves_nothing() -> float:
    """Bytes that ``layerwise`` moves beside gradients and parameters, over those of gathering everything."""
    own = [_even(i) for i in range(64)]
    gathered = _sent(zero1(own, Grid.of(dp=8)), 0)["dp gather"]
    moved = _sent(layerwise(own, Grid.of(dp=8)), 0)
    beside = sum(size for phase, size in moved.items() if phase.split()[0] not in ("gradient", "parameter"))
    return beside / gathered


def heavy_over_light() -> float:
    """Elements of the fullest rank over those of the emptiest: 30 equal layers on 8 ranks."""
    held = _momentum(layerwise([_even(i) for i in range(30)], Grid.of(dp=8), bucket_bytes=ONE_LIST))
    return max(held) / min(held)


def spread_of_one_layer() -> float:
    """Elements of the fullest rank over those of the emptiest that has any: one layer's latent attention."""
    dense, _ = stage_matrices(find_model("kimi-k2"))
    layer = [matrix for matrix in dense if matrix.name.startswith("layers.1.attention.")]
    own = [replace(matrix, index=i) for i, matrix in enumerate(layer)]
    held = [one for one in _momentum(layerwise(own, Grid.of(dp=8), bucket_bytes=ONE_LIST)) if one]
    return max(held) / min(held)


def slots_over_matrices(bucket: int) -> float:
    """What a buffer takes whose buckets are as long as the fullest rank's part times the ranks, in matrices.

    128 equal expert matrices of 2688 × 1856 on 32 ranks, ``bucket`` of them in a bucket.
    """
    shape, dp = (2688, 1856), 32
    own = [Matrix(i, f"expert {i}", shape) for i in range(128)]
    plan = layerwise(own, Grid.of(dp=dp), bucket_bytes=bucket * math.prod(shape) * 4)
    tallest = [max(Counter(e.workers.start for e in one.entries).values()) for one in plan.buckets]
    return sum(tallest) * dp / len(own)


def state_against_adamw() -> float:
    """Bytes of momentum over those of AdamW's two moments, all in fp32 and cut over dp."""
    dense, _ = stage_matrices(find_model("gpt2"), dtype=torch.float32)
    plan = zero1(dense, Grid.of(dp=2))
    momentum = sum(plan_memory(plan, plan.grid.at(rank)).momentum for rank in range(2))
    return momentum / (2 * 4 * sum(matrix.numel for matrix in dense))


def submatrices(D: int) -> list[Matrix]:
    """What Dion2 orthogonalizes of eight layers of width 5120: a quarter of the rows, sharded D ways.

    The published all_to_alls state the shapes: 640 of 5120 and 2560 of 20480 rows a rank, of two ranks.
    """
    shapes = [(1280, 5120)] * 32 + [(5120, 5120)] * 16
    cuts = (("dp", Shard(0)),) if D > 1 else ()
    return [
        Matrix(i, f"m{i}", shape, cuts, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
        for i, shape in enumerate(shapes)
    ]


def megabytes_to_an_owner(D: int) -> float:
    """What a rank exchanges with each other rank, to owners and back."""
    plan = owner(submatrices(D), Grid.of(dp=D), bucket_bytes=ONE_LIST)
    return sum(_sent(plan, busiest(plan).rank).values()) / (D - 1) / 1e6


def _even(i: int) -> Matrix:
    return Matrix(i, f"layer {i}", (256, 256))


def _momentum(plan: Plan) -> list[int]:
    return [plan_memory(plan, plan.grid.at(rank)).momentum for rank in plan.grid.ranks]


PAPER = ("Liu et al. 2025, section 2.3", "https://arxiv.org/abs/2502.16982")
BUCKETS = ("Megatron-LM, pull request 1428", "https://github.com/NVIDIA/Megatron-LM/pull/1428")
HOMES = ("Megatron-LM, issue 6676", "https://github.com/NVIDIA/Megatron-LM/issues/6676")
PADDING = ("Megatron-LM, pull request 5415", "https://github.com/NVIDIA/Megatron-LM/pull/5415")
OWNED = ("torchtitan, pull request 3719", "https://github.com/pytorch/torchtitan/pull/3719")
PLACEMENTS = (
    "torchtitan, notes on Owned placements",
    "https://github.com/pytorch/torchtitan/blob/85caf32adaf6e6153475c3ecaf47c0970ff79d0e/"
    "torchtitan/experiments/flex_shard/muon_flex_shard_placement_strategies.md",
)
DION = ("Dion, issue 96", "https://github.com/microsoft/dion/issues/96")
LISTED = f"Moonlight, experts and all, on dp={DP}; how many ranks there were was not published."

CLAIMS: Sequence[Claim] = (
    Claim(
        "Moonshot's Distributed Muon over ZeRO-1 AdamW, in bytes: the upper bound",
        1.25, "×", *PAPER, 1.0, "above", "all",
        f"Moonlight's dense matrices on dp={DP}, gradients and parameters in fp32, whole buckets gathered. "
        "With bf16 parameters the same plan gives 4/3, all in bf16 3/2: the bound is one of fp32.",
        upper_bound,
    ),
    Claim(
        "the same, as it usually is in practice",
        1.0, "×", *PAPER, 1.125, "below", "all",
        f"{LISTED} One list of all parameters, cut over dp; only matrices that straddle a cut are gathered.",
        lower_bound, said="close to 1×",
    ),
    Claim(
        "matrices that need the extra gather where each bucket is cut over dp",
        1.0, "%", *BUCKETS, 0.5, "above", "all",
        f"{LISTED} Buckets as Megatron-LM's default makes them: the larger of 40 million elements and a "
        "million a rank.",
        partial(straddling, MEGATRON_BUCKET), said="every one",
    ),
    Claim(
        "the same where one list of all parameters is cut over dp",
        None, "%", *BUCKETS, 0.5, "below", "some", LISTED,
        partial(straddling, ONE_LIST), said="very few",
    ),
    Claim(
        "collectives of a step, gather and repeat over one home rank a matrix",
        76 / 4, "×", *HOMES, 1.0, "above", "all",
        "Published is 76/276 → 4; we read 76 as gather and repeat, and 276 as the sharded iteration that we "
        "have not. The production model was not: ours is chosen for its 76 matrices that tensor parallelism "
        "cuts, 19 layers of Qwen3-235B-A22B, one gather each. With home ranks, one exchange each way for "
        "these and one for the experts. Left out: ours asks once more, which gradients exist.",
        fewer_collectives, said="76 → 4",
    ),
    Claim(
        "ranks that orthogonalize a matrix, gather and repeat over one home rank",
        16.0, "×", *HOMES, 1.0, "above", "all",
        "A domain of tp=2 × 8 weight shards, as published; ours cuts over one axis of 16.",
        ranks_a_matrix, said="16 → 1",
    ),
    Claim(
        "bytes that the optimizer's step itself moves where matrices are owned, over gathering all of them",
        0.0, "×", *OWNED, 1.0, "below", "all",
        "64 equal matrices on 8 ranks, `layerwise` against `zero1` with whole buckets. Gradients reduced to "
        "owners and parameters sent from them are not counted, as there: that is forward and backward.",
        step_moves_nothing,
    ),
    Claim(
        "elements of the fullest rank over the emptiest: 30 equal layers, owned whole, on 8 ranks",
        4 / 3, "×", *PLACEMENTS, 1.0, "above", "all", "One matrix a layer.", heavy_over_light,
        said="33 % more",
    ),
    Claim(
        "elements of the fullest rank over the emptiest: one layer of latent attention, five matrices",
        14.0, "×", *PLACEMENTS, 1.0, "above", "all",
        "Kimi K2's, whose five sizes are the published ones; 8 ranks, of which three own nothing.",
        spread_of_one_layer, said="about 14×",
    ),
    Claim(
        "padding where whole matrices go to ranks: 128 experts, 32 ranks, buckets of 100",
        1.25, "×", *PADDING, 1.0, "above", "all",
        "A bucket counted as the fullest rank's part times the ranks, as there. Ours is not padded: what "
        "shows is that ranks wait, in each bucket, for the fullest.",
        partial(slots_over_matrices, 100), said="+25 %",
    ),
    Claim(
        "the same with all 128 in one bucket",
        1.0, "×", *PADDING, 1.125, "below", "all", "As above.", partial(slots_over_matrices, 128),
        said="0 %",
    ),
    Claim(
        "megabytes that a rank exchanges with each other, both ways: Dion2 at a quarter of the rows, 2 ranks",
        642.0, "MB", *DION, 0.0, "above", "all",
        "The published shapes, of eight layers of width 5120; `owner` over the rows that Dion2 selects.",
        partial(megabytes_to_an_owner, 2),
        why="Theirs pads each rank's 16 matrices to 17.",
    ),
    Claim(
        "the same on 4 ranks, over what 2 exchange",
        164 / 642, "×", *DION, 1.0, "below", "all",
        "As above. The published 164 MB are [9, 320, 5120] and [4, 1280, 5120] in bf16, both ways: what goes "
        "to one of the three other ranks. A rank's whole traffic falls to three quarters, not to one.",
        lambda: megabytes_to_an_owner(4) / megabytes_to_an_owner(2),
    ),
)  # fmt: skip
