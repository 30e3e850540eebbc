"""Parts of fused weights in timm, torchvision, torch and nanoGPT are those that their layers use.

As in ``test_model_parts``, no layout is written down, because each attention or gated layer runs forward.
Layers of nanoGPT, litgpt and torchtitan are repeated here in a short form, under their own names.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muon_tutorial import split_parameters

from .operands import filled, hidden, wrong_parts


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a zoo, its arguments, and its input's shape."""

    path: str
    arguments: tuple[Any, ...] = (32, 4)
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (2, 16, 32)
    beside: tuple[Any, ...] = ()

    def build(self) -> nn.Module:
        module, name = self.path.rsplit(".", 1)
        if module == __name__:
            made: nn.Module = globals()[name](*self.arguments)
        else:
            pytest.importorskip(module.split(".")[0])
            made = getattr(importlib.import_module(module), name)(*self.arguments, **self.options)
        return Taking(filled(made, std=0.3), self.beside).double().eval()


class Taking(nn.Module):
    """A layer inside a model, with the arguments that it takes besides the input."""

    def __init__(self, block: nn.Module, beside: tuple[Any, ...]) -> None:
        super().__init__()
        self.block, self.beside = block, beside

    def forward(self, x: Tensor) -> Any:
        return self.block(x, *self.beside)


class CausalSelfAttention(nn.Module):
    """nanoGPT's layer (model.py), without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        return self.c_proj(attended(q, k, v, self.n_head, self.n_head))


def attended(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int) -> Tensor:
    """Causal attention of [batch, tokens, heads · size], with as many keys and values as there are groups."""
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = (it.unflatten(-1, (groups, -1)).transpose(1, 2) for it in (k, v))
    k, v = (it.repeat_interleave(heads // groups, dim=1) for it in (k, v))
    made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return made.transpose(1, 2).flatten(2)


class LitGPT(nn.Module):
    """litgpt's ``CausalSelfAttention`` (litgpt/model.py), with weights ``attn.qkv`` and ``attn.proj``."""

    def __init__(self, width: int, heads: int, layer: str = "qkv") -> None:
        super().__init__()
        self.config = SimpleNamespace(n_embd=width, n_head=heads, n_query_groups=2, head_size=width // heads)
        self.layer, self.proj = layer, nn.Linear(width, width)
        self.add_module(layer, nn.Linear(width, (heads + 4) * self.config.head_size))

    def forward(self, x: Tensor) -> Tensor:
        sizes = [its * self.config.head_size for its in (self.config.n_head, 2, 2)]
        q, k, v = self.get_submodule(self.layer)(x).split(sizes, dim=-1)
        return self.proj(attended(q, k, v, self.config.n_head, 2))


LitGPT.__module__ = "litgpt.model"


class TitanFused(nn.Module):
    """torchtitan's feed-forward layer with gate and up in one weight."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w13, self.w2 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, -1)
        return self.w2(nn.functional.silu(gate) * up)


IMAGE, CHANNELS, SIZE = (2, 4, 4, 32), (2, 32, 4, 4), ((4, 4),)
TIMM: dict[str, Layer] = {
    "vit": Layer("timm.layers.attention.Attention"),
    "naflexvit": Layer("timm.layers.attention.AttentionRope"),
    "maxxvit, rw": Layer("timm.models.maxxvit.AttentionCl", (32,), {"dim_head": 8}, IMAGE),
    "maxvit, tf": Layer(
        "timm.models.maxxvit.AttentionCl", (32,), {"dim_head": 8, "head_first": False}, IMAGE
    ),
    "levit": Layer("timm.models.levit.Attention", (32, 8, 4), {"resolution": (4, 4)}),
    "levit, smaller": Layer("timm.models.levit.AttentionDownsample", (32, 48, 8, 4), {"resolution": (4, 4)}),
    "efficientformer": Layer("timm.models.efficientformer.Attention", (32, 8, 4), {"resolution": 4}),
    "hiera": Layer("timm.models.hiera.MaskUnitAttention", (32, 64, 4)),
    "hieradet": Layer("timm.models.hieradet_sam2.MultiScaleAttention", (32, 64, 4), {}, IMAGE),
    "swin": Layer("timm.models.swin_transformer.WindowAttention", (32, 4), {"window_size": 4}),
    "swinv2": Layer("timm.models.swin_transformer_v2.WindowAttention", (32, (4, 4), 4)),
    "swinv2_cr": Layer("timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention", (32, 4, (4, 4))),
    "xcit": Layer("timm.models.xcit.XCA", (32, 4)),
    "cait": Layer("timm.models.cait.TalkingHeadAttn", (32, 4)),
    "pvt_v2": Layer(
        "timm.models.pvt_v2.Attention", (32, 4), {"sr_ratio": 1, "linear_attn": False}, beside=SIZE
    ),
    "twins": Layer("timm.models.twins.GlobalSubSampleAttn", (32, 4), {"sr_ratio": 1}, beside=SIZE),
    "davit": Layer("timm.models.davit.ChannelAttention"),
    "edgenext": Layer("timm.models.edgenext.CrossCovarianceAttn"),
    "beit": Layer("timm.models.beit.Attention"),
    "convit": Layer("timm.models.convit.GPSA"),
    "tnt": Layer("timm.models.tnt.Attention", (32, 32, 4)),
    "nest": Layer("timm.models.nest.Attention", shape=(2, 2, 16, 32)),
    "volo": Layer("timm.models.volo.ClassAttention"),
    "fastvit": Layer("timm.models.fastvit.Attention", (32,), {"head_dim": 8}, CHANNELS),
    "metaformer": Layer("timm.models.metaformer.Attention", (32,), {"head_dim": 8}),
    "glu mlp": Layer("timm.layers.mlp.GluMlp", (32, 96)),
    "attention pool": Layer("timm.layers.attention_pool.AttentionPoolLatent", (32,), {"num_heads": 4}),
}
OTHERS: dict[str, Layer] = {
    "torchvision, swin": Layer(
        "torchvision.models.swin_transformer.ShiftedWindowAttention", (32, [2, 2], [0, 0], 4), {}, IMAGE
    ),
    "torchvision, maxvit": Layer(
        "torchvision.models.maxvit.RelativePositionalMultiHeadAttention", (32, 8, 16), {}, (2, 2, 16, 32)
    ),
    "nanoGPT": Layer(f"{__name__}.CausalSelfAttention"),
    "litgpt": Layer(f"{__name__}.LitGPT"),
    "torchtitan, fused": Layer(f"{__name__}.TitanFused", (32, 48)),
    "torch, LSTM": Layer("torch.nn.LSTM", (32, 16), {"bias": False, "batch_first": True}),
    "torch, GRU": Layer("torch.nn.GRU", (32, 16), {"bias": False, "batch_first": True}),
}
GATES = ("torch, LSTM", "torch, GRU")
"""Layers whose kernels hide their operands. Their matrices are taken from torch's documentation."""
SEPARATE = {
    "nanochat": {"c_q": 32, "c_k": 16, "c_v": 16, "c_proj": 32, "c_fc": 128},
    "torchtitan": {"wq": 32, "wk": 16, "wv": 16, "wo": 32, "w1": 64, "w3": 64, "w2": 32},
}
"""The number of outputs of each weight. Each weight holds a single matrix."""

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parts.md"
LAYERS = {**{f"timm, {name}": it for name, it in TIMM.items()}, **OTHERS}


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in GATES])
def test_parts_are_those_that_the_layer_uses(name: str) -> None:
    layer = LAYERS[name]
    model = layer.build()
    x = torch.randn(layer.shape, generator=torch.Generator().manual_seed(0)).double()
    assert any(it.parts for it in hidden(model))
    assert wrong_parts(model, {"x": x}) == {}


