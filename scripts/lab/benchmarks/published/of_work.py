"""Published figures of Newton–Schulz's work: operations against a training step's, and seconds on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial

import torch

from muon_tutorial.newton_schulz import DEFAULT_STEPS
from muon_tutorial.plan.assign import newton_schulz_cost
from muon_tutorial.plan.grid import Grid
from muon_tutorial.plan.strategies import owner
from muon_tutorial.timing.commands import find_machine
from muon_tutorial.timing.model_shape import ModelShape
from muon_tutorial.timing.models import find_model
from muon_tutorial.timing.timed_world import TimedRun
from muon_tutorial.timing.timeline_cases import walk_ranks
from muon_tutorial.timing.work import Work

from .claim import Claim, counted, seconds, shown
from .of_bytes import DION, in_one, submatrices
from .of_updates import quintic


def operations(shape: ModelShape) -> int:
    """Newton–Schulz's operations for all matrices of a model, each orthogonalized once."""
    return DEFAULT_STEPS * sum(newton_schulz_cost(family.shape) * family.count for family in shape.families)


def overhead(model: str, tokens: int) -> float:
    """Newton–Schulz's operations over those of forward and backward, published as 6 per token and element."""
    shape = find_model(model)
    return operations(shape) / (6 * shape.hidden * tokens)


def of_products(tokens: float) -> float:
    """The fraction of a step's operations that Newton–Schulz takes, for DeepSeek-V4-Pro's experts.

    A layer has 384 of them and a shared one, of three matrices each; a token passes through 7.
    """
    expert = (3072, 7168)
    newton_schulz = DEFAULT_STEPS * newton_schulz_cost(expert) * 3 * 385
    return newton_schulz / (newton_schulz + 6 * tokens * math.prod(expert) * 3 * 7)


def by_symmetry(rows: int, columns: int) -> float:
    """Operations of one step over those of a step that computes only half of its two symmetric products."""
    s, long = sorted((rows, columns))
    return newton_schulz_cost((rows, columns)) / (3 * s**2 * long + s**3)


def by_local_products(ranks: int) -> float:
    """Square products of gather-and-repeat, over those if ranks share all products except A²."""
    return 3 / (1 / ranks + 1 + 1 / ranks)


@cache
def on_h100(D: int) -> TimedRun:
    """``owner``'s step over the rows that Dion2 selects, on D GPUs of a node."""
    return walk_ranks(in_one(owner, submatrices(D), Grid.of(dp=D)), find_machine("h100-infiniband"))


def batched() -> float:
    """Seconds for 74 matrices of 24 × 10240 one by one, over the seconds for one batch of them."""
    with torch.device("meta"):
        one, batch = torch.empty(24, 10240), torch.empty(74, 24, 10240)
    return len(batch) * _seconds(one) / _seconds(batch)


def _seconds(G: torch.Tensor) -> float:
    """Seconds of five steps in bf16, batched if ``G`` is; our own default takes matrices one by one."""
    with Work(find_machine("a100-infiniband")) as work:
        quintic(G.bfloat16())
    return sum(work.take())


def product(rows: int, columns: int) -> float:
    """Milliseconds of XXᵀ on an A100, according to its file."""
    return find_machine("a100-infiniband").gemm_seconds(torch.bfloat16, (rows, columns, rows)) * 1e3


BLOG = ("Keller Jordan's notes on Muon", "https://kellerjordan.github.io/posts/muon/")
MINDSPORE = ("hyper-parallel, issue 262", "https://github.com/mindspore-ai/hyper-parallel/issues/262")
PRIMUS = ("Primus, pull request 729", "https://github.com/AMD-AGI/Primus/pull/729")
QUACK = ("torchtitan, pull request 4781", "https://github.com/pytorch/torchtitan/pull/4781")
PASS = ("PyTorch, pull request 184370", "https://github.com/pytorch/pytorch/pull/184370")
KERNELS = (
    "DMuon's benchmark of symmetric products",
    "https://github.com/X-Square-Robot/dmuon/blob/3448149763ee9a09185468761da2c40fc00f1b31/"
    "docs/internal/syrk_benchmark.md",
)
BOUND = "Published is the bound Tm/B, which square matrices reach; others cost less an element."
EXPERTS = "The experts' products, with DeepSeek-V4-Pro's sizes as Primus configures them, and sequences "

