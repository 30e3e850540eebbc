"""Parts of fused weights in timm, torchvision and nanoGPT are those that their layers use.

As in ``test_model_parts``, no layout is written down: each attention, or gated layer, runs forward.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muon_tutorial import split_parameters
from muon_tutorial.optimizer.parameter_split import Verdict

from .operands import lines_used_together
from .test_model_parts import own_parts


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a zoo, its arguments, and its input's shape."""

    path: str
    arguments: tuple[Any, ...] = (32, 4)
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (2, 16, 32)
    beside: tuple[Any, ...] = ()

    def build(self) -> nn.Module:
        """The layer, with weights that let every activation pass its input on."""
        module, name = self.path.rsplit(".", 1)
        if module == __name__:
            made: nn.Module = globals()[name](*self.arguments)
        else:
            pytest.importorskip(module.split(".")[0])
            made = getattr(importlib.import_module(module), name)(*self.arguments, **self.options)
        torch.manual_seed(0)
        for param in made.parameters():
            nn.init.normal_(param.detach(), std=0.3) if param.ndim > 1 else param.detach().uniform_(0.1, 0.5)
        return Taking(made, self.beside).double().eval()


class Taking(nn.Module):
    """A layer inside a model, with its arguments besides the input."""

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
        q, k, v = (
            it.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for it in self.c_attn(x).split(self.n_embd, dim=2)
        )
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(made.transpose(1, 2).flatten(2))


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
}
LAYERS = {**{f"timm, {name}": it for name, it in TIMM.items()}, **OTHERS}


def hidden(name: str, model: nn.Module) -> list[Verdict]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The names of")  # no layout is left to the user
        return [it for it in split_parameters(model).verdicts if it.who == "Muon"]


@pytest.mark.parametrize("name", LAYERS)
def test_parts_are_those_that_the_layer_uses(name: str) -> None:
    layer = LAYERS[name]
    model = layer.build()
    its = hidden(name, model)
    x = torch.randn(layer.shape, generator=torch.Generator().manual_seed(0)).double()
    params: list[Tensor] = [it.param for it in its]
    used = lines_used_together(model, params, [-2] * len(its), {"x": x})
    assert any(it.parts for it in its)
    wrong = {
        it.name: (used_parts, mine)
        for it, stack in zip(its, used, strict=True)
        for used_parts, mine in zip(stack, own_parts(it), strict=True)
        if used_parts and used_parts != mine
    }
    assert wrong == {}


def table() -> str:
    """A line for each fused weight of the zoos that are installed."""
    found: dict[tuple[str, str, str], list[str]] = {}
    build: Callable[[str], nn.Module] = lambda name: LAYERS[name].build()  # noqa: E731
    for name in LAYERS:
        for it in hidden(name, build(name)):
            if it.parts:
                weight = re.sub(r"^block\.|\.weight$", "", it.name)
                found.setdefault(
                    (weight, it.why.removeprefix("hidden matrix, "), f"`{it.parts}`"), []
                ).append(name)
    rows = (f"| {' | '.join(row)} | {'; '.join(names)} |" for row, names in sorted(found.items()))
    return "\n".join(["| weight | holds | `parts` | layers |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
