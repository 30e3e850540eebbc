"""Finds which boxes of each parameter, buffer and optimizer state this rank holds, and their names.

This module reads parameters, plans and names; it uses no file and does not communicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..optimizer.muon import Muon
from ..optimizer.muon_with_adamw import MuonWithAdamW
from ..parameters.describe_matrices import all_named, describe_matrices
from ..parameters.dtensor_placements import dtensor_cuts
from ..parameters.mesh_parameters import with_names
from ..plan.bucket import parameter_boxes
from ..plan.grid import Coordinate, Grid
from ..plan.layout import Box
from ..plan.matrix import held_box
from ..step.parameter_state import gradient_dtype, local_part
from ..step.step import PlanStep
from ..worlds.live import LiveWorld
from ..worlds.local import LocalMesh

Kind = Literal["muon", "adamw"]
Saveable = Muon | MuonWithAdamW | torch.optim.AdamW
Rename = Callable[[str], str]
Offset = tuple[int, ...]

ADAMW_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
# Parts that torch.compile and activation checkpointing add to names.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """The boxes of a whole tensor that a rank holds, in the order in which its local tensor stores them."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TensorInPieces:
    """Some pieces of a tensor; the key of each is its offset. ``shape`` is the whole tensor's shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Mapping[Offset, Tensor]


def in_pieces(tensor: Tensor, held: HeldBoxes) -> TensorInPieces:
    """This rank's pieces of a tensor, one for each box that is not empty; they share its storage."""
    local = local_part(tensor.detach())
    boxes = [box for box in held.boxes if box.numel or not math.prod(held.shape)]
    if len(boxes) == 1 and boxes[0].shape == tuple(local.shape):
        return TensorInPieces(held.shape, local.dtype, {boxes[0].offset: local})
    runs = local.split([box.numel for box in boxes]) if boxes else ()
    pieces = {box.offset: run.view(box.shape) for box, run in zip(boxes, runs, strict=True)}
    return TensorInPieces(held.shape, local.dtype, pieces)


SCALAR = HeldBoxes((), (Box((), ()),))


