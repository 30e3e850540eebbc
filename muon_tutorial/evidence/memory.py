"""Bytes of memory on a rank: predicted from the plan, kind by kind, or counted as a peak while a step runs.

``PeakMemory`` sees every tensor that PyTorch makes in its ``with`` block, also on the meta device, where
tensors have sizes but no memory. So the peak of a step is predicted when the step walks over meta tensors,
and measured when it walks over real tensors. Memory that C++ allocates without the dispatcher is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan.grid import Coordinate
from ..plan.strategies import Plan
from ..step.parameter_state import local_part
from .predict import held_parameters


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that one rank holds for the matrices under a plan.

    Parameters, gradients and momentum stay between steps. The other three kinds exist only while a bucket is
    processed; their values are for the largest bucket. ``flat_gradient``: the packed gradient before it is
    averaged (0 if gradients are not packed). ``gathered``: the buffer that receives the momentum. ``whole``:
    the largest matrix that this rank receives over tp, or the sum of the bucket's Gram matrices if that is
    more; 0 if nothing goes over tp.
    """

    parameters: int
    gradients: int
    momentum: int
    flat_gradient: int
    gathered: int
    whole: int


def plan_memory(plan: Plan, at: Coordinate) -> Held:
    """Bytes that one rank holds, from the plan alone. Momentum has the gradient's dtype."""
    held = [(matrix, box.numel) for matrix, box in held_parameters(plan, at)]
    stored = (shard for bucket in plan.buckets for shard in bucket.stored_shards(at))
    flat, gathered, whole = [0], [0], [0]
    for bucket in plan.buckets:
        compute = bucket.compute.dtype.itemsize
        if bucket.gradient.hops:
            flat.append(bucket.length(bucket.model_layout, at) * bucket.gradient.dtype.itemsize)
        if bucket.compute.hops:
            gathered.append(bucket.length(bucket.compute_layout, at) * compute)
        sizes = [e.matrix.numel for e in bucket.entries if e.route.hops and bucket.works_on(e, at)]
        whole += [bucket.gram_bytes(at), *(numel * compute for numel in sizes)]
    return Held(
        parameters=sum(numel * matrix.dtype.itemsize for matrix, numel in held),
        gradients=sum(numel * matrix.grad_dtype.itemsize for matrix, numel in held),
        momentum=sum(shard.numel * shard.entry.matrix.grad_dtype.itemsize for shard in stored),
        flat_gradient=max(flat),
        gathered=max(gathered),
        whole=max(whole),
    )


class CountingMode(TorchDispatchMode):
    """A base class for dispatch modes that are dataclasses."""

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. Otherwise PyTorch would wrap each operation, and import its compiler (2 s)."""
        return False


@dataclass(eq=False)
class PeakMemory(CountingMode):
    """Counts the bytes of live tensors that were made in its ``with`` block, ``now`` and at the ``peak``.

    A storage counts once, from when its first tensor is made until the storage is freed.
    """

    now: int = 0
    peak: int = 0
    _alive: dict[int, weakref.ref] = field(default_factory=dict)

    def lap(self) -> int:
        """Return the peak since the last call of ``lap``, and start the next lap."""
        peak, self.peak = self.peak, self.now
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add_new(result, args, kwargs)
        return result

    def add_new(self, result: Any, args: Any, kwargs: Any) -> None:
        """Count the new storages in an operation's result: those that no argument has."""
        known = [_storage(tensor) for tensor in tensors_in(args, kwargs)]
        for tensor in tensors_in(result):
            storage = _storage(tensor)
            if all(storage is not other for other in known):
                self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage is None or (key := id(storage)) in self._alive:
            return
        size = storage.nbytes()

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in an operation's arguments or results; PyTorch's own search takes ten times as long."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; None for a tensor without storage, such as a DTensor."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts of tensors."""
    return sum(local_part(tensor).nbytes for tensor in tensors)
