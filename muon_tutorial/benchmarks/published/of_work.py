"""Published figures of Newton–Schulz's work: operations against a training step's, and seconds on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from ...newton_schulz import DEFAULT_STEPS
from ...plan.assign import newton_schulz_cost
from ...plan.grid import Grid
from ...plan.strategies import owner
from ...timing.commands import find_machine
from ...timing.model_shape import ModelShape
from ...timing.models import find_model
from ...timing.planner import StepEstimate, estimate
from ...timing.work import Work
from .claim import Claim
from .of_bytes import DION, ONE_LIST, submatrices


def operations(shape: ModelShape) -> int:
    """Newton–Schulz's operations over all matrices of a model, each once."""
    return DEFAULT_STEPS * sum(newton_schulz_cost(family.shape) * family.count for family in shape.families)


def overhead(model: str, tokens: int) -> float:
    """Newton–Schulz's operations over those of forward and backward, 6 a token and element, as published."""
    shape = find_model(model)
    return operations(shape) / (6 * shape.hidden * tokens)


@cache
def on_h100(D: int) -> StepEstimate:
    """``owner``'s step over the rows that Dion2 selects, on D GPUs of a node."""
    machine, grid = find_machine("h100-infiniband"), Grid.of(dp=D)
    return estimate("owner", owner, submatrices(D), grid, machine, bucket_bytes=ONE_LIST)


def orthogonalizing(D: int) -> float:
    """Milliseconds of matrix products."""
    return on_h100(D).product * 1e3


def batched() -> float:
    """Seconds of 74 matrices of 24 × 10240 one by one over those of one batch."""
    with torch.device("meta"):
        one, batch = torch.empty(24, 10240), torch.empty(74, 24, 10240)
    return len(batch) * _seconds(one) / _seconds(batch)


def _seconds(G: torch.Tensor) -> float:
    """Of five steps in bf16, batched where the matrices are: our own default takes them one by one."""
    with Work(find_machine("a100-infiniband")) as work:
        X = G.bfloat16()
        for _ in range(DEFAULT_STEPS):
            A = X @ X.mT
            X = 3.4 * X + (-4.8 * A + 2.0 * A @ A) @ X
    return sum(work.take())


BLOG = ("Keller Jordan's notes on Muon", "https://kellerjordan.github.io/posts/muon/")
MINDSPORE = (
    "hyper-parallel, issue 262",
    "https://github.com/mindspore-ai/hyper-parallel/issues/262",
)
BOUND = "Published is the bound Tm/B, which square matrices reach; others cost less an element."

CLAIMS: Sequence[Claim] = (
    Claim(
        "Newton–Schulz's operations over a training step's: the NanoGPT speedrun",
        0.007, "%", *BLOG, 0.01, "below", "all",
        "GPT-2's matrices, whose width of 768 is the published one; 524,288 tokens a step.",
        partial(overhead, "gpt2", 524_288), BOUND,
    ),
    Claim(
        "the same for Llama 405B",
        0.005, "%", *BLOG, 0.01, "below", "all",
        "Llama-3.1-405B's matrices; 16 million tokens a step.",
        partial(overhead, "llama-3.1-405b", 16_000_000), BOUND,
    ),
    Claim(
        "Newton–Schulz's milliseconds on one H100, Dion2 at a quarter of the rows",
        115.0, "ms", *DION, 0.0, "above", "all",
        "The published shapes; five steps of the quintic iteration, whose products alone are counted. Theirs "
        "is the Gram form, which on squares does as many operations.",
        partial(orthogonalizing, 1),
    ),
    Claim(
        "the same on 2 GPUs, over 1",
        61 / 115, "×", *DION, 1.0, "below", "all", "As above, each matrix at one owner.",
        lambda: orthogonalizing(2) / orthogonalizing(1),
    ),
    Claim(
        "the same on 4 GPUs, over 1",
        31 / 115, "×", *DION, 1.0, "below", "all", "As above.",
        lambda: orthogonalizing(4) / orthogonalizing(1),
    ),
    Claim(
        "the optimizer's step on 4 GPUs over 1",
        31.4 / 117.9, "×", *DION, 1.0, "below", "all",
        "`owner`, window of one, an H100 node of our file.",
        lambda: on_h100(4).seconds / on_h100(1).seconds,
    ),
    Claim(
        "74 matrices of 24 × 10240: one by one over one batch, in time",
        74 / 2.4, "×", *MINDSPORE, 1.0, "above", "some",
        "An A100; theirs ran on an NPU, whose figures were not published.",
        batched,
        why="A fault of ours: a machine's file knows rates by a product's smallest side, whatever its other "
        "sides and its batch. So a batch saves launches alone, and products of thin matrices are too slow.",
    ),
)  # fmt: skip
