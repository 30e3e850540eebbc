"""Counts the matrix products that a function makes, and their floating-point operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FIRST_FACTOR = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.baddbmm: 1,
}


@dataclass(slots=True)
class CountedProducts:
    """How many matrix products were made, and their FLOPs, a multiply-add counted as two."""

    products: int = 0
    flops: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self, counted: CountedProducts) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in _FIRST_FACTOR:
            left, right = args[_FIRST_FACTOR[packet] :][:2]
            self.counted.products += left.shape[0] if left.ndim == 3 else 1
            self.counted.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


def count_products(work: Callable[[], object]) -> CountedProducts:
    """What ``work`` multiplies.

    >>> count_products(lambda: torch.ones(3, 5) @ torch.ones(5, 4))
    CountedProducts(products=1, flops=120)
    """
    counted = CountedProducts()
    with _Counter(counted):
        work()
    return counted
