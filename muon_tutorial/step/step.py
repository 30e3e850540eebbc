"""One rank's part of a distributed step: what Muon does, as generators over a plan.

Knows parameters, gradients and momentum, and which math goes between which routes. Asks for collectives
through the engine; never moves data itself, and runs on whatever world answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from ..engine.collective import Label, Walk
from ..engine.hops import view
from ..engine.order import pipeline
from ..engine.travel import gather, orthogonalize
from ..errors import GradientError, UsageError
from ..newton_schulz import zeropower_via_newtonschulz
from ..plan.bucket import Bucket, BucketEntry, StoredShard, flat_frame
from ..plan.exchange import SlicedBuffer
from ..plan.grid import Coordinate
from ..plan.layout import Hop, Partial, Replicate, Route
from ..plan.matrix import Matrix, held_box
from ..plan.strategies import BUCKET_BYTES, Plan
from ..weight_update import ShardRange, adjusted_lr, decay_and_add_piece, momentum_update

Kept = tuple[tuple[tuple[int, int], tuple[int, int], tuple[int, int]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterState:
    """A parameter as the step meets it: the tensor, its optimizer group, and its state."""

    param: Tensor
    group: dict
    state: dict

    @property
    def data(self) -> Tensor:
        """This rank's own part of the parameter, sharing its storage."""
        return local_part(self.param.detach())

    @property
    def grad(self) -> Tensor | None:
        """This rank's own part of the gradient, or None."""
        return local_gradient(self.param)


def local_gradient(param: Tensor) -> Tensor | None:
    """This rank's own part of a parameter's gradient, or None.

    Raises:
        GradientError: the gradient is not laid out as its parameter is.
    """
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and not _lie_alike(grad, param):
        raise GradientError(
            f"the gradient of a parameter of shape {tuple(param.shape)} lies as {grad.placements} where the "
            f"parameter lies as {param.placements}: give it p.grad.redistribute(placements=p.placements)"
        )
    return None if grad is None else local_part(grad)


def _lie_alike(one: DTensor, other: DTensor) -> bool:
    pairs = zip(one.device_mesh.shape, one.placements, other.placements, strict=True)
    return all(mine == its for size, mine, its in pairs if size > 1)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(slots=True, eq=False)
