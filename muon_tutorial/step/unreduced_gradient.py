"""Gradients of one rank alone, which the step will average, say so when they are asked for a norm.

``torch.nn.utils.clip_grad_norm_`` would take the norm of this rank's gradients and scale them by a factor of
its own, another on every rank, before they are averaged: a wrong step without a word. A loop that asks each
gradient for its norm may clip by it, or only write it down: it is warned.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
"""What ``clip_grad_norm_`` and ``clip_grad_value_`` call on gradients, in a loop or for all at once."""

_NORMS = frozenset({Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.matrix_norm})


class UnreducedGradient(Tensor):
    """A gradient that has yet to be averaged over dp: a tensor like any other, but for clipping."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function as on any tensor.

        Raises:
            GradientError: it is one of those that clip gradients.
        """
        if func in _CLIPPING:
            raise GradientError(
                "this gradient is this rank's own, and the step averages it: clipping it here would scale it "
                "by another factor on every rank; call optimizer.ready_gradients(max_norm) in place of "
                "clip_grad_norm_"
            )
        if func in _NORMS:
            warnings.warn(
                "this is the norm of one rank's own gradient, which the step has yet to average: to clip by "
                "it would scale each rank's by another factor; optimizer.ready_gradients(max_norm) clips all "
                "gradients, and returns their norm",
                stacklevel=3,
            )
        if func in (Tensor.__deepcopy__, Tensor.__reduce_ex__):  # copies are plain
            args = (args[0].as_subclass(Tensor), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        is_view = func is Tensor.detach or func == Tensor.data.__get__  # type: ignore[attr-defined]
        return found.as_subclass(cls) if is_view else found


def mark_gradients(params: Iterable[Tensor], owner: object) -> list[Any]:
    """Have every gradient that ``backward()`` leaves on these parameters marked, while ``owner`` lives.

    Returns the handles by which the hooks are removed earlier.
    """
    return hook_gradients(params, lambda _, param: _mark(param), owner)


def hook_gradients(params: Iterable[Tensor], hook: Callable[[int, Tensor], None], owner: object) -> list[Any]:
    """Have ``hook(index, parameter)`` called when ``backward()`` has left a gradient, while ``owner`` lives.

    Also on parameters that are frozen now: they may train by the next ``backward()``. Returns the handles by
    which the hooks are removed earlier.
    """
    leaves = [(index, param) for index, param in enumerate(params) if param.is_leaf and _can_train(param)]
    handles = [_hooked(param, partial(hook, index)) for index, param in leaves]
    weakref.finalize(owner, _remove, handles)
    return handles


def _can_train(param: Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()


def _hooked(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """The handle of a hook: torch takes one only while a gradient is required, and keeps it ever after."""
    trains = param.requires_grad
    try:
        return param.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        param.requires_grad_(trains)


def _mark(param: Tensor) -> None:
    if type(param.grad) is Tensor and param.grad.layout is torch.strided:  # a step refuses any other
        param.grad = param.grad.as_subclass(UnreducedGradient)


def unmark_gradients(params: Iterable[Tensor]) -> None:
    """Let gradients that have been averaged be tensors like any other again."""
    for param in params:
        if isinstance(param.grad, UnreducedGradient):
            param.grad = param.grad.as_subclass(Tensor)


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
