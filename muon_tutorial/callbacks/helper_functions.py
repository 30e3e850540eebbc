"""The functions with which a ``create_…_config`` config assigns, gathers and redistributes, one parameter at
a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.collective import Label
from ..engine.travel import travel
from ..errors import ConfigError
from ..parameters.mesh_parameters import ParametersOnMeshes, ReadParameters
from ..plan.assign import longest_first, newton_schulz_cost
from ..plan.bucket import Bucket
from ..plan.strategies import owner
from ..step.parameter_state import local_part, same_tensors
from ..worlds.live import LiveWorld, global_rank
from ..worlds.local import LocalMesh


class HelperFunctions:
    """The three functions of a helper, and ``on_meshes``, from which the optimizer makes a plan.

    The plan replaces ``gather`` and ``redistribute``. The result of ``on_meshes`` is stored in the ``state``.
    """

    def __init__(self, read: ReadParameters) -> None:
        self._read = read

    def on_meshes(self, params: Sequence[Tensor], state: dict[str, Any]) -> ParametersOnMeshes:
        """Return the mesh of each parameter, and how the parameter is cut on this mesh."""
        known = state.get("on_meshes")
        if known is None or not same_tensors(known.params, params):
            known = state["on_meshes"] = ParametersOnMeshes(tuple(params), tuple(self._read(params)))
        return known

    def assign(self, params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        """Assign each parameter to one of the ranks that hold it, so that ranks have about equal work.

        The costliest parameters are assigned first. All ranks of a mesh must compute the same owners. So work
        from an earlier mesh counts only if that mesh contains all ranks of the new mesh, because other ranks
        do not know its owners.
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
        """Return the full tensor of one parameter on ``dst_rank``, and None on all other ranks."""
        world, bucket = self._one_parameter(dst_rank, state)
        matrix = bucket.entries[0].matrix
        flat = local_part(momentum_buffer).reshape(-1).to(bucket.compute.dtype)
        label = Label(bucket.phases[0], matrix.name)
        full = world.run(travel(flat, bucket.compute, world.at, label))
        return full.view(matrix.shape) if global_rank() == dst_rank else None

    def redistribute(self, update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor:
        """Return this rank's part of the update of one parameter."""
        world, bucket = self._one_parameter(src_rank, state)
        matrix = bucket.entries[0].matrix
        flat = (torch.empty(0) if update is None else update.reshape(-1)).to(bucket.compute.dtype)
        label = Label(bucket.phases[1], matrix.name)
        part = world.run(travel(flat, bucket.compute.inverse, world.at, label))
        return part.view(matrix.box(world.at).shape)

    def _one_parameter(self, rank: int, state: dict[str, Any]) -> tuple[LiveWorld | LocalMesh, Bucket]:
        """Make a bucket of one parameter that ``rank`` owns. Return the bucket and its mesh's world."""
        on_meshes = state.get("on_meshes")
        if on_meshes is None:
            raise ConfigError("call the helper's assign_fn with the same state before its other functions")
        mesh, matrix = on_meshes.find(state.get("param_idx"))
        plan = owner([matrix], mesh.world.grid, assign=[mesh.position_of(rank)])
        return mesh.world, plan.buckets[0]
