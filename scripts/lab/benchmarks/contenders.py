"""Contenders on the same work: torch's AdamW and Muon under DDP, FSDP2 and ZeRO-1, and this package's Muon.

Every contender trains the same model on the same global batch. Gradients have the parameters' dtype; buckets
of gradients have 25 MB. All ranks must make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from muon_tutorial import LiveWorld, Matrix, Muon, MuonWithAdamW, Shard, build_mesh, split_parameters
from muon_tutorial.plan.strategies import ROUND_BYTES, Builder, layerwise, owner, round_robin, zero1
from muon_tutorial.training.gpt import BYTES, GPT, GPTShape, build_gpt, next_byte_loss, parallelize
from muon_tutorial.training.loop import average_gradients

LR = 1e-3
BUCKET_MB = ROUND_BYTES // 10**6


@dataclass(frozen=True, slots=True)
class Workload:
    """What every contender trains in a step: a model, on a global batch of sequences."""

    shape: GPTShape
    batch: int

    def tokens(self, step: int, place: int, parts: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one data-parallel position: its share of the global batch."""
        generator = torch.Generator().manual_seed(step)
        whole = torch.randint(0, BYTES, (self.batch, self.shape.context + 1), generator=generator)
        mine = whole.chunk(parts)[place]
        return mine[:, :-1], mine[:, 1:]


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """A model and its optimizers. ``finish`` does the rest of a step after ``backward()``."""

    world: LiveWorld
    model: nn.Module
    optimizers: Sequence[Optimizer]
    finish: Callable[[], None]

    def learn(self, work: Workload, step: int) -> None:
        """Forward and backward on this rank's share. A wrapper that reduces gradients does so here."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        inputs, targets = work.tokens(step, self.world.at["dp"], self.world.at.size("dp"))
        next_byte_loss(self.model, inputs, targets).backward()

    @property
    def state(self) -> list[Tensor]:
        """The tensors that the optimizers keep between steps, except single numbers."""
        return [value for _, value in self._kept()]

    @property
    def matrix_state(self) -> list[Tensor]:
        """The part of ``state`` that belongs to hidden matrices."""
        hidden = set(map(id, split_parameters(_plain(self.model)).hidden_params))
        return [value for param, value in self._kept() if id(param) in hidden]

    def _kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        for optimizer in self.optimizers:
            inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
            for param, entry in inner.state.items():
                tensors = (value for value in entry.values() if isinstance(value, Tensor) and value.ndim)
                yield from ((param, value) for value in tensors)


def _plain(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


Build = Callable[[Workload, LiveWorld], Contender]


def ddp(work: Workload, world: LiveWorld) -> DistributedDataParallel:
    """The whole model on every rank; DDP averages gradients while backward runs.

    DDP does not broadcast buffers here, because the rotary table is constant, and no other contender sends
    it.
    """
    model = build_gpt(work.shape, 0)
    buffers = [name for name, _ in model.named_buffers()]
    # torch 2.13 renames DDP's argument for this, so each of its names warns or fails in some version.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    group = world.group(("dp",))
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)


def fsdp2(work: Workload, world: LiveWorld) -> GPT:
    """Parameters, gradients and state in shards; parameters are gathered in forward and again in backward."""
    model = build_gpt(work.shape, 0)
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    return model


def over_tp(work: Workload, world: LiveWorld) -> GPT:
    """The model cut over tp, with DTensors as parameters."""
    model = build_gpt(work.shape, 0)
    parallelize(model, world.mesh["tp"])
    return model


def hidden_matrices(width: int, layers: int, cut: bool) -> list[Matrix]:
    """A transformer's hidden matrices; with ``cut``, tp cuts them as in Megatron-LM."""
    rows = [(name, (width, width), 0) for name in "qkv"] + [("o", (width, width), 1)]
    rows += [("up", (4 * width, width), 0), ("down", (width, 4 * width), 1)]
    named = [(f"{layer}.{name}", sides, dim) for layer in range(layers) for name, sides, dim in rows]
    return [
        Matrix(index, name, sides, (("tp", Shard(dim)),) if cut else ())
        for index, (name, sides, dim) in enumerate(named)
    ]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=LR)]


def adamw_zero1(model: nn.Module) -> list[Optimizer]:
    """PyTorch's ZeRO-1: each rank steps whole parameters of its own and broadcasts them."""
    return [ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=LR)]


def torch_muon(model: nn.Module) -> list[Optimizer]:
    """Torch's Muon. If the model is replicated, every rank orthogonalizes every matrix; with DTensors, each
    matrix takes a dozen collectives."""
    split = split_parameters(_plain(model))
    return [torch.optim.Muon(split.hidden_params, lr=LR), AdamW(split.rest, lr=LR)]


