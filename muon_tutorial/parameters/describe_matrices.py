"""Describes an optimizer's parameters as a plan's matrices, and refuses others. It reads only metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import NotAMatrixError, UsageError
from ..plan.grid import Coordinate
from ..plan.matrix import Matrix, Parts, split_parts
from ..step.parameter_state import gradient_dtype, group_parts
from .dtensor_placements import check_axes, dtensor_cuts
from .tensor_parallel import TpDim, plain_cuts, plain_tp_dim

Group = TypeVar("Group", bound=Mapping[str, Any])

FLATTENED = (
    "FSDP1 (FullyShardedDataParallel) and DeepSpeed's ZeRO flatten parameters, and a part of a flat parameter"
    " cannot be orthogonalized; use FSDP2 (fully_shard, Accelerate's fsdp_version=2), or ZeRO stage 0"
)


def describe_matrices(
    groups: Sequence[Mapping[str, Any]], at: Coordinate, tp_dim: TpDim, indices: Sequence[int] | None = None
) -> list[Matrix]:
    """Return the matrices in the optimizer's parameters, in order of groups.

    A DTensor's placements say how tensor parallelism cuts it. For a plain parameter, the attribute
    ``partition_dim`` names the dimension, as in Megatron; if it is negative, the parameter is not cut. For an
    uneven cut, the attribute ``partition_sizes`` lists one length per position. For plain parameters without
    ``partition_dim``, ``tp_dim`` applies. As a mapping or function, it gets a parameter's entry in
    ``indices`` or, without these, its place in the list.

    Raises:
        StrategyError: a parameter is cut along another axis than ``tp``, or in a way that its shape does not
            allow.
    """
    matrices: list[Matrix] = []
    params = [
        (name, param, number)
        for number, group in enumerate(groups)
        for name, param in named_params(group, number)
    ]
    tp_dim = plain_tp_dim((param for _, param, _ in params), tp_dim)
    for index, (name, param, number) in enumerate(params):
        if isinstance(param, DTensor):
            cuts, shape = dtensor_cuts(name, param), tuple(param.shape)
            check_axes(name, param, cuts, at)
        else:
            cuts, shape = plain_cuts(indices[index] if indices else index, name, param, tp_dim, at)
        whole = Matrix(index, name, shape, cuts, number, param.dtype, gradient_dtype(param))
        parts, transposed = group_parts(groups[number])
        matrices += split_parts(whole, parts, len(matrices), transposed)
    return matrices


def named_params(group: Mapping[str, Any], index: int) -> list[tuple[str, Tensor]]:
    """Return a group's parameters with their names, or with their positions if they have no names.

    Raises:
        UsageError: there are more or fewer names than parameters, because a framework replaced parameters.
    """
    names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(group["params"]))]
    if len(names) != len(group["params"]):
        number = f"{len(names)} names, from {names[0]} on, but {len(group['params'])} parameters"
        raise UsageError(f"a group has {number} now: {FLATTENED}")
    return list(zip(names, group["params"], strict=True))


def all_named(groups: Sequence[Group]) -> list[tuple[str, Tensor, Group]]:
    """Return the parameters of all groups, each with its name, as in ``named_params``, and its group."""
    return [(*pair, group) for number, group in enumerate(groups) for pair in named_params(group, number)]


def check_matrices(group: Mapping[str, Any], index: int) -> None:
    """Raise ``NotAMatrixError`` if some parameters are not dense real matrices. The message names them."""
    wrong = [
        f"{name} ({complaint})"
        for name, param in named_params(group, index)
        if (complaint := _why_not_a_matrix(param, group.get("parts")))
    ]
    if wrong:
        flat = any(hasattr(param, "_fsdp_flattened") for param in group["params"])
        remedy = (
            "split_parameters(model) sorts a model's parameters into those for Muon and those for "
            "torch.optim.AdamW; a stack of matrices or a convolution can stay, in a group with "
            'parts="stack" or parts="flatten"'
        )
        raise NotAMatrixError(
            f"Muon takes only matrices; these are not: {', '.join(wrong)}. {FLATTENED if flat else remedy}"
        )


def _why_not_a_matrix(param: Tensor, parts: Parts) -> str:
    stacked = parts in ("stack", "flatten") or (isinstance(parts, tuple) and parts[:1] == ("stack",))
    if param.ndim != 2 and (not stacked or param.ndim < 2):
        return f"shape {tuple(param.shape)}"
    if param.is_complex():
        return "complex"
    return "sparse" if param.layout is not torch.strided else ""
