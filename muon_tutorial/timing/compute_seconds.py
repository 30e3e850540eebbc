"""Adds up the seconds that a rank computes between two requests, from the operations themselves.

Tensors are on the meta device, where operations have sizes but do nothing. Each operation is charged
the machine's seconds for its sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..evidence.memory import CountingMode, PeakMemory, tensors_in
from .machine import Machine
from .walks_by_length import Tape

_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # the index of the first factor in the arguments
_WRITES_ONLY = ("copy", "zeros_like", "ones_like", "full_like", "fill", "zero", "new_zeros", "new_ones")
_MARKS = "profiler::"  # labels in a trace
_NO_DATA = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach")
_BOOLEAN = ("eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_not", "lt", "ne", "signbit")
_RESIZES = ("aten::resize_", "aten::resize_as_", "aten::set_")


@dataclass(eq=False)
class Work(CountingMode):
    """Adds up the seconds of the operations that run in its ``with`` block.

    ``product`` sums the seconds of matrix products, ``copy`` the seconds of everything else. Checks that look
    at values do nothing on the meta device, and are not charged. ``memory``, if given, counts the bytes of
    new tensors, ``tape`` notes the bytes that operations read and write, and ``charged`` lists all charges.

    On a core, each operation also costs ``machine.operation``. On a GPU, a view or a profiler's label costs
    nothing, and for other operations only the time by which ``machine.operation`` exceeds the execution is
    counted. The reason: the host starts an operation while the GPU still executes an earlier one.
    """

    machine: Machine
    memory: PeakMemory | None = None
    tape: Tape | None = None
    charged: list[tuple[float, float]] | None = None
    product: float = 0.0
    copy: float = 0.0
    operations: int = 0

    def take(self) -> tuple[float, float]:
        """Return the seconds of products and of everything else since the last call, and start again at 0."""
        taken = self.product, self.copy
        self.product = self.copy = 0.0
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = _kind_of(func), kwargs or {}
        self.operations += 1
        if kind.moves_nothing:  # the most frequent kinds
            if self.machine.cores is not None:
                self.charge(0.0, self.machine.operation)
            result = func(*args, **kwargs)
            if self.memory is not None and not kind.is_view and isinstance(result, Tensor):
                self.memory.add(result)
            return result
        out = kwargs.get("out", args[0] if args else None) if kind.writes else None
        is_filled = isinstance(out, Tensor) and out.is_meta and out.numel() > 0
        written = out if is_filled else None  # ``out`` is returned, unless it is empty and would be resized
        result = _result(kind, func, args, kwargs) if written is None else written
        if self.memory is not None and result is not written:
            self.memory.add_new(result, args, kwargs)
        if kind.product is not None:
            first, second = args[kind.product], args[kind.product + 1]
            *batch, rows, inner = first.shape
            sizes = (rows, inner, second.shape[-1])
            executes = self.machine.gemm_seconds(first.dtype, sizes, math.prod(batch))
            self.charge(executes, self._start(executes))
            if self.tape is not None:
                self.tape.note(object())  # an object() equals only itself, so tapes with products never match
        else:
            read = args[1:] if kind.name in _WRITES_ONLY else args
            moved = sum(x.nbytes for x in tensors_in(*read, kwargs, result))
            self.charge_copy(moved)
            if self.tape is not None:
                self.tape.note("copy", moved)
        return result

    def charge_copy(self, moved: int) -> None:
        """Add the seconds of an element-wise operation that reads and writes ``moved`` bytes."""
        executes = self.machine.copy_seconds(moved)
        self.charge(0.0, executes)
        if starts := self._start(executes):
            self.charge(0.0, starts)

    def charge(self, product: float, copy: float) -> None:
        self.product += product
        self.copy += copy
        if self.charged is not None:
            self.charged.append((product, copy))

    def _start(self, executes: float) -> float:
        starts = self.machine.operation
        return max(0.0, starts - executes) if self.machine.cores is None else starts


class _Kind(NamedTuple):
    """An operation's properties, read from its schema. ``product``: the index of a product's first factor."""

    name: str
    product: int | None
    is_view: bool
    moves_nothing: bool
    writes: bool
    is_pointwise: bool


@cache
def _kind_of(func: Any) -> _Kind:
    schema, tags = func._schema, getattr(func, "tags", ())
    name = schema.name.removeprefix("aten::").removesuffix("_")
    alias = schema.returns[0].alias_info if schema.returns else None
    is_view = alias is not None and not alias.is_write
    writes = len(schema.returns) == 1 and alias is not None and alias.is_write
    return _Kind(
        name,
        _PRODUCTS.get(name),
        is_view,
        moves_nothing=is_view or name in _NO_DATA or name.startswith(_MARKS),
        writes=writes and torch.Tag.inplace_view not in tags and schema.name not in _RESIZES,
        is_pointwise=torch.Tag.pointwise in tags or name in ("tril", "triu"),
    )


def _result(kind: _Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that does not write to its arguments.

    For the operations known here, this does not call PyTorch's meta kernels, which take up to a millisecond
    or, if written in Python, even import PyTorch's compiler.
    """
    is_joined, is_cat = kind.name in ("cat", "stack"), kind.name == "cat"
    tensors = list(tensors_in(args[0] if is_joined else args))
    first = tensors[0] if tensors else None
    if first is None or not first.is_meta or kind.writes:
        return func(*args, **kwargs)
    empty = partial(torch.empty, dtype=first.dtype, device="meta")  # empty is four times as fast as new_empty
    if kind.product is not None and "dtype" not in kwargs:
        left, right = args[kind.product], args[kind.product + 1]
        return empty((*left.shape[:-1], right.shape[-1]))
    if kind.name == "_to_copy" and kwargs.keys() == {"dtype"} and _is_row_major(first):
        return empty(first.shape, dtype=kwargs["dtype"])
    if kwargs:
        return func(*args, **kwargs)
    if kind.name == "aminmax":
        return empty(()), empty(())
    if kind.name == "linalg_vector_norm" and len(args) <= 2:
        return empty(())
    dim = args[1] if is_joined and len(args) > 1 else 0
    alike = all(x.dtype == first.dtype for x in tensors if x.ndim or not first.ndim) and _is_row_major(first)
    if is_joined and alike and dim >= 0 and len({(x.ndim, _is_row_major(x)) for x in tensors}) == 1:
        along = sum(x.shape[dim] for x in tensors) if is_cat else len(tensors)
        return empty((*first.shape[:dim], along, *first.shape[dim + is_cat :]))
    sizes = {x.shape for x in tensors if x.ndim or not first.ndim}
    if kind.is_pointwise and alike and first.is_floating_point() and len(sizes) == 1:
        dtype = torch.bool if kind.name in _BOOLEAN else first.dtype
        return empty(first.shape, dtype=dtype)
    return func(*args, **kwargs)


def _is_row_major(x: Tensor) -> bool:
    return x.stride() == tuple(sorted(x.stride(), reverse=True)) and 0 not in x.stride()
