"""A model's shape from its module: hidden matrices as ``split_parameters`` finds them.

Reads names and shapes alone, so that a module on the meta device will do. Refuses to guess how tensor
parallelism would cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..optimizer.parameter_split import Verdict
from ..optimizer.split_parameters import split_parameters
from ..plan.matrix import part_boxes
from .model_shape import MatrixFamily, ModelShape, OtherFamily


@dataclass(frozen=True, slots=True)
class FoundMatrix:
    """A matrix of a module: its name with stars for layer and expert, which those are, and how many it is.

    ``layer`` is None outside numbered layers, ``expert`` None outside experts; ``stack`` is how many experts
    lie in one parameter, 0 where it is one matrix.
    """

    name: str
    shape: tuple[int, int]
    layer: int | None
    expert: int | None
    stack: int = 0


def shape_from_module(model: nn.Module, name: str, source: str) -> ModelShape:
    """The shape of a module. Experts go to Muon; frozen parameters count nowhere, since nobody steps them.

    A layer's number is the first in a parameter's name that is not an expert's. What lies outside numbered
    layers counts to the first of them if it comes before them, to the last otherwise.

    >>> shape = shape_from_module(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), "two", "written here")
    >>> [(family.name, family.shape, family.layers) for family in shape.families], shape.rest
    ([('*.weight', (6, 4), (0,)), ('*.weight', (4, 6), (1,))], 10)
    """
    verdicts = [it for it in split_parameters(model, experts="muon").verdicts if it.who != "left out"]
    numbers = [layer for verdict in verdicts if (layer := _starred(verdict.name)[1]) is not None]
    layers = max(numbers, default=0) + 1
    families: dict[tuple[str, tuple[int, int]], dict[int, int]] = {}
    others: dict[tuple[str, int], list[int]] = {}
    outside = 0
    for verdict in verdicts:
        at = _starred(verdict.name)[1]
        outside = layers - 1 if at is not None else outside
        layer = outside if at is None else at
        if verdict.who == "AdamW":
            others.setdefault((_starred(verdict.name)[0], verdict.param.numel()), []).append(layer)
            continue
        for found in _matrices(verdict):
            held = families.setdefault((found.name, found.shape), {})
            one = found.stack or (0 if found.expert is None else 1)
            held[layer] = held.get(layer, 0) + one
    made = tuple(_families(families))
    experts = max((family.experts for family in made), default=0)
    return ModelShape(name, source, layers, None, None, experts, made, tuple(_others(others)))


def _families(found: dict[tuple[str, tuple[int, int]], dict[int, int]]) -> Iterator[MatrixFamily]:
    """Families of matrices, those with another number of experts in some layers apart."""
    for (name, shape), by_layer in found.items():
        for experts in sorted(set(by_layer.values())):
            layers = tuple(layer for layer, held in by_layer.items() if held == experts)
            yield MatrixFamily(name, shape, None, layers, experts)


def _others(found: dict[tuple[str, int], list[int]]) -> Iterator[OtherFamily]:
    """Those of several experts in a layer are one."""
    for (name, size), layers in found.items():
        for times in sorted({layers.count(layer) for layer in layers}):
            once = tuple(layer for layer in dict.fromkeys(layers) if layers.count(layer) == times)
            yield OtherFamily(name, size * times, None, once)


def _matrices(verdict: Verdict) -> Iterator[FoundMatrix]:
    """The matrices of a parameter, each (out, in)."""
    shape = tuple(verdict.param.shape)
    name, layer, expert = _starred(verdict.name)
    if verdict.parts == "stack":
        yield FoundMatrix(
            f"{name}[*]", _sides(shape[-2:], verdict.transposed), layer, None, math.prod(shape[:-2])
        )
        return
    boxes = part_boxes(shape, verdict.parts, verdict.transposed)
    if boxes is None:
        yield FoundMatrix(name, _sides(shape, verdict.transposed), layer, expert)
        return
    for part, box in enumerate(boxes):
        yield FoundMatrix(f"{name}[part {part}]", _sides(box.shape, verdict.transposed), layer, expert)


def _sides(shape: Sequence[int], transposed: bool) -> tuple[int, int]:
    rows, columns = shape[0], math.prod(shape[1:])
    return (columns, rows) if transposed else (rows, columns)


def _starred(name: str) -> tuple[str, int | None, int | None]:
    """A parameter's name with stars for its layer and its expert, and both numbers.

    >>> _starred("h.3.mlp.experts.5.blocks.1.up")
    ('h.*.mlp.experts.*.blocks.1.up', 3, 5)
    """
    words, layer, expert = name.split("."), None, None
    for i, word in enumerate(words):
        if not word.isdecimal():
            continue
        if expert is None and i and "expert" in words[i - 1].lower():
            expert, words[i] = int(word), "*"
        elif layer is None:
            layer, words[i] = int(word), "*"
    return ".".join(words), layer, expert
