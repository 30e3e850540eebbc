"""Finds which rows of a weight a model uses together, by watching the model; it knows no layouts.

Attention multiplies queries by keys and weights by values, and a gated layer multiplies gate by up. Each
operand of such a product depends on only some rows of a fused weight. The operand's derivative shows on which
rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from muon_tutorial import Box, split_parameters
from muon_tutorial.optimizer.split_table import SplitVerdict
from muon_tutorial.plan.matrix import part_boxes

PRODUCTS = {
    *("mul", "mul_", "rmul", "matmul", "rmatmul", "bmm", "baddbmm", "einsum"),
    "scaled_dot_product_attention",
}
ACTIVATIONS = {"silu", "gelu", "sigmoid", "tanh", "softplus", "relu"}


class Operands(TorchFunctionMode):
    """Records the operands of products of two computed tensors, and the inputs of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in PRODUCTS | ACTIVATIONS:
            given = [one for it in (*args, *kwargs.values()) for one in (it if type(it) is tuple else (it,))]
            made = [it for it in given if isinstance(it, Tensor) and it.grad_fn is not None]
            if len(made) > (name in PRODUCTS):
                self.found += [it for it in made if all(it is not other for other in self.found)]
        if name == "relu":  # a row that relu sets to zero everywhere would seem unused
            return nn.functional.softplus(args[0])
        if name == "maximum":  # a row that is always the smaller one would seem unused
            return torch.logaddexp(*args)
        return func(*args, **kwargs)


def filled(model: nn.Module, std: float) -> nn.Module:
    """The model, with weights such that no activation blocks its input."""
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param.detach(), std=std) if param.ndim > 1 else param.detach().uniform_(0.1, 0.5)
    return model


def hidden(model: nn.Module, **options: Any) -> list[SplitVerdict]:
    """The parameters that ``split_parameters`` gives to Muon; users need not state any layout."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The names of")
        return [it for it in split_parameters(model, **options).verdicts if it.who == "Muon"]


def wrong_parts(model: nn.Module, inputs: Any, **options: Any) -> dict[str, object]:
    """For each weight whose parts are not those that the model uses: the used parts, and ours."""
    its = hidden(model, **options)
    by_head = options.get("heads") == "apart"
    used = _lines_used_together(model, [it.param for it in its], [_dim(it) for it in its], inputs, by_head)
    return {
        it.name: (theirs, mine)
        for it, stack in zip(its, used, strict=True)
        for theirs, mine in zip(stack, _own_parts(it), strict=True)
        if theirs and theirs != mine
    }


def _lines_used_together(
    model: nn.Module, params: Sequence[Tensor], dims: Sequence[int], inputs: Any, by_head: bool
) -> list[list[set[frozenset[int]]]]:
    """For each matrix of each parameter, group its lines: lines of one set influence the same operands.

    ``by_head`` counts each head of an operand [batch, heads, tokens, …] separately. Lines that influence no
    operand, such as those of an expert that no token chose, are left out.
    """
    with Operands() as seen:
        model(**inputs)
    reached: list[list[Tensor]] = [[] for _ in params]
    torch.manual_seed(1)
    heads = [one for it in seen.found for one in (it.unbind(1) if by_head and it.ndim == 4 else (it,))]
    for operand in heads:
        grads = torch.autograd.grad(
            operand, params, torch.randn_like(operand), retain_graph=True, allow_unused=True
        )
        for its, param, dim, grad in zip(reached, params, dims, grads, strict=True):
            grad = torch.zeros_like(param) if grad is None else grad
            its.append((grad != 0).any(-1 if dim == -2 else -2).reshape(-1, param.shape[dim]))
    return [[_alike(stack) for stack in torch.stack(its, -1)] for its in reached]


def _alike(lines: Tensor) -> set[frozenset[int]]:
    """Group equal lines of [lines, operands] into sets."""
    alike: dict[tuple[bool, ...], list[int]] = {}
    for index, reaches in enumerate(lines.tolist()):
        if any(reaches):
            alike.setdefault(tuple(reaches), []).append(index)
    return {frozenset(its) for its in alike.values()}


def _own_parts(verdict: SplitVerdict) -> list[set[frozenset[int]]]:
    """For each matrix of a stack: the lines of each part, as sets."""
    shape = tuple(verdict.param.shape)
    lines = torch.arange(shape[_dim(verdict)])
    lines = lines[None, :] if verdict.transposed else lines[:, None]
    numbers = lines.expand(shape)
    stacks: dict[tuple[int, ...], set[frozenset[int]]] = {}
    places = part_boxes(shape, verdict.parts, verdict.transposed)
    for box, runs in places or [(Box((0,) * len(shape), shape), None)]:
        index: list[Any] = list(box.slices)
        if runs is not None:
            index[runs.dim] = [box.offset[runs.dim] + runs.line(i) for i in range(box.shape[runs.dim])]
        part = frozenset(numbers[tuple(index)].flatten().tolist())
        stacks.setdefault(box.offset[:-2], set()).add(part)
    return [stacks[lead] for lead in sorted(stacks)]


def _dim(verdict: SplitVerdict) -> int:
    return -1 if verdict.transposed else -2
