"""What a rank holds, in bytes: by kind, from the plan alone; and the peak of a step, counted as it runs.

``PeakMemory`` sees every tensor that PyTorch makes while it is entered, on the meta device too, where tensors
have sizes and no memory. So the peak of a step is predicted by walking the step itself over meta tensors, and
measured by the same instrument over real ones. What C++ allocates without the dispatcher is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..plan.bucket import Bucket
from ..plan.grid import Coordinate
from ..plan.matrix import Matrix, held_box
from ..plan.strategies import Plan

MOMENTS_BYTES = 8
"""AdamW's two moments of an element in fp32, against Muon's one momentum."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of the matrices under a plan. Bytes.

    The first three stay between steps. The others come and go with a bucket, and are the largest of any:
    ``flat_gradient`` is the packed gradient before it is averaged, ``slice`` what is kept of it,
    ``ns_input`` the momentum that is to travel, ``gathered`` the buffer that receives it, and ``whole`` the
    largest matrix that this rank assembles from tensor-parallel pieces.
    """

    parameters: int
    gradients: int
    momentum: int
    flat_gradient: int
    slice: int
    ns_input: int
    gathered: int
    whole: int


def plan_memory(plan: Plan, at: Coordinate) -> Held:
    """What one rank holds, from the plan alone. Momentum is of the parameter's dtype."""
    params = _params(plan)
    sizes = {param: _numel(matrix, at) for param, matrix in params.items()}
    return Held(
        parameters=sum(sizes[param] * matrix.dtype.itemsize for param, matrix in params.items()),
        gradients=sum(sizes[param] * matrix.grad_dtype.itemsize for param, matrix in params.items()),
        momentum=sum(held.numel * held.entry.matrix.dtype.itemsize for held in _holdings(plan, at)),
        flat_gradient=_largest(
            b.length(b.model_layout, at) * b.gradient.dtype.itemsize for b in plan.buckets
        ),
        slice=_largest(b.length(b.storage_layout, at) * b.gradient.dtype.itemsize for b in plan.buckets),
        ns_input=_largest(b.length(b.storage_layout, at) * b.compute.dtype.itemsize for b in plan.buckets),
        gathered=_largest(_gathered(bucket, at) for bucket in plan.buckets),
        whole=_largest(
            entry.matrix.numel * bucket.compute.dtype.itemsize
            for bucket in plan.buckets
            for entry in bucket.entries
            if entry.route.hops and bucket.works_on(entry, at)
        ),
    )


def _params(plan: Plan) -> dict[int, Matrix]:
    """A matrix of each parameter: which one does not matter."""
    return {e.matrix.param: e.matrix for bucket in plan.buckets for e in bucket.entries}


def _numel(matrix: Matrix, at: Coordinate) -> int:
    whole = matrix.shape if matrix.part is None else matrix.part.shape
    return held_box(whole, matrix.cuts, at).numel


def _holdings(plan: Plan, at: Coordinate) -> Iterator[Any]:
    return (held for bucket in plan.buckets for held in bucket.stored_shards(at))


def _gathered(bucket: Bucket, at: Coordinate) -> int:
    if not bucket.compute.hops:
        return 0
    return bucket.length(bucket.compute_layout, at) * bucket.compute.dtype.itemsize


def _largest(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)


@dataclass(eq=False)
class PeakMemory(TorchDispatchMode):
    """Counts the bytes that live tensors made while it is entered hold: ``now``, and the most, ``peak``.

    A storage counts once, from its first tensor to its last.
    """

    now: int = 0
    peak: int = 0
    _alive: dict[int, weakref.ref] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {id(storage) for storage in before if storage is not None}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = _storage(leaf) if isinstance(leaf, Tensor) else None
            if storage is not None and id(storage) not in known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """A wrapper, such as a DTensor, has none of its own."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's own parts of tensors."""
    return sum(_local(tensor).nbytes for tensor in tensors)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
