"""How tensor parallelism cut plain parameters: from their attributes, and from the user's ``tp_dim``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import StrategyError
from ..plan.grid import Coordinate
from ..plan.layout import Shard
from ..plan.matrix import Cut

TpDim = int | None | Mapping[int, int | None] | Callable[[int, Tensor], int | None]


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
