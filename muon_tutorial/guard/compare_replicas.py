"""Ranks that hold copies of parameters and state compare them before the first step and at intervals.

Without this comparison, ranks that began from different seeds, or loaded different files, would step without
an error. With ``zero1`` such ranks would mix several models into one; with other strategies each rank would
train its own model. To compare, ranks send only a hash and its square for each parameter.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..engine.collective import Label, Walk
from ..engine.travel import travel
from ..errors import GradientError, MismatchError
from ..parameters.describe_matrices import named_params
from ..plan.layout import Hop, Owned, Replicate, Route
from ..step.agreement import HASHES, checksum, say_outliers, say_ranks
from ..step.clipping import sharded_dims
from ..step.momentum import MomentumShard
from ..step.parameter_state import local_part
from ..step.step import PlanStep
from ..worlds.live import LiveWorld, NoMesh, gather_objects, sum_counts
from .current_steps import MeshStep

T = TypeVar("T")
Axes = frozenset[str]
Named = Sequence[tuple[str, Tensor]]

OWN = (
    "; if each rank has its own (such as an expert), give it to another Muon, with "
    "create_processgroup_config(ep_pg=...) as its distributed_config"
)

OTHERS = frozenset({"dp", "tp", "fsdp", "dp_shard", "shard", "ep", "pp"})
"""Along these axes, AdamW's plain parameters are compared, may be cut, or may be each rank's own."""

PLAIN = (
    "this parameter is no DTensor, so FSDP2 does not average its gradient. Call fully_shard() on the root, "
    "or average the gradient yourself"
)


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """Tensors of this rank, and the axes along which every rank should hold equal tensors.

    ``named`` is whether the user gave the name. A name that the user did not give is a position in a list,
    which may differ on other ranks. Along ``assumed`` axes the tensors are only assumed to be equal, because
    each rank may have a tensor of its own, such as an expert that FSDP2 was told to ignore. If there is a
    ``warning``, a difference causes a warning that contains it, and no error.
    """

    name: str
    parts: tuple[Tensor, ...]
    axes: Axes
    named: bool = True
    assumed: Axes = frozenset()
    warning: str = ""

    @property
    def hash(self) -> Tensor:
        """One int64 hash of all parts, with shape []."""
        total = torch.zeros((), dtype=torch.int64)
        for part in self.parts:
            total = (31 * total.to(part.device) + 1 + checksum(part)) % HASHES
        return total

    @property
    def looks(self) -> str:
        """The user's name, if there is one, and the parts' shapes."""
        shapes = ", ".join(str(tuple(part.shape)) for part in self.parts) or "none"
        return f"{self.name} of shape {shapes}" if self.named else f"shape {shapes}"


def compare_replicas(
    steps: Sequence[MeshStep],
    companions: Sequence[torch.optim.Optimizer],
    steps_done: int,
    unstepped: Named,
    rest: Named,
) -> bool:
    """Compare parameters and state on every mesh whose ranks are real processes; each axis costs a few small
    sums.

    The companions' DTensors are compared if their mesh's dimensions are axes of the mesh of one of ``steps``.
    A DTensor of Muon or a companion may be each rank's own along axes that its mesh lacks (along ``dp`` only
    if ``dp`` is assumed), so a warning names one that differs. The companions' plain parameters must be the
    same along ``dp``, and along ``tp`` if their ``partition_dim`` is negative; along an axis whose name is
    not in ``OTHERS``, a warning names one that differs. Plain parameters among DTensors may differ, because
    each rank may have its own parameters. FSDP2 does not average the gradients of plain parameters, so a
    warning names a parameter that differs.

    ``unstepped`` are parameters, by name, that no optimizer steps. ``rest`` are parameters, by position,
    whose gradients are averaged together with Muon's gradients. All ranks must call this. Returns the result
    of ``compare_gradients``.

    Raises:
        MismatchError: copies differ. All ranks raise it.
        GradientError: gradients differ, though a plan expects averaged gradients. All ranks raise it.
    """
    for world, replicas in _meshes(steps, companions, unstepped, rest, with_state=True):
        renamed = _refuse_other_names(world, replicas)
        differing = _differing(world, replicas)
        wrong = [it for it in differing if not it.warning]
        unlike = [it for it in differing if it.warning and it not in renamed]
        if unlike and not wrong:
            warnings.warn(
                f"{unlike[0].name} is not the same on all ranks ({_who_differs(world, unlike[0])}): "
                f"{unlike[0].warning}, unless each rank has its own parameter",
                stacklevel=2,
            )
        if wrong:
            when = f"after {steps_done} steps" if steps_done else "before the first step"
            remedy = "load a checkpoint" if steps_done else "use the same seed or load the same file on all"
            raise MismatchError(
                f"{when} {wrong[0].name} is not the same on all ranks that hold copies of it"
                f"{_nor(wrong)}: {_who_differs(world, wrong[0])}; this step changed nothing: "
                f"{remedy}{OWN if wrong[0].assumed else ''}"
            )
    return compare_gradients(steps)


def compare_gradients(steps: Sequence[MeshStep], again: bool = False) -> bool:
    """Compare gradients that should be averaged already, over all axes except tp. All ranks must call it.

    Along tp, each rank computes the gradients of uncut parameters on its own, so they may round differently.
    Among DTensors, a plain matrix may be each rank's own. The comparison notices this only if the gradients
    are not zero. If such a matrix has had only zero gradients, this returns True, and the next step must pass
    ``again`` to compare the plain matrices once more.

    Raises:
        GradientError: the gradients differ. All ranks raise it.
    """
    in_doubt = False
    for mesh in steps:
        if isinstance(mesh.step, PlanStep) and isinstance(mesh.world, LiveWorld):
            in_doubt |= _compare_gradients(mesh.step, mesh.world, mesh.assumed, again)
    return in_doubt


def _compare_gradients(step: PlanStep, world: LiveWorld, assumed: Axes, again: bool) -> bool:
    if step.plan.expects != "averaged" or step.present is None:
        return False
    plain = [i for i, it in step.momentum_shards.items() if not isinstance(it.parameter.param, DTensor)]
    compared = plain if again else step.momentum_shards
    present = {i: step.momentum_shards[i] for i in compared if i in step.present}
    held = [_gradient(step, shard) for shard in present.values()]
    wrong = _differing(world, held)
    if wrong:
        raise GradientError(
            f"the gradient of {wrong[0].name} is not the same on all ranks that should have equal copies"
            f"{_nor(wrong)}: {_who_differs(world, wrong[0])}; strategy {step.plan.strategy!r} expects "
            "gradients already averaged: wrap the model in DDP (after you unfreeze parameters), average them "
            f"before step(), or take 'zero1', which averages them itself{OWN if assumed else ''}; this step "
            "changed nothing"
        )
    if not plain or not assumed:
        return False
    moves = torch.tensor([i in present and bool(_gradient(step, present[i]).parts[0].any()) for i in plain])
    device = step.momentum_shards[plain[0]].parameter.data.device
    counts = moves.double().to(device)
    for axis in world.grid.axes:
        if world.grid.size(axis) > 1:
            sum_counts(counts, world.group((axis,)))
    return not bool(counts.all())


def compare_in_process(steps: Sequence[MeshStep]) -> None:
    """Compare this rank's parameters with the parameters of other ranks of its ``LocalWorld``.

    Raises:
        MismatchError: the values differ. The last rank that calls this raises it.
    """
    for mesh in steps:
        if isinstance(mesh.step, PlanStep) and not isinstance(mesh.world, LiveWorld | NoMesh):
            at = mesh.step.at
            for values, _ in _planned(mesh.step):
                place = tuple(at[axis] for axis in at.grid.axes if axis not in values.axes)
                said = mesh.world.held_by_ranks((values.name, place), int(values.hash))
                if len(said) == at.size(*values.axes) and len(set(said.values())) > 1:
                    raise MismatchError(
                        f"before the first step {values.name} is not the same on all ranks that should have "
                        f"equal copies: {say_outliers([*said.values()], [*said])}; nothing was changed: "
                        "begin with the same values"
                    )


def broadcast_parameters(
    steps: Sequence[MeshStep], companions: Sequence[torch.optim.Optimizer], unstepped: Named
) -> None:
    """Make all ranks' copies of a parameter equal to the first rank's, as DDP does. All ranks must call it.

    Only parameters that differ are sent. Three kinds of parameters are skipped: those on the meta device;
    parameters without names, because ranks cannot match them; and plain parameters among DTensors, because
    each rank may have its own.

    Raises:
        MismatchError: the parameters' names have another order on other ranks. All ranks raise it, and
            nothing is sent.
    """
    for world, replicas in _meshes(steps, companions, unstepped, (), with_state=False):
        _refuse_other_names(world, replicas)
        for replica in _differing(world, replicas):
            if replica.named:
                world.run(_sent_anew(replica, world))


def _sent_anew(replica: Replica, world: LiveWorld) -> Walk:
    """Broadcast the first rank's values along each axis in turn, and write them into the parameter."""
    [part] = replica.parts
    for axis in world.grid.axes:
        if axis in replica.axes - replica.assumed and world.grid.size(axis) > 1:
            hop = Hop(axis, Owned(0), Replicate(), tuple(part.shape))
            mine = part.contiguous() if world.at[axis] == 0 else None
            label = Label("initial values", replica.name)
            part.copy_((yield from travel(mine, Route((hop,), part.dtype), world.at, label)))