@pytest.mark.parametrize("rows", SEPARATE.values(), ids=SEPARATE)
def test_separate_weights_stay_whole(rows: dict[str, int]) -> None:
    model = nn.ModuleDict({name: nn.Linear(32, out) for name, out in rows.items()})
    assert [(it.name, it.parts) for it in hidden(model)] == [(f"{name}.weight", None) for name in rows]


def test_an_attention_whose_layout_its_name_does_not_decide_asks_for_it() -> None:
    """litgpt's ``attn`` held its parts group by group; newer versions hold one part after the other."""
    model = Taking(LitGPT(32, 4, "attn"), ())
    with pytest.warns(UserWarning, match=r"block\.attn\.weight \(64 × 32\) suggest several matrices"):
        split_parameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_parameters(model, parts={"*.attn.weight": ("interleaved", 16, 8, 8)})
        plain = Taking(nn.Sequential(nn.Linear(32, 32)), ())
        assert split_parameters(plain).hidden_names == ["block.0.weight"]


def test_the_page_lists_every_layer_and_todays_parts() -> None:
    """Rows of packages that are not installed keep their layers, and are not checked further."""
    _, _, zoos = PAGE.read_text(encoding="utf-8").partition("| weight | holds | `parts` | layers |")
    listed = {
        tuple(cells[:3]): cells[3].split("; ")
        for row in zoos.splitlines()
        if row.startswith("| ") and (cells := row.strip("| ").split(" | "))
    }
    assert {name for names in listed.values() for name in names} == {*LAYERS}
    installed = [name for name, it in LAYERS.items() if importlib.util.find_spec(it.path.split(".")[0])]
    for row, names in rows(installed).items():
        assert set(names) <= set(listed[row]), row


def table() -> str:
    """A line for each fused weight of the zoos, all of which must be installed."""
    lines = (f"| {' | '.join(row)} | {'; '.join(names)} |" for row, names in sorted(rows([*LAYERS]).items()))
    return "\n".join(["| weight | holds | `parts` | layers |", "|---|---|---|---|", *lines])


def rows(layers: list[str]) -> dict[tuple[str, ...], list[str]]:
    """For each fused weight (its name, what it holds, and its parts), the layers that have it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in layers:
        for it in hidden(LAYERS[name].build()):
            if it.parts:
                weight = re.sub(r"^block\.|\.weight$", "", it.name)
                row = weight, it.why.removeprefix("hidden matrix, "), f"`{it.parts}`"
                found.setdefault(row, []).append(name)
    return found


if __name__ == "__main__":
    print(table())
