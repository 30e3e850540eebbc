"""Says which gradients a Muon cannot average or clip together; ``step/clipping.py`` clips the others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import UsageError
from ..step.clipping import sharded_dims
from ..step.step import PlanStep
from ..worlds.live import LiveWorld
from .current_steps import MeshStep

CLIP_BY_HAND = (
    "ready_gradients() cannot clip gradients on several meshes, with a config's own functions, or of plain "
    "parameters beside shards that were cut by hand: before step(), clip by the norm of the whole model. "
    "torch.nn.utils.clip_grad_norm_ does so only for whole parameters, or DTensors on one mesh. Otherwise, "
    "get each mesh's norm from torch.nn.utils.get_total_norm (for plain shards, on each rank, and add up "
    "the squares over the ranks), take the root of the sum of the squares, and pass it to "
    "torch.nn.utils.clip_grads_with_norm_ for each mesh"
)


def the_plan_step(steps: Sequence[MeshStep]) -> PlanStep:
    """Return the step over a plan, if there is exactly one.

    Raises:
        UsageError: there is no step over a plan, or there are several meshes.
    """
    if len(steps) != 1 or not isinstance(steps[0].step, PlanStep):
        raise UsageError(CLIP_BY_HAND)
    return steps[0].step


def refused_beside(
    steps: Sequence[MeshStep], params: Sequence[Tensor], max_norm: float | None = None
) -> UsageError | None:
    """Return an error if ``params``, which Muon does not step, cannot be averaged or clipped with Muon's.

    One DTensor per mesh and set of cuts is checked: which ranks hold the pieces of this rank's copy.
    """
    plain = [it for it in params if not isinstance(it, DTensor)]
    if max_norm is not None and plain and cut_by_hand(steps).keys() - {"tp"}:
        return UsageError(CLIP_BY_HAND)
    worlds = [mesh.world for mesh in steps if isinstance(mesh.world, LiveWorld)]
    if not worlds:
        return None
    inside, at = worlds[0].mesh.mesh.flatten(), worlds[0].at
    averaged = {*inside[list(at.group("dp"))].tolist()} if any(it.step.averages for it in steps) else set()
    kinds = {(it.device_mesh, (*sharded_dims(it),)): it for it in params if isinstance(it, DTensor)}
    for (mesh, cuts), param in kinds.items():
        places = enumerate(mesh.get_coordinate() or ())
        pieces = mesh.mesh[tuple(slice(None) if dim in cuts else place for dim, place in places)]
        ranks = {*pieces.flatten().tolist()}
        if len(ranks & averaged) > 1:
            return UsageError(
                f"a DTensor of shape {tuple(param.shape)} is cut over dp, so its gradient is averaged "
                "already, and this Muon would average its pieces with each other: give it to an optimizer "
                "of its own, or shard all parameters and leave out strategy= and mesh="
            )
        if max_norm is not None and not ranks <= {*inside.tolist()}:
            return UsageError(CLIP_BY_HAND)
    return None


def cut_by_hand(steps: Sequence[MeshStep]) -> dict[str, list[Tensor]]:
    """Return Muon's plain matrices by the axes that cut them. Such axes may cut AdamW's parameters, too."""
    found: dict[str, list[Tensor]] = {}
    plans = [mesh.step for mesh in steps if isinstance(mesh.step, PlanStep)]
    for at, its in ((plan.at, shard) for plan in plans for shard in plan.momentum_shards.values()):
        for axis in () if isinstance(its.parameter.param, DTensor) else its.shards[0].entry.matrix.axes:
            if at.size(axis) > 1:
                found.setdefault(axis, []).append(its.parameter.param)
    return found


def warn_of_copies(steps: Sequence[MeshStep], params: Sequence[Tensor]) -> bool:
    """Warn and return True if tp may have cut parameters that a norm counts as copies along tp."""
    plain = [it for it in params if not isinstance(it, DTensor)]
    unsaid = [it for it in plain if getattr(it, "partition_dim", None) is None]
    warns = bool(unsaid) and "tp" in cut_by_hand(steps)
    if warns:
        warnings.warn(
            f"tp cuts this Muon's matrices by hand, and {len(unsaid)} of AdamW's parameters have no "
            "partition_dim, so the norm counts them as copies along tp: set partition_dim on each, to the "
            "dimension that tp cuts, or to -1",
            stacklevel=4,
        )
    return warns