class PlanStep:
    """Walks a plan for the parameters of one rank. ``slots`` are in the order of the parameters' indices.

    Between ``ready`` and ``step`` the averaged gradients stay in ``readied``, one flat slice a bucket.
    """

    plan: Plan
    at: Coordinate
    slots: Sequence[ParameterState]
    window: int = 1
    readied: dict[int, Tensor] = field(default_factory=dict)
    present: frozenset[int] | None = None
    momentum_shards: dict[int, MomentumShard] = field(default_factory=dict)

    def fill_state(self) -> None:
        """Give every parameter its momentum: what this rank keeps of it, of no elements where it keeps
        nothing.

        A momentum loaded as a whole parameter (the stock optimizer's) is cut to that. Where storage is
        sliced, the state also says which elements it ``kept``, so that another rank's is not taken for it.

        Raises:
            UsageError: a loaded momentum is neither what this rank keeps nor the whole parameter.
        """
        self.momentum_shards = self._find_keepsakes()
        for shard in self.momentum_shards.values():
            saved = shard.slot.state.get("momentum_buffer")
            shard.slot.state["momentum_buffer"] = (
                shard.slot.data.new_zeros(shard.shape) if saved is None else shard.cut(saved, self.at)
            )
            if shard.flat:
                shard.slot.state["kept"] = shard.kept(self.at)

    def forget(self) -> None:
        """Drop the gradients that were readied: they have been used, or have changed since."""
        self.readied.clear()
        self.present = None

    def agree(self) -> Walk:
        """Find out which gradients there are, before anything changes, if nobody did since the last step.

        Must be walked by all ranks of the grid.
        """
        if self.present is None:
            self.present = (yield from self._agree(())).matrices

    def step(self) -> Walk:
        """One optimizer step. Must be walked by all ranks of the grid."""
        yield from self.agree()
        yield from pipeline((self._step_bucket(bucket) for bucket in self.plan.buckets), self.window)
        self.forget()

    def ready(self, rest: Sequence[Tensor] = (), max_norm: float | None = None) -> Walk:
        """Average gradients into the layout the plan keeps; those of ``rest`` in place. Clips if told to.

        Must be walked by all ranks of the grid. Returns the norm of all gradients together if ``max_norm`` is
        given, else None.
        """
        agreed = yield from self._agree(rest)
        self.present = agreed.matrices
        slices = yield from pipeline((self._reduce(bucket) for bucket in self.plan.buckets), self.window)
        self.readied = {bucket.index: flat for bucket, flat in zip(self.plan.buckets, slices, strict=True)}
        others = [param for index, param in enumerate(rest) if index in agreed.rest]
        if self.plan.expects == "local" and self.at.size("dp") > 1:
            yield from _average(others, self.at)
        return None if max_norm is None else (yield from self._clip(others, max_norm))

    def _step_bucket(self, bucket: Bucket) -> Walk:
        gradient = self.readied.pop(bucket.index, None)
        if gradient is None:
            gradient = yield from self._reduce(bucket)
        ns_input = self._momentum(bucket, gradient)
        update = yield from orthogonalize(ns_input, bucket, self.at, self._newton_schulz)
        parameter = self._apply(bucket, update)
        yield from self._publish(bucket, parameter)

    def _reduce(self, bucket: Bucket) -> Walk:
        """From the gradients at hand to the averaged ones this rank keeps."""
        flat = self._handed_buffer(bucket, bucket.gradient.dtype)
        for spot in bucket.buffer_slices(bucket.model_layout, self.at):
            grad = self.slots[spot.entry.matrix.param].grad
            if grad is not None and spot.box.numel:  # an empty shard of FSDP2's may have any empty shape
                view(flat, spot).copy_(grad[spot.entry.matrix.slices(self.at)])
        label = Label("gradient reduce_scatter", _name(bucket))
        kept = yield from gather(flat, bucket.gradient, self.at, label)
        return kept.div_(bucket.summands) if bucket.summands > 1 else kept

    def _handed_buffer(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        device = self.slots[bucket.entries[0].matrix.param].data.device
        return torch.zeros(bucket.length(bucket.model_layout, self.at), dtype=dtype, device=device)

    def _momentum(self, bucket: Bucket, gradient: Tensor) -> Tensor:
        """Update the momentum this rank keeps; returns the Newton–Schulz inputs, flat, in the wire dtype."""
        ns_input = torch.zeros_like(gradient, dtype=bucket.compute.dtype)
        for held in bucket.stored_shards(self.at):
            if held.numel and self._has_gradient(held.entry.matrix):
                group = self.slots[held.entry.matrix.param].group
                mine = self.momentum_shards[held.entry.matrix.param].view(held, self.at)
                grad = gradient[slice(*held.in_buffer)].view(mine.shape)
                moved = momentum_update(mine, grad, group["momentum"], group["nesterov"])
                ns_input[slice(*held.in_buffer)] = moved.reshape(-1)
        return ns_input

    def _newton_schulz(self, entry: BucketEntry, matrix: Tensor) -> Tensor:
        group = self.slots[entry.matrix.param].group
        flat = matrix.reshape(entry.matrix.sides)
        with record_function(f"Newton-Schulz of {entry.matrix.name}"):
            update = zeropower_via_newtonschulz(
                flat, group["ns_steps"], group["ns_coefficients"], group["eps"]
            )
        return update.reshape(matrix.shape)

    def _apply(self, bucket: Bucket, update: Tensor) -> Tensor:
        """Decay and step the elements this rank keeps; returns them, flat, as storage holds them."""
        parameter = torch.zeros_like(update, dtype=bucket.parameter.dtype)
        for held in bucket.stored_shards(self.at):
            matrix, here = held.entry.matrix, slice(*held.in_buffer)
            slot = self.slots[matrix.param]
            if held.numel:
                parameter[here] = slot.data[matrix.slices(self.at)].reshape(-1)[slice(*held.in_piece)]
                if self._has_gradient(matrix):
                    self._decay_and_add(held, slot.group, parameter[here], update[here])
        return parameter

    def _decay_and_add(self, held: StoredShard, group: dict, parameter: Tensor, update: Tensor) -> None:
        matrix, frame = held.entry.matrix, flat_frame(held.entry.matrix, self.at)
        lr = as_scalar(group["lr"])
        piece = ShardRange(matrix.sides, _pair(frame.offset), _pair(frame.shape), *held.in_piece)
        adjusted = adjusted_lr(lr, group["adjust_lr_fn"], matrix.sides)
        decay_and_add_piece(parameter, update, lr, adjusted, group["weight_decay"], piece)

    def _publish(self, bucket: Bucket, parameter: Tensor) -> Walk:
        """From the stepped parameters this rank keeps to the parameters as the model holds them."""
        label = Label("parameter all_gather", _name(bucket))
        whole = yield from gather(parameter, bucket.parameter, self.at, label)
        for spot in bucket.buffer_slices(bucket.model_layout, self.at):
            matrix = spot.entry.matrix
            if spot.box.numel:
                self.slots[matrix.param].data[matrix.slices(self.at)] = view(whole, spot)

    def _has_gradient(self, matrix: Matrix) -> bool:
        assert self.present is not None
        return matrix.param in self.present

    def _find_keepsakes(self) -> dict[int, MomentumShard]:
        """Momentum by parameter, whose matrices may lie in several buckets."""
        holdings: dict[int, list[StoredShard]] = {}
        flat: dict[int, bool] = {}
        for bucket in self.plan.buckets:
            for held in bucket.stored_shards(self.at):
                holdings.setdefault(held.entry.matrix.param, []).append(held)
                flat[held.entry.matrix.param] = isinstance(bucket.storage_layout, SlicedBuffer)
        return {
            param: MomentumShard(self.slots[param], tuple(holdings[param]), flat[param]) for param in holdings
        }

    def _agree(self, rest: Sequence[Tensor]) -> Walk:
        """Which parameters have a gradient, the same answer on every rank: one tiny sum an axis.

        Where local gradients are averaged, one missing on some ranks counts as zero there.

        Raises:
            GradientError: on every rank, before anything has changed: a gradient is not finite, or an already
                averaged one is missing on some ranks only.
        """
        grads = [*(slot.grad for slot in self.slots), *(local_gradient(param) for param in rest)]
        mine = [grad is not None for grad in grads] + [not _is_finite(grad) for grad in grads]
        count = torch.tensor(mine, dtype=torch.float32, device=_device(self.slots, rest))
        label = Label("gradient flags")
        for axis in self.at.grid.axes:
            count = yield from gather(count, _sum_over(axis, self.at, count), self.at, label)
        holders, spoilt = (part.tolist() for part in count.split(len(grads)))
        self._check_flags(holders, spoilt)
        edge, present = len(self.slots), [i for i, ranks in enumerate(holders) if ranks]
        return PresentGradients(
            frozenset(i for i in present if i < edge), frozenset(i - edge for i in present if i >= edge)
        )

    def _check_flags(self, holders: list[float], spoilt: list[float]) -> None:
        world = self.at.grid.world_size
        wrong = [i for i, ranks in enumerate(spoilt) if ranks]
        if wrong:
            others = f", as do {len(wrong) - 1} others" if len(wrong) > 1 else ""
            raise GradientError(
                f"the gradient of {self._name_of(wrong[0])} holds NaN or infinity on {int(spoilt[wrong[0]])} "
                f"of {world} ranks{others}; nothing was changed: skip this step, or mend the loss"
            )
        torn = [i for i, ranks in enumerate(holders) if 0 < ranks < world]
        if self.plan.expects == "averaged" and torn:
            missing = world - int(holders[torn[0]])
            raise GradientError(
                f"the gradient of {self._name_of(torn[0])} is missing on {missing} of {world} ranks; "
                f"strategy {self.plan.strategy!r} expects gradients already averaged over dp: "
                "give it to all ranks or to none"
            )

    def _name_of(self, param: int) -> str:
        if param >= len(self.slots):
            return f"parameter {param - len(self.slots)} of the rest"
        entries = (entry for bucket in self.plan.buckets for entry in bucket.entries)
        return next(entry.matrix.name for entry in entries if entry.matrix.param == param)

    def _clip(self, rest: Sequence[Tensor], max_norm: float) -> Walk:
        """Scale all gradients so that their common norm is at most ``max_norm``; returns the norm before."""
        grads = [grad for param in rest if (grad := local_gradient(param)) is not None]
        total = torch.zeros((), dtype=torch.float64, device=_device(self.slots, rest))
        for part, copies in self._shares(rest):
            total += part.double().square().sum() / copies
        for axis in self.at.grid.axes:
            total = yield from gather(total, _sum_over(axis, self.at, total), self.at, Label("gradient norm"))
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for tensor in (*self.readied.values(), *grads):
            tensor.mul_(scale.to(tensor.dtype))
        return norm

    def _shares(self, rest: Sequence[Tensor]) -> Iterable[tuple[Tensor, int]]:
        """Every gradient this rank holds, with the number of ranks that hold the same."""
        for bucket in self.plan.buckets:
            sliced = (bucket.storage_layout.axis,) if isinstance(bucket.storage_layout, SlicedBuffer) else ()
            for held in bucket.stored_shards(self.at):
                copies = self._copies((*held.entry.matrix.axes, *sliced))
                yield self.readied[bucket.index][slice(*held.in_buffer)], copies
        for param in rest:
            grad = local_gradient(param)
            if grad is not None:
                yield grad, self._copies(_sharded_axes(param))

    def _copies(self, axes: Sequence[str]) -> int:
        """How many ranks hold the same piece of a tensor that ``axes`` cut."""
        return self.at.size(*(axis for axis in self.at.grid.axes if axis not in axes))


@dataclass(frozen=True, slots=True, eq=False)
class MomentumShard:
    """What one rank keeps of one parameter's momentum between steps.

    ``flat``: a run of elements, all matrices of the parameter one after the other, where storage is sliced;
    else a tensor of the shape in which this rank holds the parameter.
    """

    slot: ParameterState
    holdings: tuple[StoredShard, ...]
    flat: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the momentum."""
        return (sum(held.numel for held in self.holdings),) if self.flat else tuple(self.slot.data.shape)

    def view(self, held: StoredShard, at: Coordinate) -> Tensor:
        """One holding's part of the momentum, sharing its storage."""
        buffer, matrix = self.slot.state["momentum_buffer"], held.entry.matrix
        if not self.flat:
            return buffer[matrix.slices(at)]
        start = sum(other.numel for other in self.holdings if other.entry.matrix.index < matrix.index)
        return buffer[start : start + held.numel]

    def cut(self, saved: Tensor, at: Coordinate) -> Tensor:
        """A loaded momentum as this rank keeps it."""
        matrix = self.holdings[0].entry.matrix
        whole = matrix.shape if matrix.part is None else matrix.part.shape
        if tuple(saved.shape) == self.shape:
            self._check_kept(matrix.name, at)
            return saved
        if tuple(saved.shape) != whole:
            raise UsageError(
                f"{matrix.name}: a loaded momentum of shape {tuple(saved.shape)} is not the {self.shape} "
                f"that {at} keeps, nor the whole parameter, {whole}"
            )
        local = saved[held_box(whole, matrix.cuts, at).slices]
        if not self.flat:
            return local.contiguous()
        kept = [local[h.entry.matrix.slices(at)].reshape(-1)[slice(*h.in_piece)] for h in self.holdings]
        return torch.cat([saved.new_empty(0), *kept])

    def kept(self, at: Coordinate) -> Kept:
        """The elements of a flat momentum: for each matrix the piece's offset and shape, and a run in it."""
        frames = [(flat_frame(held.entry.matrix, at), held) for held in self.holdings if held.numel]
        return tuple((_pair(frame.offset), _pair(frame.shape), held.in_piece) for frame, held in frames)

    def _check_kept(self, name: str, at: Coordinate) -> None:
        theirs = self.slot.state.get("kept")
        if self.flat and theirs not in (None, self.kept(at)):
            raise UsageError(
                f"{name}: the loaded momentum was kept by another rank, or on another grid: it holds "
                f"{_say_kept(theirs)}, where {at} keeps {_say_kept(self.kept(at))}; load each rank's own "
                "state, or use load_checkpoint()"
            )


@dataclass(frozen=True, slots=True)
class PresentGradients:
    """Which gradients some rank has: matrices by plan index, other parameters by position."""

    matrices: frozenset[int]
    rest: frozenset[int]


def _average(params: Sequence[Tensor], at: Coordinate) -> Walk:
    """Average gradients over dp in place, packed into flat buffers of at most 25 MB. A missing one counts as
    zero."""
    for run in _runs(params):
        for param in run:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        grads = [grad for param in run if (grad := local_gradient(param)) is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        total = yield from gather(flat, _sum_over("dp", at, flat), at, Label("other gradients all_reduce"))
        for grad, mean in zip(
            grads, (total / at.size("dp")).split([grad.numel() for grad in grads]), strict=True
        ):
            grad.copy_(mean.view(grad.shape))


def _runs(params: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Cut a sequence into runs of one dtype and at most 25 MB."""
    run: list[Tensor] = []
    for param in sorted(params, key=lambda param: str(param.dtype)):
        weight = sum(local_part(other).nbytes for other in (*run, param))
        if run and (run[0].dtype != param.dtype or weight > BUCKET_BYTES):
            yield run
            run = []
        run.append(param)
    if run:
        yield run


def _sum_over(axis: str, at: Coordinate, tensor: Tensor) -> Route:
    hop = Hop(axis, Partial(), Replicate(), tuple(tensor.shape))
    return Route((hop,) if at.size(axis) > 1 else (), tensor.dtype)


def _is_finite(grad: Tensor | None) -> bool:
    if grad is None or not grad.numel():
        return True
    return bool(torch.linalg.vector_norm(grad, ord=math.inf).isfinite())


def _device(slots: Sequence[ParameterState], rest: Sequence[Tensor]) -> torch.device:
    return slots[0].data.device if slots else local_part(rest[0]).device if rest else torch.device("cpu")


def _sharded_axes(param: Tensor) -> tuple[str, ...]:
    if not isinstance(param, DTensor):
        cut = getattr(param, "partition_dim", None)
        return () if cut is None or cut < 0 else ("tp",)
    names = param.device_mesh.mesh_dim_names or ()
    return tuple(
        axis for axis, placement in zip(names, param.placements, strict=True) if placement.is_shard()
    )


def as_scalar(value: float | Tensor) -> float | Tensor:
    return value.squeeze() if isinstance(value, Tensor) else value


def _say_kept(kept: Kept) -> str:
    """Each run of elements, in the piece it belongs to."""
    runs = [f"{run[0]} to {run[1]} of a {h} x {w} piece at {place}" for place, (h, w), run in kept]
    return "elements " + ", ".join(runs) if runs else "nothing"


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], shape[1]


def _name(bucket: Bucket) -> str:
    return f"bucket {bucket.index}"