def _meshes(
    steps: Sequence[MeshStep],
    companions: Sequence[torch.optim.Optimizer],
    unstepped: Named,
    rest: Named,
    with_state: bool,
) -> Iterator[tuple[LiveWorld, list[Replica]]]:
    """Yield the replicas on each mesh of real processes: parameters and, if ``with_state``, their state."""
    plans = [mesh.step for mesh in steps if isinstance(mesh.step, PlanStep)]
    stepped = {id(it.param) for step in plans for it in step.parameters}
    stepped |= {id(param) for it in companions for group in it.param_groups for param in group["params"]}
    groups: list[tuple[Named, Mapping[Tensor, Any], bool]] = [
        (named_params(group, number), it.state, "param_names" in group)
        for it in companions
        for number, group in enumerate(it.param_groups)
    ]
    for some, named in ((unstepped, True), (rest, False)):
        left = [(name, param) for name, param in some if id(param) not in stepped and is_dense(param)]
        groups.append((left, {}, named))
    for mesh in steps:
        if isinstance(mesh.step, PlanStep) and isinstance(mesh.world, LiveWorld):
            assumed = mesh.assumed - {"tp"}
            plain = mesh is steps[0] and not (assumed and mesh.own_along)
            others = [it for step in plans if step is not mesh.step for it in step.momentum_shards.values()]
            pairs = [(it.shards[0].entry.matrix.name, it.parameter.param) for it in others]
            elsewhere = [(name, param) for name, param in pairs if isinstance(param, DTensor)]
            beside = _beside([*groups, (elsewhere, {}, False)], mesh.world, plain, assumed)
            held = [*_planned(mesh.step, mesh.assumed), *beside]
            values, states = zip(*held, strict=True) if held else ((), ())
            known = [it for it in values if not it.parts[0].is_meta]
            yield mesh.world, [*known, *(states if with_state else ())]


