"""From parameters to the matrices of a plan: reads DTensor placements and tensor-parallel attributes.

Knows tensors and their metadata. Asks for nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from .errors import StrategyError
from .plan.bucket import Matrix
from .plan.grid import Coordinate
from .plan.layout import Placement, Replicate, Shard

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
    named = [
        (name, param, index)
        for index, group in enumerate(groups)
        for name, param in named_params(group, index)
    ]
    return [
        _describe(index, name, param, group, at, tp_dim) for index, (name, param, group) in enumerate(named)
    ]


def named_params(group: Mapping[str, Any], index: int) -> list[tuple[str, Tensor]]:
    """The parameters of an optimizer's group with their names, or with their places where they have none."""
    names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(group["params"]))]
    return list(zip(names, group["params"], strict=True))


def _describe(index: int, name: str, param: Tensor, group: int, at: Coordinate, tp_dim: TpDim) -> Matrix:
    cut = _cut(index, name, param, tp_dim) if at.size("tp") > 1 else Replicate()
    rows, columns = param.shape if isinstance(param, DTensor) else _whole_shape(name, param, cut, at)
    return Matrix(index, name, (rows, columns), cut, group, param.dtype, param.dtype)


def _cut(index: int, name: str, param: Tensor, tp_dim: TpDim) -> Placement:
    if isinstance(param, DTensor):
        return _dtensor_cut(name, param)
    dim = getattr(param, "partition_dim", None)
    if dim is None:
        dim = (
            tp_dim[index]
            if isinstance(tp_dim, Mapping)
            else tp_dim(index, param)
            if callable(tp_dim)
            else tp_dim
        )
    if dim is None or dim < 0:
        return Replicate()
    if dim not in (0, 1):
        raise StrategyError(f"{name}: a matrix is cut along dimension 0 or 1, not {dim}")
    return Shard(dim, getattr(param, "partition_sizes", None))


def _dtensor_cut(name: str, param: DTensor) -> Placement:
    cut: Placement = Replicate()
    for axis, placement in zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=True):
        if axis == "tp" and type(placement) is TorchShard:
            cut = Shard(placement.dim % 2)
        elif not isinstance(placement, TorchReplicate):
            raise StrategyError(
                f"{name} is {placement} along {axis!r}: this strategy takes parameters that only tensor "
                "parallelism has cut, along an axis named 'tp', with gradients that nobody has averaged yet"
            )
    return cut


def _whole_shape(name: str, param: Tensor, cut: Placement, at: Coordinate) -> tuple[int, ...]:
    if not isinstance(cut, Shard):
        return tuple(param.shape)
    here, parts = param.shape[cut.dim], at.size("tp")
    sizes = cut.sizes or (here,) * parts
    if len(sizes) != parts or sizes[at["tp"]] != here:
        raise StrategyError(
            f"{name}: partition_sizes {sizes} do not fit the {here} indices that this rank holds "
            f"at tp={at['tp']} of {parts}"
        )
    return tuple(sum(sizes) if dim == cut.dim else length for dim, length in enumerate(param.shape))
