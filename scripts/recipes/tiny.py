"""Shared by the recipes: a tiny GPT, sequences to learn, a learning rate's schedule, and one command line.

This file contains no optimizer and no framework, because the recipes show these.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 32, 4, 16


class Attention(nn.Module):
    """Causal self-attention. Under tensor parallelism, a rank may have only some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            into(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for into in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer: attention, then two matrices with a nonlinearity between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Two layers between an embedding and a head; ``tied`` lets them share one matrix."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids) + self.positions(torch.arange(LENGTH, device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())}


class Sequences(Dataset[dict[str, Tensor]]):
    """Arithmetic sequences; the index decides a sequence's first number and its step."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.length:
            raise IndexError(index)
        start, growth = index * 7 % VOCABULARY, 1 + index * 5 % 11
        tokens = (start + growth * torch.arange(LENGTH + 1)) % VOCABULARY
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Arguments(argparse.Namespace):
    epochs: int
    steps: int
    batch: int
    accumulate: int
    max_norm: float
    bf16: bool
    save: Path
    resume: Path | None

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole run, for the schedule, even if the run is resumed."""
        return self.epochs * self.steps

    @property
    def first(self) -> int:
        """The number of epochs already done, from the name of the folder or file to resume from."""
        return int(self.resume.name.split("-")[1]) if self.resume else 0

    def sequences(self) -> Sequences:
        return Sequences(self.steps * self.accumulate * self.batch)

    def loader(self, ranks: int, place: int) -> DataLoader[dict[str, Tensor]]:
        """One rank's share of each micro-batch of an epoch; ``ranks`` ranks share a micro-batch."""
        data = self.sequences()
        sampler = DistributedSampler(data, ranks, place, shuffle=False)
        return DataLoader(data, self.batch // ranks, sampler=sampler)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        """The learning rate, which falls linearly to zero."""
        return LambdaLR(optimizer, lambda step: (self.total_steps - step) / self.total_steps)


def arguments(description: str | None) -> Arguments:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps in an epoch")
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences in a micro-batch, over all ranks together"
    )
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--max-norm", type=float, default=0.1, help="clip gradients to this norm")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")
    own = Path("runs") / Path(sys.argv[0]).stem
    parser.add_argument("--save", type=Path, default=own, help="write epoch-N into this folder")
    parser.add_argument("--resume", type=Path, help="resume from this epoch-N folder")
    return parser.parse_args(namespace=Arguments())