def is_dense(param: Tensor) -> bool:
    """Whether a tensor's bits can be read, which quantized tensors may not allow."""
    return type(local_part(param.detach())) is Tensor and param.layout is torch.strided


def _planned(step: PlanStep, assumed: Axes = frozenset()) -> Iterator[tuple[Replica, Replica]]:
    """Yield each parameter of a plan, and its momentum. ``dp`` may cut the momentum into slices."""
    for shard in step.momentum_shards.values():
        matrix, axes = shard.shards[0].entry.matrix, _copied(step, shard)
        sliced = frozenset({"dp"} if shard.flat else ())
        momentum = Replica(f"the momentum of {matrix.name}", (shard.parameter.momentum,), axes - sliced)
        named = "param_names" in shard.parameter.group
        unsaid = frozenset() if isinstance(shard.parameter.param, DTensor) else assumed
        yield Replica(matrix.name, (shard.parameter.data,), axes, named, unsaid), momentum


def _gradient(step: PlanStep, shard: MomentumShard) -> Replica:
    """Return a parameter's gradient, or an empty tensor if only other ranks have a gradient."""
    grad = shard.parameter.grad
    held = shard.parameter.data.new_zeros(0) if grad is None else grad
    return Replica(shard.shards[0].entry.matrix.name, (held,), _copied(step, shard) - {"tp"})


