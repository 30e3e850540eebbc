"""Reads a model's shape from its module. ``split_parameters`` finds the hidden matrices.

Only names and shapes are read, so a module on the meta device is enough. If names and shapes show that a
weight holds several matrices, these are counted separately, so that a module and its config give the same
plan; a note names such weights. This module does not guess how tensor parallelism would cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import UsageError
from ..optimizer.split_parameters import split_parameters
from ..optimizer.split_table import SplitVerdict
from ..plan.layout import Replicate, Shard
from ..plan.matrix import part_boxes
from .model_shape import FUSED_APART, FUSED_WHOLE, Cut, MatrixFamily, ModelShape, OtherFamily

GATE_UP = ("gate_up_proj", "gate_up", "fused_w1w3", "w13")
QKV = ("qkv_proj", "qkv", "Wqkv", "query_key_value", "c_attn")
TALL = 32
"""An expert's weight with more rows per column than this may hold several experts; a note says so."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "num_routed_experts", "n_routed_experts")
"""Attributes with the number of experts, in modules that stack experts in a weight's rows (as in xtuner)."""


def shape_from_module(
    model: nn.Module, name: str, source: str, styles: Mapping[str, str] | None = None
) -> ModelShape:
    """The shape of a module. Experts go to Muon; frozen parameters, which no optimizer steps, do not count.

    A layer's number is the first number in a parameter's name that is no expert's number. Parameters outside
    of numbered layers belong to the first layer if they come before all layers, and to the last otherwise.
    ``styles`` say how tensor parallelism cuts, in the terms of transformers' ``tp_plan``.

    Raises:
        UsageError: a parameter has no shape yet, as in ``nn.LazyLinear``.

    >>> shape = shape_from_module(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), "two", "written here")
    >>> [(family.name, family.shape, family.layers) for family in shape.families], shape.rest
    ([('*.weight', (6, 4), (0,)), ('*.weight', (4, 6), (1,))], 10)
    """
    if lazy := [name for name, param in model.named_parameters() if is_lazy(param)]:
        raise UsageError(
            f"{source}: {lazy[0]} has no shape yet, as in nn.LazyLinear: give that layer its sizes, or call "
            "the module once on an example"
        )
    verdicts = [it for it in split_parameters(model, experts="muon").verdicts if it.who != "left out"]
    beside: dict[str, list[tuple[int, int]]] = {}
    for it in verdicts:
        beside.setdefault(_layer(it.name)[0], []).append(_sides((*it.param.shape, 1), it.transposed))
    folded = _experts_in_rows(model)
    numbers = [layer for verdict in verdicts if (layer := _starred(verdict.name)[1]) is not None]
    layers = max(numbers, default=0) + 1
    families: dict[tuple[str, tuple[int, int], Cut], dict[int, int]] = {}
    others: dict[tuple[str, int, Cut], list[int]] = {}
    fused: dict[str, dict[str, None]] = {}
    outside = 0
    for verdict in verdicts:
        at, cut = _starred(verdict.name)[1], _cut(styles or {}, verdict)
        outside = layers - 1 if at is not None else outside
        layer = outside if at is None else at
        if verdict.who == "AdamW":
            others.setdefault((_starred(verdict.name)[0], verdict.param.numel(), cut), []).append(layer)
            continue
        home, own = _layer(verdict.name)
        matrices, experts, note = _matrices(verdict, beside[home], folded.get(id(verdict.param), 0))
        fused.setdefault(note, {})[own] = None
        for found in matrices:
            held = families.setdefault((*found, cut), {})
            held[layer] = held.get(layer, 0) + experts
    made = tuple(_families(families))
    experts = max((family.experts for family in made), default=0)
    met = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    met = met if experts and isinstance(met, int) else None
    notes = tuple(note.format(", ".join(names)) for note, names in fused.items() if note)
    return ModelShape(name, source, layers, None, None, experts, made, tuple(_others(others)), met, notes)


def _cut(styles: Mapping[str, str], verdict: SplitVerdict) -> Cut:
    """How tensor parallelism cuts a parameter; None if no hidden layer has a style."""
    if not any("*" in pattern for pattern in styles):
        return None
    path = ".".join("*" if word.isdecimal() else word for word in verdict.name.split("."))
    style = styles.get(path.rpartition(".")[0], styles.get(path, ""))
    if style.startswith(("colwise", "packed_colwise", "embedding_rowwise")):
        return Shard(0)
    return Shard(1) if verdict.who == "Muon" and style.startswith("rowwise") else Replicate()


def _families(found: dict[tuple[str, tuple[int, int], Cut], dict[int, int]]) -> Iterator[MatrixFamily]:
    """Families of matrices; layers with different numbers of experts are in different families."""
    for (name, shape, cut), by_layer in found.items():
        for experts in sorted(set(by_layer.values())):
            layers = tuple(layer for layer, held in by_layer.items() if held == experts)
            yield MatrixFamily(name, shape, cut, layers, experts)


