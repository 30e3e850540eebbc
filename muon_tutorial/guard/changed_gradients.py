"""Detects changes to gradients between ``ready_gradients()`` and ``step()``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..parameters.mesh_parameters import same_tensors
from ..step.agreement import checksum
from ..step.parameter_state import local_gradient


@dataclass(frozen=True, slots=True, eq=False)
class SeenGradients:
    """The gradients of some parameters at one moment: which tensors, and a checksum of each if it was read.

    Only a checksum reveals every write: old training loops write to ``p.grad.data``, which changes no version
    counter. The tensors are not kept alive. ``changes_count`` says whether later changes matter: if nothing
    was averaged, a step uses whatever gradients it finds.
    """

    params: Sequence[Tensor] = ()
    tensors: Sequence[TensorWeakRef | None] = ()
    versions: Sequence[int] = ()
    bits: Tensor | None = None
    changes_count: bool = True

    @classmethod
    def of(cls, params: Sequence[Tensor], changes_count: bool = True) -> SeenGradients:
        """The current gradients. Reads each once if changes count."""
        with torch._C.DisableTorchFunctionSubclass():  # for gradients not averaged yet
            tensors = [None if param.grad is None else TensorWeakRef(param.grad) for param in params]
            versions = [0 if param.grad is None else param.grad._version for param in params]
        return cls(params, tensors, versions, _bits(params) if changes_count else None, changes_count)

    def were_skipped(self, params: Sequence[Tensor]) -> bool:
        """Whether ``backward()`` has since produced a gradient that no step has used."""
        if not same_tensors(self.params, params):
            return any(param.grad is not None for param in params)
        triples = zip(params, self.tensors, self.versions, strict=True)
        return any(
            param.grad is not None and (not _stands(param, tensor) or param.grad._version != version)
            for param, tensor, version in triples
        )

    def were_dropped(self) -> bool:
        """Whether all of them are gone; another ``backward()`` may have produced new ones."""
        pairs = list(zip(self.params, self.tensors, strict=True))
        if any(tensor is not None and _stands(param, tensor) for param, tensor in pairs):
            return False
        return any(tensor is not None or param.grad is not None for param, tensor in pairs)

    def have_changed(self) -> bool:
        """Whether any of them was replaced or written to; False if changes do not count."""
        if not self.changes_count:
            return False
        if not all(map(_stands, self.params, self.tensors)):
            return True
        now = _bits(self.params)
        return now is not None and self.bits is not None and not torch.equal(now, self.bits)


def _stands(param: Tensor, tensor: TensorWeakRef | None) -> bool:
    """Whether a parameter's gradient is the same tensor as before, or still None."""
    if tensor is None or param.grad is None:
        return tensor is None and param.grad is None
    return tensor() is param.grad


def _bits(params: Sequence[Tensor]) -> Tensor | None:
    """A checksum of each gradient that this rank holds, [gradients]; None without gradients or data."""
    gradients = [grad for param in params if (grad := local_gradient(param)) is not None and not grad.is_meta]
    return torch.stack([checksum(grad) for grad in gradients]) if gradients else None