def _copied(step: PlanStep, shard: MomentumShard) -> Axes:
    """Return the axes that do not cut a parameter."""
    return frozenset(step.at.grid.axes) - {axis for axis, _ in shard.shards[0].entry.matrix.cuts}


def _beside(
    groups: Sequence[tuple[Named, Mapping[Tensor, Any], bool]], world: LiveWorld, plain: bool, assumed: Axes
) -> Iterator[tuple[Replica, Replica]]:
    """Yield the parameters on this mesh that no plan steps, and their state.

    Each of ``groups`` has named parameters, their state, and a flag: whether the names come from the user.
    Plain parameters are yielded only if ``plain`` is True. If there are ``assumed`` axes, each plain
    parameter comes with its gradient instead of its state.
    """
    long = frozenset(axis for axis in world.grid.axes if world.grid.size(axis) > 1)
    for params, states, named in groups:
        for name, param in params:
            if isinstance(param, DTensor) and (names := _axes_along(param.device_mesh, world)):
                lacks = long - {*names}
                shared = lacks & ({"dp"} - assumed)  # as for plain parameters
                axes = (frozenset(names) - {names[dim] for dim in sharded_dims(param)}) | shared
                missing = lacks - shared
            elif plain and assumed and not isinstance(param, DTensor):
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                kinds = ((name, param.detach()), (f"the gradient of {name}", grad))
                value, its = (Replica(said, (it,), assumed, named, assumed, PLAIN) for said, it in kinds)
                yield value, its
                continue
            elif plain and not isinstance(param, DTensor):
                says_uncut = (getattr(param, "partition_dim", None) or 0) < 0
                axes = frozenset({"dp", "tp"} if says_uncut else {"dp"})
                missing = long - OTHERS
            else:
                continue
            entry = states.get(param, {})
            state = tuple(local_part(entry[key]) for key in sorted(entry) if isinstance(entry[key], Tensor))
            held = ((name, (local_part(param.detach()),)), (f"the optimizer state of {name}", state))
            value, its = (Replica(said, parts, axes, named) for said, parts in held)
            yield value, its
            if missing:
                along = " and ".join(sorted(missing))
                what = f"a DTensor whose mesh has no {along}" if isinstance(param, DTensor) else "no DTensor"
                warning = (
                    f"the parameter is {what}, so its copies along {along} may drift apart. Begin with the "
                    "same values on all ranks, and average its gradient there"
                )
                value, its = (Replica(said, parts, missing, named, missing, warning) for said, parts in held)
                yield value, its


def _axes_along(mesh: DeviceMesh, world: LiveWorld) -> list[str]:
    """Return the world's axis along each dimension of a mesh; nothing if a dimension is no axis."""
    ranks, place = world.mesh.mesh.flatten(), mesh.get_coordinate() or ()
    axes = {tuple(ranks[list(world.at.group(axis))].tolist()): axis for axis in world.grid.axes}
    found = []
    for dim in range(len(place)):
        line = mesh.mesh[tuple(slice(None) if it == dim else at for it, at in enumerate(place))].tolist()
        found.append(axes.get(tuple(line), "" if len(line) > 1 else f"one rank {dim}"))
    return found if all(found) else []


