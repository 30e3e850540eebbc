"""Lesson 13: what a training step costs with AdamW and with Muon, and when Muon is cheaper.

Nothing runs: bytes and memory follow from plans, and the planner computes seconds from a machine's file. One
node trains one model. Forward and backward count only the products with hidden matrices, in bf16.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from ... import Grid, Matrix, Plan, zero1
from ...plan.exchange import LocalShards
from ...plan.strategies import STRATEGIES as ALL
from ...plan.strategies import Builder, layerwise
from ...timing.machine import find_machine
from ...timing.model_shape import stage_matrices
from ...timing.models import find_model
from ...timing.step_cost import StepEstimate, estimate, estimate_adamw
from ..bill.costs import BOUNDARY, DTYPES, bill_of, gpt_matrices

MODEL, RANKS = "llama-3.2-1b", 8
machine = cache(partial(find_machine, "h100-infiniband"))
"""The machine for which all seconds are computed."""
ROUND_BYTES = 400_000_000
STRATEGIES: Mapping[str, Builder] = {
    "zero1": partial(zero1, cut="bucket"),
    "boundary": partial(zero1, cut="bucket", gather="boundary"),
    "layerwise": layerwise,
}
LINKS = {"full speed": 1.0, "1 / 8": 1 / 8, "1 / 64": 1 / 64}
"""Link speeds, as fractions of the bandwidth in the machine's file."""
TOKENS = tuple(2**power for power in range(15, 23))
"""Tokens per step, all ranks together."""
FEWER = {"1.1 ×": 1.1, "as many": 1.0, "2 ×": 2.0}
"""The steps that AdamW takes to a loss, divided by the steps that Muon takes to the same loss.

Wen et al. 2025 (arXiv 2509.02046) find 1.1 at 1.2 billion parameters; Liu et al. 2025 (arXiv 2502.16982)
report 2 for compute-optimal training.
"""


@cache
def matrices(dtypes: str) -> list[Matrix]:
    """The hidden matrices of the model, uncut."""
    weights, gradients = DTYPES[dtypes]
    return stage_matrices(find_model(MODEL), dtype=weights, grad_dtype=gradients)[0]


@cache
def muon_step(dtypes: str, strategy: str) -> StepEstimate:
    """Muon's step on the rank with the most computation."""
    build, grid = STRATEGIES[strategy], Grid.of(dp=RANKS)
    return estimate(strategy, build, matrices(dtypes), grid, machine(), round_bytes=ROUND_BYTES)


@cache
def adamw_step(dtypes: str) -> StepEstimate:
    """The step of ZeRO-1 AdamW over the same buckets."""
    weights, gradients = DTYPES[dtypes]
    grid = Grid.of(dp=RANKS)
    buckets = zero1(matrices(dtypes), grid, cut="bucket", round_bytes=ROUND_BYTES).buckets
    lengths = [bucket.length(LocalShards(), grid.at(0)) for bucket in buckets]
    return estimate_adamw(lengths, grid, machine(), g=gradients, p=weights, beside=RANKS - 1)