def owners(model: nn.Module) -> list[Optimizer]:
    """This package's Muon on FSDP2's shards: each matrix goes to its owner and back."""
    hidden, rest = split_parameters(model)
    return [Muon(hidden, lr=LR), AdamW(rest, lr=LR)]


def step_each(
    make_model: Callable[[Workload, LiveWorld], nn.Module],
    make_optimizers: Callable[[nn.Module], list[Optimizer]],
    work: Workload,
    world: LiveWorld,
    averages: bool = False,
) -> Contender:
    """A contender whose optimizers step one after the other.

    ``averages``: ``finish`` first averages gradients over dp, in one buffer; otherwise backward does it.
    """
    model = make_model(work, world)
    optimizers = make_optimizers(model)

    def finish() -> None:
        if averages:
            average_gradients(world, list(model.parameters()))
        for optimizer in optimizers:
            optimizer.step()

    return Contender(world, model, optimizers, finish)


def our_muon(strategy: str | Builder, work: Workload, world: LiveWorld) -> Contender:
    """This package's Muon for the hidden matrices, AdamW for the rest."""
    model = over_tp(work, world)
    hidden, rest = split_parameters(model)
    both = MuonWithAdamW(Muon(hidden, lr=LR, strategy=strategy, mesh=world), AdamW(rest, lr=LR))

    def finish() -> None:
        plan = both.muon.plan
        if plan is not None and plan.expects == "averaged":
            average_gradients(world, list(model.parameters()))
        both.step()

    return Contender(world, model, [both.muon, both.adamw], finish)


DP, TP, BOTH, SHARDED = {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}, {"dp": 4}
ADAMW_DP, ADAMW_SHARDED = "AdamW, DDP, DP=4", "AdamW, FSDP2, DP=4"
ADAMW_TP, ADAMW_BOTH = "AdamW, averaged, TP=4", "AdamW, averaged, DP=2×TP=2"
BOUNDARY = partial(zero1, gather="boundary")

CONTENDERS: dict[str, tuple[Build, dict[str, int], str]] = {
    ADAMW_DP: (partial(step_each, ddp, adamw), DP, ""),
    "AdamW, ZeRO-1 (torch), DP=4": (partial(step_each, ddp, adamw_zero1), DP, ""),
    ADAMW_SHARDED: (partial(step_each, fsdp2, adamw), SHARDED, ""),
    ADAMW_BOTH: (partial(step_each, over_tp, adamw, averages=True), BOTH, ""),
    ADAMW_TP: (partial(step_each, over_tp, adamw, averages=True), TP, ""),
    "torch.optim.Muon, DDP, DP=4": (partial(step_each, ddp, torch_muon), DP, ADAMW_DP),
    "torch.optim.Muon, FSDP2 DTensors, DP=4": (partial(step_each, fsdp2, torch_muon), SHARDED, ADAMW_SHARDED),
    "torch.optim.Muon, DTensors, TP=4": (partial(step_each, over_tp, torch_muon), TP, ADAMW_TP),
    "Muon zero1, DP=4": (partial(our_muon, zero1), DP, ADAMW_DP),
    "Muon zero1 boundary, DP=4": (partial(our_muon, BOUNDARY), DP, ADAMW_DP),
    "Muon zero1, DP=2×TP=2": (partial(our_muon, zero1), BOTH, ADAMW_BOTH),
    "Muon zero1, TP=4": (partial(our_muon, zero1), TP, ADAMW_TP),
    "Muon layerwise, DP=4": (partial(our_muon, layerwise), DP, ADAMW_DP),
    "Muon round_robin, DP=4": (partial(our_muon, round_robin), DP, ADAMW_DP),
    "Muon owner, DP=4": (partial(our_muon, owner), DP, ADAMW_DP),
    "Muon owner, FSDP2, DP=4": (partial(step_each, fsdp2, owners), SHARDED, ADAMW_SHARDED),
}
"""For each contender: how to build it, its grid, and the AdamW that does the same work on that grid.

The AdamW may use DDP, because in fp32 DDP sends as many bytes as ZeRO-1.
"""
AGAINST = {name: adamws for name, (_, _, adamws) in CONTENDERS.items() if adamws}


def build_contender(name: str, work: Workload) -> Contender:
    """The contender of that name on this rank. All ranks must call it."""
    build, grid, _ = CONTENDERS[name]
    return build(work, LiveWorld(build_mesh(grid)))
