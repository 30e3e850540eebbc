"""Gradients that are not averaged yet refuse to be clipped, and warn when their norm is computed. So do
gradients of plain parameters that tp cuts.

``torch.nn.utils.clip_grad_norm_`` would scale them by a different factor on every rank, and the step would be
wrong without any error. A loop that computes each gradient's norm may clip by it or only log it, so the loop
gets a warning, not an error.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from ..errors import GradientError

_CLIPPING = frozenset(
    {
        torch._foreach_norm,
        torch._foreach_clamp_max_,
        torch._foreach_clamp_min_,
        torch.linalg.vector_norm,
        Tensor.clamp_,
    }
)
"""Functions that ``clip_grad_norm_`` and ``clip_grad_value_`` call on gradients."""

_NORMS = frozenset({Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.matrix_norm})


class UnreducedGradient(Tensor):
    """A gradient that is not averaged over dp yet: an ordinary tensor, except that it refuses clipping."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function as on any tensor; raise ``GradientError`` if it is used for clipping."""
        if func in _CLIPPING:
            raise GradientError(
                "this gradient is this rank's own: clipping it here would scale it by a different factor on "
                "each rank; call optimizer.ready_gradients(max_norm) instead of clip_grad_norm_"
            )
        if func in _NORMS:
            warnings.warn(
                "this is the norm of one rank's own gradient: clipping by it would scale each rank's "
                "gradients by another factor; optimizer.ready_gradients(max_norm) clips all gradients, and "
                "returns their norm",
                stacklevel=3,
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in (Tensor.__deepcopy__, Tensor.__reduce_ex__):  # copies are plain
                args = (unmarked(args[0]), *args[1:])
            found = func(*args, **(kwargs or {}))
            is_view = func is Tensor.detach or func == Tensor.data.__get__  # type: ignore[attr-defined]
            return marked(found) if is_view else found


class UnreducedDTensor(DTensor):
    """A DTensor's gradient that is not averaged over dp yet."""

    __slots__ = ()
    __torch_function__ = UnreducedGradient.__torch_function__


def marked(grad: Tensor) -> Tensor:
    """Return a view of a gradient that refuses to be clipped."""
    if not isinstance(grad, DTensor):
        return grad.as_subclass(UnreducedGradient)
    view = grad.detach()
    view.__class__ = UnreducedDTensor
    return view


def unmarked(grad: Tensor) -> Tensor:
    """Return an ordinary view of a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return grad.detach() if isinstance(grad, DTensor) else grad.as_subclass(Tensor)


def mark_gradients(params: Iterable[Tensor], owner: object) -> list[Any]:
    """Mark every gradient that ``backward()`` produces for these parameters, as long as ``owner`` lives.

    Plain gradients are marked again at the end of ``backward()``, because DDP with
    ``gradient_as_bucket_view=True`` replaces them. Returns handles, with which the hooks can be removed
    earlier.
    """
    at_end = Variable._execution_engine.queue_callback

    def mark(_: int, param: Tensor) -> None:
        grad = param.grad
        if grad is not None and type(grad) in (Tensor, DTensor) and grad.layout is torch.strided:
            param.grad = marked(grad)  # steps refuse other layouts

    def mark_twice(index: int, param: Tensor) -> None:
        mark(index, param)
        if type(param.grad) is UnreducedGradient:  # a callback of a callback runs after those of DDP
            at_end(lambda: at_end(partial(mark, index, param)))

    return hook_gradients(params, mark_twice, owner)


def hook_gradients(params: Iterable[Tensor], hook: Callable[[int, Tensor], None], owner: object) -> list[Any]:
    """As long as ``owner`` lives, call ``hook(index, parameter)`` when ``backward()`` has produced a
    gradient.

    Frozen parameters get the hook, too, because they may be unfrozen before the next ``backward()``. Returns
    handles, with which the hooks can be removed earlier.
    """
    handles: list[Any] = []
    for index, param in enumerate(params):
        if param.is_leaf and (param.is_floating_point() or param.is_complex()):
            trains = param.requires_grad  # a hook can be registered only while requires_grad is True
            try:
                param.requires_grad_(True)
                handles.append(param.register_post_accumulate_grad_hook(partial(hook, index)))
            finally:
                param.requires_grad_(trains)
    weakref.finalize(owner, lambda: [handle.remove() for handle in handles])
    return handles
