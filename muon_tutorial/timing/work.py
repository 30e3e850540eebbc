"""Adds up the seconds that a rank computes between two requests, from the operations themselves.

Tensors are on the meta device, where operations have sizes but do nothing. Each is charged the machine's
seconds for its sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..evidence.memory import tensors_in
from .machine import Machine

_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # the index of the first factor in the arguments
_WRITES_ONLY = ("copy", "zeros_like", "ones_like", "full_like", "fill", "zero", "new_zeros", "new_ones")
_MARKS = "profiler::"  # labels in a trace
_NO_DATA = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach")
_RESIZES = ("aten::resize_", "aten::resize_as_", "aten::set_")


@dataclass(eq=False)
class Work(TorchDispatchMode):
    """Adds up the seconds of the operations that run while it is entered.

    ``product`` holds those of matrix products, ``copy`` those of everything else. Checks that look at values
    do nothing on the meta device, and are not charged.
    """

    machine: Machine
    product: float = 0.0
    copy: float = 0.0
    operations: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: skipping Dynamo would wrap each operation and import PyTorch's compiler, in two seconds."""
        return False

    def take(self) -> tuple[float, float]:
        """Return the seconds of products and of everything else since the last call, and start again at 0."""
        taken = self.product, self.copy
        self.product = self.copy = 0.0
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        result = _result(name, func, args, kwargs or {})
        self.operations += 1
        executes, works = 0.0, True
        if name in _PRODUCTS:
            first, second = args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1]
            *batch, rows, inner = first.shape
            sizes = (rows, inner, second.shape[-1])
            executes = self.machine.gemm_seconds(first.dtype, sizes, math.prod(batch))
            self.product += executes
        elif name in _NO_DATA or name.startswith(_MARKS) or _is_view(func):
            works = False
        else:
            read = args[1:] if name in _WRITES_ONLY else args
            moved = sum(x.numel() * x.itemsize for x in tensors_in(read, kwargs, result))
            executes = self.machine.copy_seconds(moved)
            self.copy += executes
        self.copy += self._starts(executes, works)
        return result

    def _starts(self, executes: float, works: bool) -> float:
        """The cost of an operation apart from its execution.

        A core pays it for each operation. A GPU gets an operation while it executes another one, so it pays
        only the part beyond the execution, and nothing for a view or a mark.
        """
        if self.machine.cores is not None:
            return self.machine.operation
        return max(0.0, self.machine.operation - executes) if works else 0.0


def _result(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation. PyTorch's own meta kernels take a millisecond for a product, for the
    smallest and largest element, or for an in-place write, so these are not called."""
    written = _written(func, args, kwargs)
    if written is not None and written.is_meta:
        return written
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.is_meta or written is not None:
        return func(*args, **kwargs)
    if name in _PRODUCTS and "dtype" not in kwargs:
        left, right = args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1]
        return left.new_empty((*left.shape[:-1], right.shape[-1]))
    if name == "aminmax" and not kwargs:
        return first.new_empty(()), first.new_empty(())
    return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that an operation only writes to and returns: its first argument, or ``out``."""
    returns = func._schema.returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    if alias is None or not alias.is_write or torch.Tag.inplace_view in func.tags:
        return None
    out = kwargs.get("out", args[0] if args else None)
    is_filled = isinstance(out, Tensor) and out.numel() > 0  # an empty tensor would be resized
    return out if is_filled and func._schema.name not in _RESIZES else None


def _is_view(func: Any) -> bool:
    """Whether an operation only returns a view of its argument."""
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
