"""Measures a step with PyTorch's profiler: its extra memory, and its matrix products.

The measurement works for every contender, from any package and on any device, because PyTorch reports all its
allocations, also in compiled code. The profiler does not see memory that a library such as oneDNN allocates
by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from muon_tutorial.evidence.memory import tensors_in

PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::bmm"), 0),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_"), 1),
}
"""Matrix products, and the index of the argument that is the first factor. The profiler's own count leaves
out products in place."""
SHORT = {"c10::BFloat16": "bf16", "float": "fp32", "c10::Half": "fp16", "double": "fp64"}


@dataclass(frozen=True, slots=True)
class StepWork:
    """``peak``: the most bytes that were allocated beyond those at the beginning. ``left``: how many of these
    bytes were left at the end. ``operations``: floating-point operations of matrix products, by dtype."""

    peak: int
    left: int
    operations: Mapping[str, float]

    @property
    def products(self) -> str:
        """The products in words: dtype and GFLOP of each kind, the largest first.

        >>> StepWork(0, 0, {"fp32": 1e9, "bf16": 5e9}).products
        'bf16 5, fp32 1'
        """
        kinds = sorted(self.operations.items(), key=lambda kind: -kind[1])
        return ", ".join(f"{dtype} {count / 1e9:,.0f}" for dtype, count in kinds) or "not seen"


def watch(run: Callable[[], object], device: torch.device) -> StepWork:
    """Run something once, and return its memory and products."""
    options: dict[str, Any] = {"profile_memory": True, "record_shapes": True}
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    assert seen.profiler is not None
    results = seen.profiler.kineto_results
    assert results is not None
    events = results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    sizes = [
        (event.start_ns(), event.nbytes())
        for event in memory
        if event.device_type().name.lower() == device.type
    ]
    ordered = sorted(sizes, key=lambda size: size[0])
    held = list(accumulate((size for _, size in ordered), initial=0))
    operations: dict[str, float] = defaultdict(float)
    for event in events:
        if event.name() in PRODUCTS:
            dtype = event.dtypes()[0]
            operations[SHORT.get(dtype, dtype)] += _operations(event.shapes(), PRODUCTS[event.name()])
    return StepWork(max(held), held[-1], dict(operations))


Made = TypeVar("Made", bound=Optimizer)


def watch_first_step(make: Callable[[], Made], device: torch.device) -> tuple[Made, StepWork]:
    made: list[Made] = []

    def begin() -> None:
        made.append(make())
        made[0].step()

    seen = watch(begin, device)
    return made[0], seen


def _operations(shapes: Sequence[Sequence[int]], first: int) -> float:
    """Floating-point operations of a product of two matrices, or of two stacks, from the arguments' shapes.

    >>> _operations([[2, 3], [3, 4]], 0)
    48.0
    """
    return 2.0 * math.prod(shapes[first]) * shapes[first + 1][-1]


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state, at any depth."""
    return sum(tensor.nbytes for tensor in tensors_in(optimizer.state))