@cache
def forward_backward(tokens: int) -> float:
    """Seconds of the products with hidden matrices: one in forward, two in backward."""
    shapes = [(tokens // RANKS, *matrix.shape) for matrix in matrices("weights bf16")]
    return sum(3 * machine().gemm_seconds(torch.bfloat16, shape) for shape in shapes)


def say_steps() -> str:
    """A table of seconds: forward and backward for small and large batches, and the optimizers' steps."""
    rows = [(f"forward and backward, {tokens:,} tokens", forward_backward(tokens)) for tokens in TOKENS[::3]]
    rows += [("AdamW's step, all fp32, at any batch", adamw_step("all fp32").seconds)]
    rows += [(f"Muon's, {name}", muon_step("all fp32", name).seconds) for name in STRATEGIES]
    lines = [f"{what:40}{seconds * 1e3:9,.1f} ms" for what, seconds in rows]
    source = f"Nothing ran: {MODEL}, {RANKS} ranks, by the file of “{machine().name}”."
    return "\n".join([source, *lines])


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared: dtypes of weights and gradients, tokens a step, bandwidth relative to the file's.

    ``fewer``: AdamW's steps to a loss, divided by Muon's to the same loss. With 1, single steps are compared.
    """

    dtypes: str = "all fp32"
    tokens: int = TOKENS[2]
    bandwidth: float = 1.0
    strategy: str = "zero1"
    fewer: float = 1.0

    @property
    def muon(self) -> StepEstimate:
        """Muon's step, at the link speed in the machine's file."""
        return muon_step(self.dtypes, self.strategy)

    @property
    def adamw(self) -> StepEstimate:
        return adamw_step(self.dtypes)

    @property
    def muon_seconds(self) -> float:
        """Muon's seconds to a loss, divided by the number of steps that AdamW takes to the same loss."""
        return (forward_backward(self.tokens) + self.muon.seconds_at(self.bandwidth)) / self.fewer

    @property
    def adamw_seconds(self) -> float:
        return forward_backward(self.tokens) + self.adamw.seconds_at(self.bandwidth)


def say_turns(break_even: Callable[[float, float, float, float], float], times: float = 1.1) -> str:
    """A table of how many tokens a step needs for Muon to lead, by strategy and speed of the links."""
    forward = forward_backward(TOKENS[0]) / TOKENS[0]
    lines = [f"Tokens per step from which Muon leads (all fp32; AdamW takes {times} × as many steps):"]
    lines += [f"{'':10}" + "".join(f"{say_bandwidth(link):>12}" for link in LINKS.values())]
    for strategy in STRATEGIES:
        steps = Setting(strategy=strategy)
        pairs = ((steps.adamw.seconds_at(link), steps.muon.seconds_at(link)) for link in LINKS.values())
        turns = (break_even(forward, *pair, times) for pair in pairs)
        lines.append(f"{strategy:10}" + "".join(f"{turn:12,.0f}" for turn in turns))
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The changes that lead from AdamW's number to Muon's; ``note`` is written after AdamW's number."""

    what: str
    unit: float
    unit_name: str
    first: float
    changes: Mapping[str, float]
    note: str = ""

    @property
    def last(self) -> float:
        return self.first + sum(self.changes.values())

    @property
    def times(self) -> float:
        return self.last / self.first

    def say(self, number: float, sign: str = "") -> str:
        return f"{number / self.unit:{sign}.3g} {self.unit_name}".replace("-", "−")


def waterfalls(at: Setting) -> tuple[Waterfall, Waterfall, Waterfall]:
    """Waterfalls of the bytes that a rank sends, of its seconds, and of its peak memory in a step."""
    changes = {
        "moments": float(at.muon.momentum - at.adamw.momentum),
        "buffers of a step": float(at.muon.peak - at.adamw.peak),
        "padding": float(at.muon.held - at.adamw.held),
    }
    shown = {name: more for name, more in changes.items() if more}
    return _sent(at), _seconds(at), Waterfall("memory", 1e9, "GB", float(at.adamw.memory), shown)


def _with_fewer_steps(first: float, changes: dict[str, float], fewer: float) -> dict[str, float]:
    """``changes``, and one more change: fewer steps save a part of the total."""
    if fewer == 1.0:
        return changes
    return {**changes, "fewer steps": (first + sum(changes.values())) * (1 / fewer - 1)}


def _sent(at: Setting) -> Waterfall:
    flags = at.muon.phases.get("gradient flags", 0)  # these do not grow with the model
    gathers = sum(sent for phase, sent in at.muon.phases.items() if phase == "dp gather")
    others = at.muon.sent - gathers - flags - at.adamw.sent
    changes = {"gather of x": float(gathers), "uneven owners": float(others)}
    shown = {name: sent for name, sent in changes.items() if sent or name != "uneven owners"}
    first = float(at.adamw.sent)
    return Waterfall("bytes that a rank sends", 1e9, "GB", first, _with_fewer_steps(first, shown, at.fewer))


def _seconds(at: Setting) -> Waterfall:
    # the rest, after products and copies, is exposed communication
    adamw, muon = (one.seconds_at(at.bandwidth) - one.product - one.copy for one in (at.adamw, at.muon))
    changes = {"Newton–Schulz": at.muon.product, "all other math": at.muon.copy - at.adamw.copy}
    changes["communication"], first = muon - adamw, at.adamw_seconds
    both = f", {forward_backward(at.tokens) * 1e3:.3g} of them forward and backward"
    return Waterfall("time", 1e-3, "ms", first, _with_fewer_steps(first, changes, at.fewer), both)


def say_bandwidth(part: float) -> str:
    """In GB/s, this fraction of the link bandwidth in the machine's file."""
    return f"{part * machine().inside.bandwidth / 1e9:.3g} GB/s"


_TRAVELS = {
    "gradients": "^gradient",
    "x": "^(dp |tp )?gather|^Gram",
    "updates": "^update|scatter from",
    "weights": "^parameter",
}
"""What travels in a step, in order, each with a pattern for its phases; x is Newton–Schulz's input."""
CUT_BUCKETS = 'zero1, cut="bucket"'
BUILDERS: Mapping[str, Builder] = {
    **ALL,
    BOUNDARY: partial(zero1, gather="boundary"),
    CUT_BUCKETS: partial(zero1, cut="bucket"),
}
CHOICES = {
    "replicated": "Momentum is cut like the weights; every rank works. For small models, or to compare with.",
    "round_robin": "Momentum is cut like the weights; place i % dp works. For dp alone, memory permitting.",
    "zero1": "Each place keeps a slice, and works on matrices with a part in it. As published; equal memory.",
    BOUNDARY: "As zero1, but only straddling matrices travel over dp. Better, as long as they are few.",
    CUT_BUCKETS: "As zero1, but each bucket is cut. For buckets of many small matrices.",
    "layerwise": "The owner, a place along dp, keeps the momentum and works. For more matrices than places.",
    "gram": "As layerwise, but tp ranks work on shards. For very long matrices. Other bits, but close.",
    "owner": "Momentum is cut like the weights; one rank of the grid works. For FSDP2, and any other cut.",
    "owner_per_replica": "The same in each replica. For HSDP with slow links between replicas.",
}
"""For each strategy: who keeps a matrix's momentum, who orthogonalizes it, and when to use it."""


def say_strategies(dp: int, tp: int) -> str:
    """A table of all strategies for lesson 10's GPT: the momentum, work and bytes of each."""
    grid, all_matrices = Grid.of(dp=dp, tp=tp), gpt_matrices()
    columns = "".join(f"{what:>12}" for what in (*_TRAVELS, "together"))
    lines = [f"Lesson 10's GPT on {grid}: MB that one rank sends on a ring, the mean of all ranks"]
    lines += [f"{'':21}{'momentum':>10}{'at work':>9}     before Newton–Schulz     after it"]
    lines += [f"{'':21}{'copies':>10}{'ranks':>9}{columns}"]
    for name, words in CHOICES.items():
        facts = _facts_of(BUILDERS[name](all_matrices, grid), all_matrices)
        lines += [f"{name:21}{facts}", f"    {words}"]
    return "\n".join(lines)


def least_work_and_bytes(dp: int, tp: int) -> str:
    """The strategy that repeats the least work; if there are several, the one that sends the fewest bytes."""
    grid, all_matrices = Grid.of(dp=dp, tp=tp), gpt_matrices()

    def cost(name: str) -> tuple[int, int]:
        plan = BUILDERS[name](all_matrices, grid)
        sent = sum(bill_of("", plan, rank).total for rank in grid.ranks)
        return sum(len(plan.workers(matrix.index)) for matrix in all_matrices), sent

    return min(CHOICES, key=cost)


def _facts_of(plan: Plan, all_matrices: Sequence[Matrix]) -> str:
    """Copies of a momentum entry, ranks at work on a matrix, MB sent of each kind."""
    bills = [bill_of("", plan, rank) for rank in plan.grid.ranks]
    kept = sum(matrix.numel * matrix.dtype.itemsize for matrix in all_matrices)
    work = sum(len(plan.workers(matrix.index)) for matrix in all_matrices) / len(all_matrices)
    sent = Counter[str]()
    for phase, number in (item for bill in bills for item in bill.sent.items()):
        sent[next(what for what, names in _TRAVELS.items() if re.search(names, phase))] += number
    shown = (f"{sent[what] / len(bills) / 1e6:12.1f}" if sent[what] else f"{'–':>12}" for what in _TRAVELS)
    copies = sum(bill.state for bill in bills) / kept
    return f"{copies:10.1f}{work:9.1f}{''.join(shown)}{sum(sent.values()) / len(bills) / 1e6:12.1f}"
