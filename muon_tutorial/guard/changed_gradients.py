"""What users do to gradients between ``ready_gradients()`` and ``step()``, which would step by others."""

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
    """The gradients of some parameters as they once were: which tensors, and their bits if they were read.

    Bits alone tell whether a gradient was written to: ``p.grad.data``, as old training loops write to it,
    counts nowhere. The tensors are not kept alive. ``changes_count`` says whether later changes matter: where
    nothing was averaged, a step goes by what it finds.
    """

    params: Sequence[Tensor] = ()
    tensors: Sequence[TensorWeakRef | None] = ()
    versions: Sequence[int] = ()
    bits: Tensor | None = None
    changes_count: bool = True

    @classmethod
    def of(cls, params: Sequence[Tensor], changes_count: bool = True) -> SeenGradients:
        """The gradients as they are now. Reads each once if changes count."""
        with torch._C.DisableTorchFunctionSubclass():  # of gradients yet to be averaged
            tensors = [None if param.grad is None else TensorWeakRef(param.grad) for param in params]
            versions = [0 if param.grad is None else param.grad._version for param in params]
        return cls(params, tensors, versions, _bits(params) if changes_count else None, changes_count)

    def were_skipped(self, params: Sequence[Tensor]) -> bool:
        """Whether ``backward()`` has since left any of these parameters a gradient that no step has used."""
        if not same_tensors(self.params, params):
            return any(param.grad is not None for param in params)
        triples = zip(params, self.tensors, self.versions, strict=True)
        return any(
            param.grad is not None and (not _stands(param, tensor) or param.grad._version != version)
            for param, tensor, version in triples
        )

    def were_dropped(self) -> bool:
        """Whether all of them are gone: another ``backward()`` may have left others in their place."""
        pairs = list(zip(self.params, self.tensors, strict=True))
        if any(tensor is not None and _stands(param, tensor) for param, tensor in pairs):
            return False
        return any(tensor is not None or param.grad is not None for param, tensor in pairs)

    def have_changed(self) -> bool:
        """Whether any of them was replaced, or holds other bits, and that matters."""
        if not self.changes_count:
            return False
        if not all(map(_stands, self.params, self.tensors)):
            return True
        now = _bits(self.params)
        return now is not None and self.bits is not None and not torch.equal(now, self.bits)


def _stands(param: Tensor, tensor: TensorWeakRef | None) -> bool:
    """Whether a parameter's gradient is the very tensor that was seen, or still none."""
    if tensor is None or param.grad is None:
        return tensor is None and param.grad is None
    return tensor() is param.grad


def _bits(params: Sequence[Tensor]) -> Tensor | None:
    """A checksum of each gradient that this rank holds, [gradients]; None where there is none, or no data."""
    gradients = [grad for param in params if (grad := local_gradient(param)) is not None and not grad.is_meta]
    return torch.stack([checksum(grad) for grad in gradients]) if gradients else None
