"""Lesson 16: the tiny model, its data, and how tp and FSDP2 shard it. Plain PyTorch, without an optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SYMBOLS, WIDTH, LAYERS = 48, 24, 2
BATCH = 96
"""Symbols per step, all ranks together."""
_GROWTH, _START = 5, 7


class Layer(nn.Module):
    """A residual MLP: two matrices with a nonlinearity between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (WIDTH,)))))


class TinyModel(nn.Module):
    """Symbols in, scores for the next symbol out: [batch] int64 to [batch, 48]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.embedding(symbols)
        for layer in self.layers:
            x = layer(x)
        return self.head(F.rms_norm(x, (WIDTH,)))


def build(seed: int) -> TinyModel:
    """The model with initial weights from the seed, the same on every rank and grid."""
    model, generator = TinyModel(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=generator)
    return model


def shard(model: TinyModel, mesh: DeviceMesh) -> None:
    """Shard the model in place, first over tp, then over dp. Must be called by all ranks of the mesh."""
    if mesh["tp"].size() > 1:
        outer = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], outer)
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh["dp"])


def batch_of(step: int, seed: int, place: int = 0, places: int = 1) -> tuple[Tensor, Tensor]:
    """One dp place's part of a batch: symbols s, and their next symbols: 5 s + 7, but 1 in 8 is random."""
    generator = torch.Generator().manual_seed(seed * 100_003 + step)
    symbols = torch.randint(SYMBOLS, (BATCH,), generator=generator)
    odd = torch.randint(SYMBOLS, (BATCH,), generator=generator)
    is_odd = torch.rand(BATCH, generator=generator) < 1 / 8
    following = torch.where(is_odd, odd, (_GROWTH * symbols + _START) % SYMBOLS)
    return symbols.tensor_split(places)[place], following.tensor_split(places)[place]


def loss_of(model: nn.Module, step: int, seed: int, mesh: DeviceMesh) -> Tensor:
    """The mean loss of this rank's part of a step's batch."""
    symbols, following = batch_of(step, seed, mesh["dp"].get_local_rank(), mesh["dp"].size())
    return F.cross_entropy(model(symbols), following)
