"""A parameter in a step: the tensor, its group and its state, and this rank's part of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import GradientError, StrategyError
from ..plan.matrix import Index, Parts
from .unreduced_gradient import UnreducedGradient

MomentumIndex = slice | Index


@dataclass(frozen=True, slots=True, eq=False)
class ParameterState:
    """A parameter with its optimizer group (the hyperparameters) and its optimizer state (the momentum)."""

    param: Tensor
    group: dict
    state: dict

    @property
    def data(self) -> Tensor:
        """This rank's part of the parameter, sharing its memory."""
        return local_part(self.param.detach())

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient, or None."""
        return local_gradient(self.param)

    @property
    def momentum(self) -> Tensor:
        """The part of the momentum that this rank stores."""
        return local_part(self.state["momentum_buffer"])


def group_parts(group: Mapping[str, Any]) -> tuple[Parts, bool]:
    """Return a group's ``parts`` and ``transposed``, which groups saved by ``torch.optim.Muon`` lack."""
    return group.get("parts"), group.get("transposed", False)


def local_gradient(param: Tensor) -> Tensor | None:
    """Return this rank's part of a gradient; raise ``GradientError`` if it is not placed like ``param``."""
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and not placed_alike(grad, param):
        raise GradientError(
            f"the gradient of a parameter of shape {tuple(param.shape)} has placements {grad.placements}, "
            f"but the parameter has {param.placements}: set p.grad = "
            "p.grad.redistribute(placements=p.placements)"
        )
    if grad is not None and isinstance(param, DTensor) and not isinstance(grad, DTensor):
        held = tuple(param.to_local().shape)
        if grad.shape != held:  # the step would take the first rows, on every rank
            raise GradientError(
                f"a DTensor of shape {tuple(param.shape)}, of which this rank holds {held}, has a plain "
                "gradient: set p.grad = torch.distributed.tensor.distribute_tensor(p.grad, p.device_mesh, "
                "p.placements)"
            )
    if isinstance(grad, UnreducedGradient):
        return grad.as_subclass(Tensor)
    return grad.to_local() if isinstance(grad, DTensor) else grad


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: ``grad_dtype`` if it has one, else the parameter's own."""
    dtype = getattr(param, "grad_dtype", param.dtype)
    if dtype is None:
        raise StrategyError(
            f"a parameter of shape {tuple(param.shape)} has grad_dtype=None, which allows gradients "
            "of any dtype: set grad_dtype to the dtype that they have, the same on all ranks"
        )
    return dtype


def write_back(tensor: Tensor, index: MomentumIndex, here: Tensor) -> None:
    """Write a changed ``tensor[index]`` back if indexing made a copy, as it does for alternating rows."""
    if isinstance(index, tuple) and any(isinstance(along, Tensor) for along in index):
        tensor[index] = here


def place_gradient(param: Tensor) -> None:
    """Give a gradient its parameter's placements; tensor parallelism may leave it replicated or partial."""
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and not placed_alike(grad, param):
        param.grad = grad.redistribute(placements=param.placements)


def same_tensors(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two sequences contain the same tensor objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_as(local: Tensor, param: Tensor) -> Tensor:
    """If ``param`` is a DTensor, turn this rank's part of a tensor into a DTensor placed like it."""
    if not isinstance(param, DTensor):
        return local
    where = param.device_mesh, param.placements
    return DTensor.from_local(local, *where, run_check=False, shape=param.shape, stride=param.stride())


def mesh_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's dimensions; numbers for ``fully_shard``'s own meshes, which lack names."""
    return mesh.mesh_dim_names or tuple(f"axis {dim}" for dim in range(mesh.ndim))


def placed_alike(one: DTensor, other: DTensor) -> bool:
    """Whether two DTensors have the same placements, on meshes of the same shape."""
    if one.device_mesh.shape != other.device_mesh.shape:
        return False
    pairs = zip(one.device_mesh.shape, one.placements, other.placements, strict=True)
    return all(mine == its for size, mine, its in pairs if size > 1)
