"""Describes an optimizer's parameters as the matrices of a plan. It reads only metadata.

How tensor parallelism has cut a plain parameter follows from its attributes, or from the user's ``tp_dim``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import StrategyError, UsageError
from ..plan.grid import Coordinate
from ..plan.layout import Shard
from ..plan.matrix import Cut, Matrix, split_parts
from ..step.parameter_state import gradient_dtype, group_parts
from .dtensor_placements import check_axes, dtensor_cuts

TpDim = int | None | Mapping[int, int | None] | Callable[[int, Tensor], int | None]

Group = TypeVar("Group", bound=Mapping[str, Any])

FLATTENED = (
    "FSDP1 (FullyShardedDataParallel) and DeepSpeed's ZeRO flatten parameters, and a part of a flat parameter"
    " cannot be orthogonalized; use FSDP2 (fully_shard, Accelerate's fsdp_version=2), or ZeRO stage 0"
)


def describe_matrices(groups: Sequence[Mapping[str, Any]], at: Coordinate, tp_dim: TpDim) -> list[Matrix]:
    """Return the matrices in the optimizer's parameters, in order of groups.

    A DTensor's placements say how tensor parallelism cuts it. For a plain parameter, the attribute
    ``partition_dim`` names the dimension, as in Megatron; if it is negative, the parameter is not cut. For an
    uneven cut, the attribute ``partition_sizes`` lists one length per position. For plain parameters without
    ``partition_dim``, ``tp_dim`` applies.

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
            cuts, shape = plain_cuts(index, name, param, tp_dim, at)
        whole = Matrix(index, name, shape, cuts, number, param.dtype, gradient_dtype(param))
        parts, transposed = group_parts(groups[number])
        matrices += split_parts(whole, parts, len(matrices), transposed)
    return matrices


def plain_cuts(
    index: int, name: str, param: Tensor, tp_dim: TpDim, at: Coordinate
) -> tuple[tuple[Cut, ...], tuple[int, ...]]:
    """Return a plain parameter's cut over tp, if there is one, and its whole shape.

    Raises:
        StrategyError: the parameter's ``partition_sizes`` do not fit its shape on this rank.
    """
    dim = chosen_tp_dim(index, name, param, tp_dim) if at.size("tp") > 1 else None
    if dim is None:
        return (), tuple(param.shape)
    own, here, parts = getattr(param, "partition_sizes", None), param.shape[dim], at.size("tp")
    sizes = (here,) * parts if own is None else tuple(own)
    if len(sizes) != parts or sizes[at["tp"]] != here:
        raise StrategyError(
            f"{name}: partition_sizes {sizes} do not fit the {here} indices that this rank holds "
            f"at tp={at['tp']} of {parts}"
        )
    shape = tuple(sum(sizes) if it == dim else length for it, length in enumerate(param.shape))
    return (("tp", Shard(dim, None if own is None else sizes)),), shape


def chosen_tp_dim(index: int, name: str, param: Tensor, tp_dim: TpDim) -> int | None:
    """Return the dimension along which tensor parallelism has cut a plain parameter, or None.

    A parameter's ``partition_dim``, as in Megatron, is used instead of ``tp_dim``; a negative
    ``partition_dim`` means that the parameter is not cut.

    Raises:
        StrategyError: ``tp_dim`` has no entry for the parameter, or names no dimension of it.
    """
    dim = getattr(param, "partition_dim", None)
    if dim is not None and dim < 0:
        return None
    if dim is None:
        if isinstance(tp_dim, Mapping) and index not in tp_dim:
            raise StrategyError(f"tp_dim has no entry for parameter {index}: give None if tp does not cut it")
        chosen = tp_dim[index] if isinstance(tp_dim, Mapping) else tp_dim
        dim = chosen(index, param) if callable(chosen) else chosen
    if dim is not None and not 0 <= dim < param.ndim:
        raise StrategyError(
            f"{name} has dimensions 0 to {param.ndim - 1}, not {dim}: set its partition_dim (or tp_dim if it "
            "has no partition_dim) to one of these dimensions, or to None"
        )
    return dim


def plain_tp_dim(params: Iterable[Tensor], tp_dim: TpDim) -> TpDim:
    """Return the ``tp_dim`` that applies to the plain parameters among ``params``.

    A single number is meant for models that are cut by hand. If some parameters are DTensors, PyTorch has cut
    the model and left plain parameters whole, so the number is ignored. A mapping or a function
    always applies.
    """
    if isinstance(tp_dim, int) and any(isinstance(param, DTensor) for param in params):
        return None
    return tp_dim


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
