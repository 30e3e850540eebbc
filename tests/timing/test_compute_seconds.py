"""``Work`` makes many results itself; they have the shapes, strides and dtypes of PyTorch's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from muon_tutorial.timing.compute_seconds import Work
from muon_tutorial.timing.machine import find_machine

H100 = find_machine("h100-infiniband")
ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + x,
    "add transposed": lambda x: x + x.new_empty(x.shape[::-1]).permute(list(reversed(range(x.ndim)))),
    "add one number": lambda x: x + torch.empty((), dtype=torch.float64, device="meta"),
    "add fp64": lambda x: x + torch.empty(x.shape, dtype=torch.float64, device="meta"),
    "broadcast": lambda x: x + x.new_empty((3, *x.shape)),
    "clamp": lambda x: x.clamp(min=1e-7),
    "clone": lambda x: x.clone(),
    "compare": lambda x: x > x,
    "divide": lambda x: x / 2,
    "isinf": lambda x: x.isinf(),
    "lerp": lambda x: x.lerp(x, 0.5),
    "maximum": lambda x: torch.maximum(-x, x),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=0),
    "cat": lambda x: torch.cat([x.reshape(-1), x.reshape(-1)]),
    "cat last": lambda x: torch.cat([x[None], x[None]], -1),
    "stack": lambda x: torch.stack([x, x]),
    "triu": lambda x: x[None].expand(2, *x.shape).reshape(2, -1).triu(1),
}
KINDS: dict[str, Tensor] = {
    "matrix": torch.empty(6, 4, device="meta"),
    "bf16": torch.empty(4, 6, dtype=torch.bfloat16, device="meta"),
    "block": torch.empty(8, 8, device="meta")[2:6, :4],
    "transposed": torch.empty(6, 4, device="meta").mT,
    "expanded": torch.empty(4, 1, device="meta").expand(4, 5),
    "column": torch.empty(5, 1, device="meta"),
    "flat": torch.empty(7, device="meta"),
    "number": torch.empty((), device="meta"),
    "whole numbers": torch.empty(3, 3, dtype=torch.int64, device="meta"),
}


def look(x: Tensor) -> Sequence[object]:
    return x.shape, x.stride(), x.dtype, x.device


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ONE)
def test_results_are_those_of_pytorch(name: str, kind: str) -> None:
    x = KINDS[kind]
    try:
        expected = look(ONE[name](x))
    except (RuntimeError, IndexError) as error:
        pytest.skip(f"PyTorch refuses it: {error}")
    with Work(H100):
        assert look(ONE[name](x)) == expected