def _refuse_other_names(world: LiveWorld, replicas: Sequence[Replica]) -> list[Replica]:
    """Refuse parameters whose order differs across ranks: values would go into the wrong parameters.

    Parameters that may differ, such as each rank's own experts, are not refused, but returned if they differ.

    Raises:
        MismatchError: the order differs. All ranks raise it.
    """
    hashes = [torch.tensor(zlib.crc32(replica.looks.encode()) % HASHES) for replica in replicas]
    others = _differing(world, replicas, hashes)
    wrong = next((it for it in others if not it.warning), None)
    if wrong is not None:
        found = _from_all_ranks(world, wrong, wrong.looks)
        held = {looks: [rank for _, rank, its in found if its == looks] for _, _, looks in found}
        differing = _first_that_differ(found)
        # Ranks with other pieces of the parameter mostly have the same name and shape, so they may show
        # which copy is right.
        alike = [(looks, rank) for looks in held if looks in differing.values() for rank in held[looks]]
        raise MismatchError(
            f"{wrong.name} is another parameter on other ranks, or has another shape: "
            f"{say_outliers(*zip(*alike, strict=True))} "
            f"({'; '.join(f'{looks} on {say_ranks(ranks)}' for looks, ranks in held.items())}): all ranks "
            "must list the same parameters in the same order; nothing was changed"
        )
    return others


def _differing(
    world: LiveWorld, replicas: Sequence[Replica], hashes: Sequence[Tensor] | None = None
) -> list[Replica]:
    """Return the replicas that differ along one of their axes. All ranks of the mesh get the same answer.

    The replicas' bits are compared, or the ``hashes`` if they are given.
    """
    axes = [axis for axis in world.grid.axes if world.grid.size(axis) > 1]
    if not axes or not replicas:
        return []
    device = torch.device("cpu") if world.mesh.device_type == "cpu" else replicas[0].parts[0].device
    if hashes is None:  # a tensor may be compared twice, along different axes
        once = {id(it.parts): it.hash for it in {id(it.parts): it for it in replicas}.values()}
        hashes = [once[id(it.parts)] for it in replicas]
    numbers = torch.stack([it.to(device) for it in hashes]).double()
    flags = torch.stack([numbers, numbers.square()], dim=1)  # [hashes, 2]: the sums show what differs
    wrong = torch.zeros(len(replicas), dtype=torch.float64, device=device)
    for axis in axes:
        sums = sum_counts(flags.clone(), world.group((axis,)))
        for index, (replica, (total, squares)) in enumerate(zip(replicas, sums.tolist(), strict=True)):
            same = world.grid.size(axis) * int(squares) == int(total) ** 2  # n·Σv² = (Σv)² if all v are equal
            wrong[index] += axis in replica.axes and not same
    for axis in axes:  # all ranks of the mesh get the same counts
        sum_counts(wrong, world.group((axis,)))
    return [replica for replica, count in zip(replicas, wrong.tolist(), strict=True) if count]


def _nor(wrong: Sequence[Replica]) -> str:
    return f", nor are {len(wrong) - 1} others" if len(wrong) > 1 else ""


def _who_differs(world: LiveWorld, replica: Replica) -> str:
    """Say which ranks differ from the rest. All ranks of the mesh must call it."""
    found = _first_that_differ(_from_all_ranks(world, replica, int(replica.hash)))
    return say_outliers([*found.values()], [*found])


def _from_all_ranks(world: LiveWorld, replica: Replica, held: T) -> list[tuple[tuple[int, ...], int, T]]:
    """Gather each rank's position along the axes that cut the replica, the rank's number, and ``held``."""
    cut = tuple(world.at[axis] for axis in world.grid.axes if axis not in replica.axes)
    found = [(cut, world.at.rank, held)]
    for axis in reversed(world.grid.axes):
        if world.grid.size(axis) > 1:
            found = [told for some in gather_objects(found, world.group((axis,))) for told in some]
    return found


def _first_that_differ(found: Sequence[tuple[tuple[int, ...], int, T]]) -> dict[int, T]:
    """Return, by rank, what the ranks hold at the first position where they differ."""
    for place in dict.fromkeys(place for place, _, _ in found):
        at_place = {rank: held for its, rank, held in found if its == place}
        if len(set(at_place.values())) > 1:
            return at_place
    raise AssertionError("the sums of the hashes differed, but the hashes do not")
