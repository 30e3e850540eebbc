"""Describes an optimizer's parameters as the matrices of a plan. Reads metadata; moves nothing.

How tensor parallelism cut plain parameters is read from their attributes, and from the user's ``tp_dim``.
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

Group = TypeVar("Group", bound=Mapping[str, Any])
TpDim = int | None | Mapping[int, int | None] | Callable[[int, Tensor], int | None]

FLATTENED = (
    "FSDP1 (FullyShardedDataParallel) and DeepSpeed's ZeRO flatten parameters, and a part of a flat one "
    "cannot be orthogonalized; use FSDP2 (fully_shard, Accelerate's fsdp_version=2), or ZeRO stage 0"
)


def describe_matrices(groups: Sequence[Mapping[str, Any]], at: Coordinate, tp_dim: TpDim) -> list[Matrix]:
    """The matrices in the optimizer's parameters, in order of groups.

    A parameter's tensor-parallel cut is read, in this order, from its DTensor placements, from its attributes
    ``partition_dim`` (as Megatron sets it; a negative one means not cut) and ``partition_sizes`` (one length
    per position, for uneven cuts made by hand), and from ``tp_dim``.

    Raises:
        StrategyError: a parameter is sharded along another axis than ``tp``, or its cut does not fit its
            shape.
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
            cuts = plain_cuts(index, name, param, tp_dim) if at.size("tp") > 1 else ()
            shape = whole_shape(name, param, cuts, at)
        whole = Matrix(index, name, shape, cuts, number, param.dtype, gradient_dtype(param))
        parts, transposed = group_parts(groups[number])
        matrices += split_parts(whole, parts, len(matrices), transposed)
    return matrices


def named_params(group: Mapping[str, Any], index: int) -> list[tuple[str, Tensor]]:
    """The parameters of an optimizer's group with their names, or with their positions if they have none.

    Raises:
        UsageError: there are more or fewer names than parameters, because a host has replaced these.
    """
    names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(group["params"]))]
    if len(names) != len(group["params"]):
        number = f"{len(names)} names, {names[0]} first, and {len(group['params'])} parameters"
        raise UsageError(f"a group has {number} now: {FLATTENED}")
    return list(zip(names, group["params"], strict=True))


def all_named(groups: Sequence[Group]) -> list[tuple[str, Tensor, Group]]:
    """The parameters of all groups, each with its name, as in ``named_params``, and with its group."""
    return [(*pair, group) for number, group in enumerate(groups) for pair in named_params(group, number)]


def plain_cuts(index: int, name: str, param: Tensor, tp_dim: TpDim) -> tuple[Cut, ...]:
    dim = chosen_tp_dim(index, param, tp_dim)
    if dim is None:
        return ()
    if dim >= param.ndim:
        raise StrategyError(f"{name} has dimensions 0 to {param.ndim - 1}; tp cannot cut it along {dim}")
    sizes = getattr(param, "partition_sizes", None)
    return (("tp", Shard(dim, None if sizes is None else tuple(sizes))),)


def chosen_tp_dim(index: int, param: Tensor, tp_dim: TpDim) -> int | None:
    """The dimension along which tensor parallelism cut a plain parameter, or None.

    The parameter's own ``partition_dim``, as Megatron sets it, takes precedence: a negative one means not
    cut. See ``plain_tp_dim`` for parameters among DTensors.

    Raises:
        StrategyError: ``tp_dim`` has no entry for the parameter, or is negative.
    """
    own = getattr(param, "partition_dim", None)
    if own is not None:
        return None if own < 0 else own
    if isinstance(tp_dim, Mapping) and index not in tp_dim:
        raise StrategyError(f"tp_dim has no entry for parameter {index}: give None if tp does not cut it")
    chosen = tp_dim[index] if isinstance(tp_dim, Mapping) else tp_dim
    dim = chosen(index, param) if callable(chosen) else chosen
    if dim is not None and dim < 0:
        raise StrategyError(f"tp_dim is {dim} for parameter {index}: count dimensions from 0, or give None")
    return dim


def plain_tp_dim(params: Iterable[Tensor], tp_dim: TpDim) -> TpDim:
    """The ``tp_dim`` that applies to the plain parameters among ``params``.

    One number for all is meant for models cut by hand. If some parameters are DTensors, PyTorch has cut the
    model, and plain parameters are whole, so the number is ignored. A mapping or a function always applies.
    """
    if isinstance(tp_dim, int) and any(isinstance(param, DTensor) for param in params):
        return None
    return tp_dim


def whole_shape(name: str, param: Tensor, cuts: tuple[Cut, ...], at: Coordinate) -> tuple[int, ...]:
    if not cuts:
        return tuple(param.shape)
    cut = cuts[0][1]
    here, parts = param.shape[cut.dim], at.size("tp")
    sizes = cut.sizes or (here,) * parts
    if len(sizes) != parts or sizes[at["tp"]] != here:
        raise StrategyError(
            f"{name}: partition_sizes {sizes} do not fit the {here} indices that this rank holds "
            f"at tp={at['tp']} of {parts}"
        )
    return tuple(sum(sizes) if dim == cut.dim else length for dim, length in enumerate(param.shape))
