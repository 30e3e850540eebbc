"""Adds up the seconds that a rank computes between two requests, from the operations themselves.

Tensors are on the meta device, where operations have sizes but do nothing. Each is charged the machine's
seconds for its sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..evidence.memory import PeakMemory, tensors_in
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
    do nothing on the meta device, and are not charged. A ``memory`` also counts the bytes of new tensors.
    """

    machine: Machine
    memory: PeakMemory | None = None
    product: float = 0.0
    copy: float = 0.0
    operations: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: skipping Dynamo would wrap each operation and import PyTorch's compiler, which takes 2 s."""
        return False

    def take(self) -> tuple[float, float]:
        """Return the seconds of products and of everything else since the last call, and start again at 0."""
        taken = self.product, self.copy
        self.product = self.copy = 0.0
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = _kind_of(func), kwargs or {}
        written = _written(kind, args, kwargs) if kind.writes else None
        result = _result(kind, func, args, kwargs, written)
        if self.memory is not None and not kind.is_view and result is not written:
            self.memory.add_new(result, args, kwargs)
        self.operations += 1
        executes, works = 0.0, True
        if kind.product is not None:
            first, second = args[kind.product], args[kind.product + 1]
            *batch, rows, inner = first.shape
            sizes = (rows, inner, second.shape[-1])
            executes = self.machine.gemm_seconds(first.dtype, sizes, math.prod(batch))
            self.product += executes
        elif kind.is_view or kind.moves_nothing:
            works = False
        else:
            read = args[1:] if kind.name in _WRITES_ONLY else args
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


class _Kind(NamedTuple):
    """What an operation's schema says of it; ``product`` is the place of the first factor."""

    name: str
    product: int | None
    is_view: bool
    moves_nothing: bool
    writes: bool


@cache
def _kind_of(func: Any) -> _Kind:
    schema, tags = func._schema, getattr(func, "tags", ())
    name = schema.name.removeprefix("aten::").removesuffix("_")
    alias = schema.returns[0].alias_info if schema.returns else None
    writes = len(schema.returns) == 1 and alias is not None and alias.is_write
    return _Kind(
        name,
        _PRODUCTS.get(name),
        is_view=alias is not None and not alias.is_write,
        moves_nothing=name in _NO_DATA or name.startswith(_MARKS),
        writes=writes and torch.Tag.inplace_view not in tags and schema.name not in _RESIZES,
    )


def _result(kind: _Kind, func: Any, args: Any, kwargs: Any, written: Tensor | None) -> Any:
    """The result of an operation. PyTorch's own meta kernels take a millisecond for a product, for the
    smallest and largest element, or for an in-place write, so these are not called."""
    if written is not None:
        return written
    first = args[0] if args else None
    if isinstance(first, Tensor) and first.is_meta and not kind.writes:
        if kind.product is not None and "dtype" not in kwargs:
            left, right = args[kind.product], args[kind.product + 1]
            return left.new_empty((*left.shape[:-1], right.shape[-1]))
        if kind.name == "aminmax" and not kwargs:
            return first.new_empty(()), first.new_empty(())
    return func(*args, **kwargs)


def _written(kind: _Kind, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that an operation writes to and returns: its first argument, or ``out``."""
    out = kwargs.get("out", args[0] if args else None)
    is_filled = isinstance(out, Tensor) and out.is_meta and out.numel() > 0  # an empty one is resized
    return out if is_filled else None
