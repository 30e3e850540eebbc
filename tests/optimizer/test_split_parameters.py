"""Which parameters go to Muon: hidden matrices only, each parameter once, tied ones by any of their roles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muon_tutorial.errors import UsageError
from muon_tutorial.optimizer.muon import Muon
from muon_tutorial.optimizer.split_parameters import split_parameters


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)


class GPT(nn.Module):
    """The usual shape: token and position embeddings, blocks, a final norm and a head."""

    def __init__(self, head: str = "lm_head", width: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(9, width)
        self.pos_emb = nn.Parameter(torch.zeros(5, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.add_module(head, nn.Linear(width, 9, bias=False))


HIDDEN = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]


def names(model: nn.Module, **options) -> tuple[list[str], list[str]]:
    hidden, rest = split_parameters(model, **options)
    return [name for name, _ in hidden], [name for name, _ in rest]


def test_hidden_matrices_go_to_muon() -> None:
    hidden, rest = names(GPT())
    assert hidden == HIDDEN
    assert {"wte.weight", "pos_emb", "lm_head.weight", "blocks.0.norm.weight", "blocks.0.up.bias"} <= set(
        rest
    )


@pytest.mark.parametrize("head", ["lm_head", "head", "output", "unembed", "classifier", "embed_out"])
def test_heads_are_known_by_name(head: str) -> None:
    assert names(GPT(head))[0] == HIDDEN


class VocabParallelEmbedding(nn.Module):
    """An embedding of another library, known by its class name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 4))


def tied_to_a_table() -> nn.ModuleDict:
    model = nn.ModuleDict({"first": nn.Linear(4, 9, bias=False), "table": nn.Embedding(9, 4)})
    model["first"].weight = model["table"].weight
    return model


LAYER = nn.Linear(4, 4, bias=False)
SMALL: dict[str, tuple[nn.Module, list[str], list[str]]] = {
    "a layer's own output": (nn.ModuleList([nn.ModuleDict({"output": LAYER})]), ["0.output.weight"], []),
    "a shared layer": (nn.Sequential(LAYER, LAYER), ["0.weight"], []),
    "a layer that is also the head": (
        nn.ModuleDict({"first": LAYER, "lm_head": LAYER}),
        [],
        ["first.weight"],
    ),
    "a matrix tied to an embedding": (tied_to_a_table(), [], ["first.weight"]),
    "complex": (nn.Linear(3, 3, bias=False, dtype=torch.complex64), [], ["weight"]),
    "a foreign embedding": (nn.Sequential(VocabParallelEmbedding()), [], ["0.weight"]),
    "convolution": (nn.Sequential(nn.Conv1d(4, 4, 3)), [], ["0.weight", "0.bias"]),
    "bag": (nn.Sequential(nn.EmbeddingBag(9, 4)), [], ["0.weight"]),
    "norm": (nn.Sequential(nn.LayerNorm(4)), [], ["0.weight", "0.bias"]),
    "PReLU": (nn.Sequential(nn.PReLU()), [], ["0.weight"]),
}


@pytest.mark.parametrize(("module", "hidden", "rest"), SMALL.values(), ids=SMALL)
def test_small_modules_are_split_by_what_they_are(
    module: nn.Module, hidden: list[str], rest: list[str]
) -> None:
    assert names(module) == (hidden, rest)


def test_every_parameter_is_in_one_list() -> None:
    model = GPT()
    hidden, rest = split_parameters(model)
    assert sorted([*hidden, *rest], key=lambda pair: pair[0]) == sorted(
        model.named_parameters(), key=lambda pair: pair[0]
    )
    assert Muon(hidden).param_groups[0]["param_names"] == HIDDEN


@pytest.mark.parametrize("first", ["wte", "lm_head"])
def test_tied_weights_go_to_the_rest_once(first: str) -> None:
    model = GPT()
    model.lm_head.weight = model.wte.weight  # type: ignore[union-attr]
    if first == "lm_head":  # the embedding registered last: its weight is found under the head's name
        model.wte = model._modules.pop("wte")  # type: ignore[assignment]
    hidden, rest = names(model)
    assert hidden == HIDDEN
    assert [name for name in rest if name.startswith(("wte", "lm_head"))] == [f"{first}.weight"]


def test_patterns_hold_back_more() -> None:
    hidden, rest = names(GPT(), exclude=["blocks.1.*", "*.up.weight"])
    assert hidden == ["blocks.0.down.weight"]
    assert "blocks.1.down.weight" in rest


def test_frozen_parameters_are_split_like_others() -> None:
    model = GPT()
    model.requires_grad_(False)
    assert names(model) == names(GPT())


def test_other_than_modules_and_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="got list"):
        split_parameters([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"exclude matches no parameter of the model: 'layers\.\*'"):
        split_parameters(GPT(), exclude=["layers.*", "wte.*"])