@dataclass(frozen=True, slots=True, eq=False)
class SteppedParameter:
    """A parameter that Muon or AdamW steps, with its group, its state and the boxes that this rank holds."""

    name: str
    kind: Kind
    param: Tensor
    group: dict[str, Any]
    state: Mapping[str, Any]
    boxes: HeldBoxes
    momentum_boxes: HeldBoxes

    def key(self, entry: str) -> str:
        return f"optimizer.{self.name}.{entry}"

    def boxes_of(self, entry: str) -> HeldBoxes:
        """This rank's boxes of one of the state's tensors."""
        return {"momentum_buffer": self.momentum_boxes, "step": SCALAR}.get(entry, self.boxes)

    def blank(self, entry: str, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros with the shape and dtype of this rank's part of one tensor of the state."""
        param = self.param.detach()
        like = torch.zeros(()) if entry == "step" else param
        if entry == "momentum_buffer" and entry not in self.state and dtype is None:
            dtype = gradient_dtype(self.param)
        return torch.zeros_like(self.state.get(entry, like), dtype=dtype)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors that are saved. Muon always has a momentum (zeros before its first step)."""
        if self.kind == "muon":
            saved = self.state.get("momentum_buffer")
            return {"momentum_buffer": self.blank("momentum_buffer") if saved is None else saved}
        others = [entry for entry in self.state if entry not in ADAMW_STATE]
        if others:
            raise CheckpointError(
                f"the optimizer's state of {self.name} has {others[0]!r}, which AdamW does not have and "
                "which would not be saved: save its state_dict() with torch.save"
            )
        return {entry: self.state[entry] for entry in ADAMW_STATE if entry in self.state}

    @property
    def record(self) -> dict[str, Any]:
        """The parameter's record in the manifest's ``groups``."""
        kept = {key: _as_numbers(value) for key, value in self.group.items() if not key.startswith("param")}
        return {"optimizer": self.kind, "state": tuple(self.tensors), "group": kept}


@dataclass(frozen=True, slots=True, eq=False)
class RankContents:
    """What this rank saves or loads: the model's tensors, and the parameters that the optimizer steps.

    The keys of ``tensors`` are those of the checkpoint; ``buffers`` are some of them.
    """

    tensors: dict[str, TensorInPieces]
    buffers: set[str]
    stepped: list[SteppedParameter]


def contents_of_rank(model: nn.Module, optimizer: Saveable, rename: Rename | None) -> RankContents:
    parts = parts_of(optimizer)
    muon = parts.get("muon")
    steps = muon.plan_steps if isinstance(muon, Muon) else []
    _check_live(muon)
    at = next((step.at for step in steps), Grid((), ()).at(0))
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a forward without a backward leaves the root's parameters whole
            module.reshard()
    named = [*_named(model.named_parameters(), model, rename)]
    buffers = [*_named(_buffers(model), model, rename)]
    first: dict[str, Tensor] = {}
    for name, tensor in (*named, *buffers):
        if first.setdefault(name, tensor) is not tensor:
            raise CheckpointError(
                f"two tensors of the model would both be saved as {name}: "
                "rename= must give them different names"
            )
    names = {param: name for name, param in named}
    places = {param: both for step in steps for param, *both in _planned_boxes(step)}
    places |= {
        param: [_unplanned_boxes(name, param, at)] * 2 for param, name in names.items() if param not in places
    }
    tensors = {f"model.{name}": in_pieces(param, places[param][0]) for param, name in names.items()}
    passive = {f"model.{name}": in_pieces(it, _unplanned_boxes(name, it, at)) for name, it in buffers}
    stepped = []
    for kind, part in parts.items():
        for label, param, group in all_named(part.param_groups):
            if param not in names:
                raise CheckpointError(f"the optimizer's {label} is not a parameter of the model")
            state = part.state.get(param, {})
            stepped.append(SteppedParameter(names[param], kind, param, group, state, *places[param]))
    return RankContents(tensors | passive, set(passive), stepped)


def parts_of(optimizer: torch.optim.Optimizer) -> dict[Kind, torch.optim.Optimizer]:
    """The optimizer's Muon and AdamW, by kind."""
    if isinstance(optimizer, MuonWithAdamW):
        return {"muon": optimizer.muon, "adamw": optimizer.adamw}
    if isinstance(optimizer, Muon):
        return {"muon": optimizer}
    if isinstance(optimizer, torch.optim.AdamW):
        return {"adamw": optimizer}
    raise CheckpointError(
        f"a checkpoint takes a Muon, a MuonWithAdamW or a torch.optim.AdamW, not a {type(optimizer).__name__}"
    )


def as_before(saved: Any, current: Any) -> Any:
    """A saved hyperparameter, as a tensor if the optimizer's ``current`` value is a tensor."""
    if isinstance(current, Tensor):
        return torch.full_like(current, saved)
    if isinstance(current, tuple) and isinstance(saved, tuple) and len(current) == len(saved):
        return tuple(as_before(its, own) for its, own in zip(saved, current, strict=True))
    return saved


def _as_numbers(value: Any) -> Any:
    if hasattr(value, "item"):  # a tensor, or a numpy number
        return value.item()
    return tuple(_as_numbers(part) for part in value) if isinstance(value, tuple) else value


def _check_live(muon: torch.optim.Optimizer | None) -> None:
    world = getattr(muon, "world", None)
    if isinstance(world, LocalMesh) and world.grid.world_size > 1:
        raise CheckpointError(
            f"the {world.grid.world_size} ranks of a LocalWorld share one process and cannot save or load "
            "at the same time: start real ranks with launch()"
        )


def _planned_boxes(step: PlanStep) -> Iterator[tuple[Tensor, HeldBoxes, HeldBoxes]]:
    """Yield each planned parameter, with this rank's boxes of the parameter and of its momentum."""
    for shard in step.momentum_shards.values():
        matrix = shard.shards[0].entry.matrix
        whole = matrix.shape if matrix.part is None else matrix.part.shape
        own = HeldBoxes(whole, (held_box(whole, matrix.cuts, step.at),))
        runs = None if matrix.part is None else matrix.part.runs
        if shard.flat and runs is not None and runs.dim == len(whole) - 1:
            raise CheckpointError(
                f"{matrix.name}: its columns alternate with columns of other matrices in one parameter, and "
                "ranks keep slices of its momentum that are not boxes of the parameter. Save under a "
                "strategy that cuts momentum as the parameter is cut, such as 'owner', or save each rank's "
                "state_dict()"
            )
        in_order = sorted(shard.shards, key=lambda held: held.entry.matrix.index)
        boxes = tuple(box for held in in_order for box in parameter_boxes(held, step.at))
        yield shard.parameter.param, own, HeldBoxes(whole, boxes) if shard.flat else own


def _unplanned_boxes(name: str, tensor: Tensor, at: Coordinate) -> HeldBoxes:
    """The boxes of a tensor that is in no plan.

    A DTensor's placements say which boxes a rank holds. A plain tensor is whole, or its attributes say how it
    was cut by hand over ``tp``. ``DTensor.__create_chunk_list__`` is not used, because in torch 2.13 it
    returns wrong rows for uneven strided shards (FSDP2 over tensor parallelism).
    """
    if isinstance(tensor, DTensor):
        at = LiveWorld(with_names(tensor.device_mesh)).at
        shape, cuts = tuple(tensor.shape), dtensor_cuts(name, tensor, at.grid.axes)
    else:
        [matrix] = describe_matrices([{"params": [tensor], "param_names": [name]}], at, None)
        shape, cuts = matrix.shape, matrix.cuts
    return HeldBoxes(shape, (held_box(shape, cuts, at),))


def _named(
    tensors: Iterable[tuple[str, Tensor]], model: nn.Module, rename: Rename | None
) -> Iterator[tuple[str, Tensor]]:
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    for name, tensor in tensors:
        bare = name.removeprefix("module.") if wrapped else name
        plain = ".".join(part for part in bare.split(".") if part not in WRAPPERS)
        yield (rename(plain) if rename else plain), tensor


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The persistent buffers, each of them once. Hooks that change ``state_dict()`` have no effect."""
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    first: dict[Tensor, str] = {}  # a shared buffer may be persistent under one of its names only
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in passing:
            first.setdefault(buffer, name)
    yield from ((name, buffer) for buffer, name in first.items())
