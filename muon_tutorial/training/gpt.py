"""A small byte-level GPT, and the standard way to cut it for tensor parallelism.

The model itself is plain PyTorch and knows nothing of ranks. ``parallelize`` cuts a built model with
``torch.distributed.tensor.parallel``: q, k, v and the MLP's first matrix column-wise, the two matrices that
write back to the residual stream row-wise. Embedding, norms and head stay whole on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

BYTES = 256
ROTARY_BASE = 10_000.0
INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class GPTShape:
    """The sizes of a GPT."""

    layers: int
    width: int
    heads: int
    context: int


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Tensor parallelism gives each rank some of the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        y = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    """Two matrices around a GELU, four times wider inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = MLP(width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes in, logits over the next byte out: [batch, time] int64 to [batch, time, 256]."""

    turns: Tensor

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.register_buffer(
            "turns", rotary_turns(shape.context, shape.width // shape.heads), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        turns = self.turns[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


def build_gpt(shape: GPTShape, seed: int) -> GPT:
    """A GPT, on the CPU, whose first weights follow from ``seed`` alone: every rank and grid starts alike."""
    model = GPT(shape)
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * shape.layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = residual_std if name.endswith(("o.weight", "down.weight")) else INIT_STD
            nn.init.normal_(parameter, std=std, generator=generator)
    return model


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all positions, in nats per byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def parallelize(model: GPT, tp_mesh: DeviceMesh) -> None:
    """Cut the model's hidden matrices over ``tp_mesh``, in place and with no communication.

    Every rank must hold the same full model, and keeps its own slice of it. With one tp rank nothing changes.
    """
    if tp_mesh.size() == 1:
        return
    for block in model.blocks:
        parallelize_module(block, tp_mesh, _block_plan(), src_data_rank=None)


def _block_plan() -> dict[str, ParallelStyle]:
    # Marking the input once per module makes its gradient one sum over tp, not one for each of q, k and v.
    return {
        "attention": PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }


def rotary_turns(context: int, head_width: int) -> Tensor:
    """Cosines and sines of the rotary angles: [2, context, head_width / 2]."""
    rates = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), rates)
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the halves of ``x`` [batch, heads, time, head_width] by the angles of each position."""
    cos, sin = turns[0], turns[1]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
