"""Finds how tensor parallelism has cut plain parameters, from their attributes or the user's ``tp_dim``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import StrategyError
from ..plan.grid import Coordinate
from ..plan.layout import Shard
from ..plan.matrix import Cut

TpDim = int | None | Mapping[int, int | None] | Callable[[int, Tensor], int | None]


def plain_cuts(
    index: int, name: str, param: Tensor, tp_dim: TpDim, at: Coordinate
) -> tuple[tuple[Cut, ...], tuple[int, ...]]:
    """Return a plain parameter's cut over tp, if there is one, and its whole shape.

    Raises:
        StrategyError: the parameter's ``partition_sizes`` do not fit its shape on this rank.
    """
    own, parts = getattr(param, "partition_sizes", None), at.size("tp")
    dim = chosen_tp_dim(index, name, param, tp_dim) if parts > 1 or own is not None else None
    here = 0 if dim is None else param.shape[dim]
    if dim is None or (parts == 1 and own is not None and sum(own) == here):  # whole
        return (), tuple(param.shape)
    sizes = (here,) * parts if own is None else tuple(own)
    if len(sizes) != parts or sizes[at["tp"]] != here:
        raise StrategyError(
            f"{name}: partition_sizes {sizes} do not fit the {here} indices that this rank holds "
            f"at tp={at['tp']} of {parts}"
        )
    shape = tuple(sum(sizes) if it == dim else length for it, length in enumerate(param.shape))
    return (("tp", Shard(dim, None if own is None else sizes)),) if parts > 1 else (), shape


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
            raise StrategyError(
                f"tp_dim has no entry for parameter {index} ({name}): give None if tp does not cut it"
            )
        chosen = tp_dim[index] if isinstance(tp_dim, Mapping) else tp_dim
        dim = chosen(index, param) if callable(chosen) else chosen
    if dim is not None and not 0 <= dim < param.ndim:
        raise StrategyError(
            f"{name} has dimensions 0 to {param.ndim - 1}, not {dim}: set its partition_dim (or tp_dim if it "
            "has no partition_dim) to one of these dimensions, or to None"
        )
    return dim


def kept_indices(params: Sequence[Tensor], known: dict[Tensor, int]) -> list[int]:
    """Return the index of each of an optimizer's parameters for ``tp_dim``, and record it in ``known``.

    A parameter keeps its first index when others leave its group. A new parameter's index is its place in the
    list, or the next free index if known parameters are at other places now.
    """
    moved = any(known.get(param, place) != place for place, param in enumerate(params))
    for gone in () if moved else known.keys() - {*params}:
        if known[gone] < len(params):  # another parameter has replaced it
            del known[gone]
    for place, param in enumerate(params):
        if param not in known:
            known[param] = 1 + max(known.values()) if moved else place
    return [known[param] for param in params]


def plain_tp_dim(params: Iterable[Tensor], tp_dim: TpDim) -> TpDim:
    """Return the ``tp_dim`` that applies to the plain parameters among ``params``.

    A single number is meant for models that are cut by hand. If some parameters are DTensors, PyTorch has cut
    the model and left plain parameters whole, so the number is ignored. A mapping or a function
    always applies.
    """
    if isinstance(tp_dim, int) and any(isinstance(param, DTensor) for param in params):
        return None
    return tp_dim