CLAIMS: Sequence[Claim] = (
    counted(
        "Newton–Schulz's operations over a training step's: the NanoGPT speedrun",
        0.007, "%", *BLOG, "all",
        "GPT-2's matrices, whose width of 768 is the published one; 524,288 tokens a step.",
        partial(overhead, "gpt2", 524_288), BOUND, below=0.01,
    ),
    counted(
        "the same for Llama 405B",
        0.005, "%", *BLOG, "all",
        "Llama-3.1-405B's matrices; 16 million tokens a step.",
        partial(overhead, "llama-3.1-405b", 16_000_000), BOUND, below=0.01,
    ),
    counted(
        "Newton–Schulz's part of all products at 8 sequences a step: DeepSeek-V4-Pro, reduced, 8 GPUs",
        0.97, "%", *PRIMUS, "some", f"{EXPERTS}of 4,096 tokens. Of 512: {of_products(8 * 512):.0%}.",
        partial(of_products, 8 * 4096), above=0.5,
    ),
    counted(
        "the same at 256 sequences, of the GPU's time",
        0.01, "%", *PRIMUS, "some", EXPERTS + "of 4,096 tokens, as published.",
        partial(of_products, 256 * 4096),
        lambda: "32 times the tokens take 97 % to 50 %, not to 1 %. Operations come to "
        f"{shown(of_products(94.4e6), '%')} only at the 94.4 million tokens a step that the launcher names.",
        below=0.5,
    ),
    seconds(
        "Newton–Schulz's milliseconds on one H100, Dion2 at a quarter of the rows",
        115.0, "ms", *DION, "all",
        "The published shapes; five steps of the quintic iteration, whose products alone are counted. Theirs "
        "is the Gram form, which on squares does as many operations.",
        lambda: on_h100(1).total("product", 0) * 1e3,
    ),
    seconds(
        "the optimizer's whole step on 4 of them",
        31.4, "ms", *DION, "all", "`owner`, all matrices in one round, as there; an H100 node of our file.",
        lambda: on_h100(4).seconds * 1e3,
    ),
    seconds(
        "74 matrices of 24 × 10240: one by one over one batch, in time",
        74 / 2.4, "×", *MINDSPORE, "some",
        "An A100; theirs ran on an NPU, whose figures were not published.",
        batched,
        "A fault of ours: a machine's file knows rates by a product's smallest side, whatever its other "
        "sides and its batch. So a batch saves launches alone, and products of thin matrices are too slow.",
    ),
    *(
        seconds(
            f"milliseconds of one product XXᵀ in bf16, {rows} × {columns}: an A800, cuBLAS",
            published, "ms", *KERNELS, "all",
            "The A100's file: an A800 differs from it in its links alone.",
            partial(product, rows, columns),
        )
        for rows, columns, published in ((512, 2048, 0.034), (7168, 18432, 7.171))
    ),
    *(
        seconds(
            f"one step of Newton–Schulz, usual over symmetric products (QuACK), {rows} × {columns}",
            published, "×", *QUACK, "some",
            "By operations: a symmetric product computes half of its results. Which GPU was not published.",
            partial(by_symmetry, rows, columns), above=1.0,
        )
        for rows, columns, published in ((1536, 7168, 1.34), (3072, 3584, 1.39), (7168, 6144, 1.52))
    ),
    seconds(
        "gather and repeat over local products with an all_reduce an iteration: 8 H100s",
        48 / 22, "×", *PASS, "some",
        "By operations on square matrices, collectives left out; shapes were not published. This pass of the "
        "compiler is a near relation of our `gram`, which pays one all_reduce for its five. But `gram` does "
        "more products on every rank: here it takes fewer operations only where one side is more than twelve "
        "times the other.",
        partial(by_local_products, 8), said="48 → 22 ms", above=1.0,
    ),
)  # fmt: skip
