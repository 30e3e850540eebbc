"""``DistributedConfig``: a user's own functions that assign, gather and redistribute, or a helper's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engine.collective import Label
from ..engine.travel import travel
from ..errors import ConfigError
from ..parameters.mesh_parameters import ParametersOnMeshes, ReadParameters, global_rank, same_tensors
from ..plan.assign import longest_first, newton_schulz_cost
from ..plan.bucket import Bucket
from ..plan.strategies import owner
from ..step.parameter_state import local_part
from ..worlds.live import LiveWorld
from ..worlds.local import LocalMesh

AssignFn = Callable[[list[Tensor], dict[str, Any]], dict[int, int]]
GatherFn = Callable[[Tensor, int, dict[str, Any]], Any]
RedistributeFn = Callable[[Tensor | None, int, dict[str, Any]], Any]


class HelperFunctions:
    """The three functions of a helper, and ``on_meshes``, with which the optimizer plans instead.

    What it finds out about the parameters is kept in the ``state`` that it gets, under ``"on_meshes"``.
    """

    def __init__(self, read: ReadParameters) -> None:
        self._read = read

    def on_meshes(self, params: Sequence[Tensor], state: dict[str, Any]) -> ParametersOnMeshes:
        """Return which mesh each parameter lies on and how it is cut there; found once per list of them."""
        known = state.get("on_meshes")
        if known is None or not same_tensors(known.params, params):
            known = state["on_meshes"] = ParametersOnMeshes(tuple(params), tuple(self._read(params)))
        return known

    def assign(self, params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        """Balance Newton–Schulz cost over the ranks that hold each parameter, the costliest first.

        The work that ranks have from an earlier mesh counts only if all ranks of this mesh are on that one:
        other ranks do not know of it, and all must compute the same owners.
        """
        loads: list[tuple[frozenset[int], Counter[int]]] = []
        assignments: dict[int, int] = {}
        for mesh in self.on_meshes(params, state).meshes:
            costs = [newton_schulz_cost(matrix.sides) for matrix in mesh.matrices.values()]
            ranks = mesh.ranks
            known = [its for members, its in loads if members.issuperset(ranks)]
            owners = longest_first(costs, [sum(its[rank] for its in known) for rank in ranks])
            mine: Counter[int] = Counter()
            for index, cost, position in zip(mesh.matrices, costs, owners, strict=True):
                assignments[index] = ranks[position]
                mine[ranks[position]] += cost
            loads.append((frozenset(ranks), mine))
        return dict(sorted(assignments.items()))

    def gather(self, momentum_buffer: Tensor, dst_rank: int, state: dict[str, Any]) -> Tensor | None:
        """The full tensor of one parameter on ``dst_rank``, None elsewhere."""
        world, bucket = self._one_parameter(dst_rank, state)
        matrix = bucket.entries[0].matrix
        flat = local_part(momentum_buffer).reshape(-1).to(bucket.compute.dtype)
        label = Label(bucket.phases[0], matrix.name)
        full = world.run(travel(flat, bucket.compute, world.at, label))
        return full.view(matrix.shape) if global_rank() == dst_rank else None

    def redistribute(self, update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor:
        """This rank's part of the update of one parameter."""
        world, bucket = self._one_parameter(src_rank, state)
        matrix = bucket.entries[0].matrix
        flat = (torch.empty(0) if update is None else update.reshape(-1)).to(bucket.compute.dtype)
        label = Label(bucket.phases[1], matrix.name)
        part = world.run(travel(flat, bucket.compute.inverse, world.at, label))
        return part.view(matrix.box(world.at).shape)

    def _one_parameter(self, rank: int, state: dict[str, Any]) -> tuple[LiveWorld | LocalMesh, Bucket]:
        """A bucket of one parameter that ``rank`` owns, and the world in which it lies."""
        on_meshes = state.get("on_meshes")
        if on_meshes is None:
            raise ConfigError("call the helper's assign_fn with the same state before its other functions")
        mesh, matrix = on_meshes.find(state.get("param_idx"))
        plan = owner([matrix], mesh.world.grid, assign=[mesh.position_of(rank)])
        return mesh.world, plan.buckets[0]


@dataclass
class DistributedConfig:
    """How a distributed Muon assigns, gathers and redistributes: a user's own functions, or a helper's.

    Args:
        assign_fn: ``(params, state) -> {param_idx: rank}``: which rank orthogonalizes each parameter. Called
            once; returns an entry for every parameter, the same on all ranks. Ranks are global.
        gather_fn: ``(momentum_buffer, dst_rank, state) -> Tensor | None``: the full plain tensor on
            ``dst_rank``, None elsewhere. It gets the Newton–Schulz input in bfloat16, as the parameter's kind
            (DTensor or plain).
        redistribute_fn: ``(update | None, src_rank, state) -> Tensor``: this rank's part of the update. It
            gets the plain update in bfloat16 on ``src_rank``, and None on all other ranks.
        state: whatever the functions need. Each call gets a fresh copy that also holds ``param_idx``,
            ``full_shape`` (None if it is not known), ``local_shape``, the parameter's ``dtype``, and
            ``wire_dtype``, the dtype of matrices and updates: bfloat16. ``"agree_group"``: the process group
            of the ranks that share parameters; all ranks unless given.
        async_gpu_parallelism: owners work side by side; False is the strict sequence, for debugging.
        prefetch_count: how many parameters (or buckets of them) are gathered ahead.
        helper: set if ``create_…_config`` made this. The optimizer runs the helper's plan instead of gather
            and redistribute, as long as both are the helper's own.

    The last two functions may also return a handle whose ``wait()`` returns the tensor. A tensor is copied at
    once; a handle's buffer must not change until the step ends. Ranks that hold the same part of a parameter
    must begin with the same values; with functions of your own, the optimizer cannot tell which ranks these
    are.
    """

    assign_fn: AssignFn
    gather_fn: GatherFn
    redistribute_fn: RedistributeFn
    state: dict[str, Any] = field(default_factory=dict)
    async_gpu_parallelism: bool = True
    prefetch_count: int = 1
    helper: HelperFunctions | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("assign_fn", "gather_fn", "redistribute_fn"):
            if not callable(getattr(self, name)):
                raise ConfigError(f"{name} must be a function, got {getattr(self, name)!r}")
        if not isinstance(self.prefetch_count, int) or self.prefetch_count < 0:
            raise ConfigError(f"prefetch_count must be an integer of at least 0, got {self.prefetch_count!r}")
        if not isinstance(self.state, dict):
            raise ConfigError(f"state must be a dict, got {type(self.state).__name__}")

    @property
    def planned(self) -> bool:
        """Whether gather and redistribute are still a helper's own, so that its plan may replace them."""
        own = self.helper
        return own is not None and own.gather == self.gather_fn and own.redistribute == self.redistribute_fn