def _others(found: dict[tuple[str, int, Cut], list[int]]) -> Iterator[OtherFamily]:
    """Families of other parameters; the experts of a layer are counted together."""
    for (name, size, cut), layers in found.items():
        for times in sorted({layers.count(layer) for layer in layers}):
            once = tuple(layer for layer in dict.fromkeys(layers) if layers.count(layer) == times)
            yield OtherFamily(name, size * times, cut, once)


def _matrices(
    verdict: SplitVerdict, beside: Sequence[tuple[int, int]], folds: int
) -> tuple[list[tuple[str, tuple[int, int]]], int, str]:
    """A parameter's matrices as (name, (out, in)); its number of experts; and a note about the parameter.

    The names have stars for layer and expert. The number is 0 if the parameter holds no expert, and the note
    is empty if it holds one matrix. ``beside``: rows and columns of the weights in the same module.
    ``folds``: how many experts are stacked in the parameter's rows.
    """
    name, _, expert = _starred(verdict.name)
    shape, whole = tuple(verdict.param.shape), "taken whole" in verdict.why
    stacked = "stack" in (verdict.parts, *(verdict.parts if isinstance(verdict.parts, tuple) else ())[:1])
    one = (*(1 for _ in shape[:-2]), *shape[-2:]) if stacked else shape
    stack, boxes = math.prod(shape[:-2]) if stacked else 0, part_boxes(one, verdict.parts, verdict.transposed)
    if boxes is not None and len(boxes) > 1:
        star = f"{name}[*]" if stack else name
        known = [(f"{star}[part {i}]", box.shape[-2:]) for i, (box, _) in enumerate(boxes)]
        sides = [(one, _sides(held, verdict.transposed)) for one, held in known]
        return sides, stack or int(expert is not None), ""
    rows, columns = _sides(shape[-2:] if stack else shape, verdict.transposed)
    if expert is None and "expert" in name.lower() and "shared" not in name.lower() and not stack:
        stack, rows = folds, rows // max(1, folds)
        whole = whole or rows > TALL * columns
    cut = _rows_apart(name, rows, columns, beside)
    apart = len(cut) > 1 or (stack and verdict.parts is None)
    star = f"{name}[*]" if stack else name
    names = [f"{star}[part {i}]" for i in range(len(cut))] if len(cut) > 1 else [star]
    found = [(one, (out, columns)) for one, out in zip(names, cut, strict=True)]
    return found, stack or int(expert is not None), FUSED_APART if apart else FUSED_WHOLE if whole else ""


def _experts_in_rows(model: nn.Module) -> dict[int, int]:
    """For each weight whose module states a number of experts: its id, and how many experts its rows hold."""
    return {
        id(param): count
        for module in model.modules()
        for param in module.parameters(recurse=False)
        for count in (getattr(module, key, None) for key in EXPERT_COUNTS)
        if isinstance(count, int) and param.ndim == 2 and count > 1 and param.shape[0] % count == 0
    }


def _rows_apart(name: str, rows: int, columns: int, beside: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The number of rows of each matrix in a weight (q, k and v, or gate and up, or a single matrix).

    q has as many rows as the output projection in the same module has columns; k and v share the other rows.

    >>> _rows_apart("h.*.attention.query_key_value.weight", 4672, 4544, [(4672, 4544), (4544, 4544)])
    (4544, 64, 64)
    """
    own = _layer(name)[1]
    if own in GATE_UP and rows % 2 == 0:
        return (rows // 2,) * 2
    inputs = {into for out, into in beside if out == columns and into < rows and (rows - into) % 2 == 0}
    queries = [into for into in inputs if into % ((rows - into) // 2) == 0]
    if own in QKV and len(queries) == 1:
        return (queries[0], *((rows - queries[0]) // 2,) * 2)
    return (rows,)


def _layer(name: str) -> list[str]:
    """The name of the module that holds a parameter's layer, and the layer's name in it.

    >>> _layer("h.0.attn.qkv.weight"), _layer("h.0.experts.gate_up_proj")
    (['h.0.attn', 'qkv'], ['h.0.experts', 'gate_up_proj'])
    """
    return ["", *name.removesuffix(".weight").rsplit(".", 1)][-2:]


def _sides(shape: Sequence[int], transposed: bool) -> tuple[int, int]:
    rows, columns = shape[0], math.prod(shape[1:])
    return (columns, rows) if transposed else (rows, columns)


def _starred(name: str) -> tuple[str, int | None, int | None]:
    """A parameter's name with stars for layer and expert, and the numbers of the layer and the expert.

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
