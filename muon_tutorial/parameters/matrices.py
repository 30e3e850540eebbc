"""From parameters to the matrices of a plan: reads DTensor placements and tensor-parallel attributes.

Knows tensors and their metadata. Asks for nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from ..errors import StrategyError
from ..plan.grid import Coordinate
from ..plan.layout import Box, Shard
from ..plan.matrix import Cut, Matrix, Part, Parts, part_boxes

TpDim = int | None | Mapping[int, int | None] | Callable[[int, Tensor], int | None]


def describe_matrices(groups: Sequence[Mapping[str, Any]], at: Coordinate, tp_dim: TpDim) -> list[Matrix]:
    """The optimizer's parameters as the plan sees them, in order of groups.

    How tensor parallelism cut a parameter is read, in this order, from its DTensor placements, from its
    attributes ``partition_dim`` (as Megatron sets it; a negative one means not cut) and ``partition_sizes``
    (a length a position, where a cut by hand is uneven), and from ``tp_dim``.

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
        whole = _describe(index, name, param, number, at, tp_dim)
        matrices += split_parts(whole, groups[number].get("parts"), first=len(matrices))
    return matrices


def split_parts(whole: Matrix, parts: Parts, first: int) -> list[Matrix]:
    """The matrices that a parameter holds, numbered from ``first`` on; ``whole.index`` is the parameter's.

    Raises:
        UsageError: the parameter cannot be split so.
        StrategyError: a cut goes through the dimensions that become columns together.
    """
    boxes = part_boxes(whole.shape, parts)
    if boxes is None:
        boxes = [Box((0,) * len(whole.shape), whole.shape)]
    names = [whole.name] if len(boxes) == 1 else [f"{whole.name}[part {i}]" for i in range(len(boxes))]
    flat = parts in (None, "flatten")
    through = [(axis, cut.dim) for axis, cut in whole.cuts if flat and cut.dim > 1]
    if through:
        raise StrategyError(
            f"{whole.name} is cut along dimension {through[0][1]} by {through[0][0]!r}: where dimensions 1 "
            "and on are columns together, only dimensions 0 and 1 can be cut"
        )
    return [
        replace(
            whole,
            index=first + i,
            name=name,
            shape=box.shape,
            part=None
            if flat and first == whole.index
            else Part(whole.index, whole.shape, box.offset, not flat),
        )
        for i, (name, box) in enumerate(zip(names, boxes, strict=True))
    ]


def named_params(group: Mapping[str, Any], index: int) -> list[tuple[str, Tensor]]:
    """The parameters of an optimizer's group with their names, or with their places where they have none."""
    names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(group["params"]))]
    return list(zip(names, group["params"], strict=True))


def _describe(index: int, name: str, param: Tensor, group: int, at: Coordinate, tp_dim: TpDim) -> Matrix:
    if isinstance(param, DTensor):
        cuts, shape = dtensor_cuts(name, param), tuple(param.shape)
        _check_axes(name, param, cuts, at)
    else:
        cuts = _plain_cuts(index, name, param, tp_dim) if at.size("tp") > 1 else ()
        shape = _whole_shape(name, param, cuts, at)
    return Matrix(index, name, shape, cuts, group, param.dtype, param.dtype)


def _plain_cuts(index: int, name: str, param: Tensor, tp_dim: TpDim) -> tuple[Cut, ...]:
    dim = chosen_tp_dim(index, param, tp_dim)
    if dim is None:
        return ()
    if dim >= param.ndim:
        raise StrategyError(f"{name} has dimensions 0 to {param.ndim - 1}; tp cannot cut it along {dim}")
    return (("tp", Shard(dim, getattr(param, "partition_sizes", None))),)


def chosen_tp_dim(index: int, param: Tensor, tp_dim: TpDim) -> int | None:
    """The dimension along which tensor parallelism cut a plain parameter, or None.

    The parameter's own ``partition_dim`` goes first, as Megatron sets it: a negative one means not cut. See
    ``plain_tp_dim`` for parameters that lie among DTensors.

    Raises:
        StrategyError: ``tp_dim`` leaves the parameter out, or counts from the end.
    """
    own = getattr(param, "partition_dim", None)
    if own is not None:
        return None if own < 0 else own
    if isinstance(tp_dim, Mapping) and index not in tp_dim:
        raise StrategyError(
            f"tp_dim says nothing of parameter {index}: give None for one that tp does not cut"
        )
    chosen = tp_dim[index] if isinstance(tp_dim, Mapping) else tp_dim
    dim = chosen(index, param) if callable(chosen) else chosen
    if dim is not None and dim < 0:
        raise StrategyError(f"tp_dim gives parameter {index} to dimension {dim}: count from 0, or give None")
    return dim


def plain_tp_dim(params: Iterable[Tensor], tp_dim: TpDim) -> TpDim:
    """What ``tp_dim`` means for the plain parameters among ``params``.

    One number for all is meant for models cut by hand. Where some parameters are DTensors, PyTorch has done
    the cutting, and what it left plain is whole; a mapping or a function is taken at its word.
    """
    if isinstance(tp_dim, int) and any(isinstance(param, DTensor) for param in params):
        return None
    return tp_dim


def dtensor_cuts(name: str, param: DTensor, names: Sequence[str] | None = None) -> tuple[Cut, ...]:
    """The axes that cut a DTensor, outermost first; by the mesh's own names unless told others.

    Placements read from left to right, except that a strided shard (FSDP2 over tensor parallelism) lies
    within the shards of the same dimension that stand to its right.

    Raises:
        StrategyError: a placement is partial, or the mesh has no axis names.
    """
    names = names or param.device_mesh.mesh_dim_names
    if names is None:
        raise StrategyError(
            f"{name} lies on a mesh without axis names: pass mesh_dim_names to init_device_mesh"
        )
    outer: list[Cut] = []
    strided: list[Cut] = []
    for axis, placement in zip(names, param.placements, strict=True):
        if placement.is_partial():
            raise StrategyError(f"{name} is {placement} along {axis!r}: reduce it before the step")
        if isinstance(placement, _StridedShard):
            strided.append((axis, Shard(placement.dim)))
        elif isinstance(placement, TorchShard):
            outer.append((axis, Shard(placement.dim)))
    return (*outer, *strided)


def _check_axes(name: str, param: DTensor, cuts: tuple[Cut, ...], at: Coordinate) -> None:
    sizes = dict(zip(param.device_mesh.mesh_dim_names or (), param.device_mesh.shape, strict=True))
    for axis, _ in cuts:
        if sizes[axis] != at.size(axis):
            raise StrategyError(
                f"{name} is cut over {sizes[axis]} ranks along {axis!r}, "
                f"which has {at.size(axis)} on the optimizer's mesh ({at.grid})"
            )


def _whole_shape(name: str, param: Tensor, cuts: tuple[Cut, ...], at: Coordinate) -> tuple[int, ...]:
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
