"""Published figures of Newton–Schulz's work: its part of a training step, and its time on a GPU."""

from __future__ import annotations

import math
from functools import cache

import torch

from muon_tutorial import Grid, owner
from muon_tutorial.newton_schulz import DEFAULT_STEPS
from muon_tutorial.plan.assign import newton_schulz_cost
from muon_tutorial.timing.compute_seconds import Work
from muon_tutorial.timing.machine import find_machine
from muon_tutorial.timing.model_shape import ModelShape
from muon_tutorial.timing.models import find_model
from muon_tutorial.timing.timed_world import TimedRun
from muon_tutorial.timing.timeline_cases import walk_ranks

from .claim import shown
from .of_bytes import in_one, submatrices
from .of_updates import quintic


def operations(shape: ModelShape) -> int:
    """Newton–Schulz's operations for all matrices of a model, each orthogonalized once."""
    return DEFAULT_STEPS * sum(newton_schulz_cost(family.shape) * family.count for family in shape.families)


def overhead(model: str, tokens: int) -> float:
    """Newton–Schulz's operations divided by those of forward and backward (6 per token and element)."""
    shape = find_model(model)
    return operations(shape) / (6 * shape.hidden * tokens)


def of_products(tokens: float) -> float:
    """The fraction of a step's operations that Newton–Schulz takes, for DeepSeek-V4-Pro's experts.

    A layer has 384 experts and a shared one, of three matrices each; a token passes through 7 of them.
    """
    expert = (3072, 7168)
    newton_schulz = DEFAULT_STEPS * newton_schulz_cost(expert) * 3 * 385
    return newton_schulz / (newton_schulz + 6 * tokens * math.prod(expert) * 3 * 7)


def assumed_of_experts() -> str:
    """What we assumed for the experts' share of all products, with our figure for shorter sequences."""
    return (
        "The experts' products, with DeepSeek-V4-Pro's sizes as Primus configures them, and sequences of "
        f"4,096 tokens. Of 512: {of_products(8 * 512):.0%}."
    )


def why_of_experts() -> str:
    """Why our share at 256 sequences is not the published one."""
    return (
        "With 32 times the tokens, 97 % falls to 50 %, not to 1 %. Newton–Schulz takes "
        f"{shown(of_products(94.4e6), '%')} only with the 94.4 million tokens a step that the launcher names."
    )


def by_symmetry(rows: int, columns: int) -> float:
    """An iteration's operations, divided by those of one that computes half of each symmetric product."""
    s, long = sorted((rows, columns))
    return newton_schulz_cost((rows, columns)) / (3 * s**2 * long + s**3)


def by_local_products(ranks: int) -> float:
    """A rank's work on square products if ranks share none of them, divided by its work if they share all of
    them except A²."""
    return 3 / (1 / ranks + 1 + 1 / ranks)


@cache
def on_h100(D: int) -> TimedRun:
    """A step of ``owner`` with the matrices that Dion2 orthogonalizes, on D GPUs of a node."""
    return walk_ranks(in_one(owner, submatrices(D), Grid.of(dp=D)), find_machine("h100-infiniband"))


def products_on_h100() -> float:
    """Milliseconds of products in ``on_h100``'s step on one GPU."""
    return on_h100(1).total("product", 0) * 1e3


def step_on_h100s() -> float:
    """Milliseconds of ``on_h100``'s step on four GPUs."""
    return on_h100(4).seconds * 1e3


def batched() -> float:
    """Seconds for 74 matrices of 24 × 10240 one by one, divided by the seconds for one batch of them."""
    with torch.device("meta"):
        one, batch = torch.empty(24, 10240), torch.empty(74, 24, 10240)
    return len(batch) * _seconds(one) / _seconds(batch)


def _seconds(G: torch.Tensor) -> float:
    """Seconds of five iterations in bf16; a batch is iterated as one."""
    with Work(find_machine("a100-infiniband")) as work:
        quintic(G.bfloat16())
    return sum(work.take())


def product(rows: int, columns: int) -> float:
    """Milliseconds of XXᵀ on an A100, according to its file."""
    return find_machine("a100-infiniband").gemm_seconds(torch.bfloat16, (rows, columns, rows)) * 1e3
