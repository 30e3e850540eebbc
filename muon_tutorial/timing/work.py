"""What a rank computes between two requests: seconds, read off the operations themselves.

Tensors lie on the meta device, where operations have sizes and do nothing: each is charged what the machine
says for it.
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

_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # where the first factor stands among the arguments
_WRITES_ONLY = ("copy", "zeros_like", "ones_like", "full_like", "fill", "zero", "new_zeros", "new_ones")
_MARKS = "profiler::"  # labels in a trace
_NO_DATA = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach")
_RESIZES = ("aten::resize_", "aten::resize_as_", "aten::set_")


@dataclass(eq=False)
class Work(TorchDispatchMode):
    """Adds up the seconds of the operations that run while it is entered.

    ``product`` holds those of matrix products, ``copy`` those of all else. Checks that look at values do
    nothing on the meta device, and are not charged.
    """

    machine: Machine
    product: float = 0.0
    copy: float = 0.0
    operations: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not asked for: it wraps each operation, and imports PyTorch's compiler, which takes two seconds."""
        return False

    def take(self) -> tuple[float, float]:
        """Return the seconds of products and of all else since it was last asked, and begin anew."""
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
        """What an operation costs beside its execution.

        A core pays for each. A GPU is given an operation while it executes the one before, and a view or a
        mark gives it nothing.
        """
        if self.machine.cores is not None:
            return self.machine.operation
        return max(0.0, self.machine.operation - executes) if works else 0.0


def _result(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns. On the meta device PyTorch takes a millisecond to say so of a product, and
    as long of a least and a largest element, or to write nothing to what is there: it is not asked."""
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
    """The tensor that an operation does nothing but write to, and returns: its first argument, or ``out``."""
    returns = func._schema.returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    if alias is None or not alias.is_write or torch.Tag.inplace_view in func.tags:
        return None
    out = kwargs.get("out", args[0] if args else None)
    is_filled = isinstance(out, Tensor) and out.numel() > 0  # an empty one is resized
    return out if is_filled and func._schema.name not in _RESIZES else None


def _is_view(func: Any) -> bool:
    """Whether an operation only looks at its argument in another way."""
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
