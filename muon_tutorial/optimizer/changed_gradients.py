"""What users do to gradients between ``ready_gradients()`` and ``step()``, which would step by others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..step.agreement import checksum
from ..step.parameter_state import local_gradient


@dataclass(frozen=True, slots=True, eq=False)
class SeenGradients:
    """The gradients of some parameters as they once were: which tensors, how often written to, their bits.

    A write through ``p.grad.data``, as old training loops do, counts nowhere: only the bits tell.
    """

    params: Sequence[Tensor] = ()
    versions: tuple[tuple[int, int] | None, ...] = ()
    bits: Tensor | None = None

    @classmethod
    def of(cls, params: Sequence[Tensor]) -> SeenGradients:
        """The gradients as they are now. Reads each once."""
        return cls(params, tuple(map(_version, params)), _bits(params))

    def have_changed(self) -> bool:
        """Whether any of them was replaced, or written to."""
        if tuple(map(_version, self.params)) != self.versions:
            return True
        now = _bits(self.params)
        return now is not None and self.bits is not None and not torch.equal(now, self.bits)


def _version(param: Tensor) -> tuple[int, int] | None:
    return None if param.grad is None else (id(param.grad), param.grad._version)


def _bits(params: Sequence[Tensor]) -> Tensor | None:
    """A checksum of each gradient that this rank holds, [gradients]; None where there is none, or no data."""
    gradients = [grad for param in params if (grad := local_gradient(param)) is not None and not grad.is_meta]
    return torch.stack([checksum(grad) for grad in gradients]) if gradients else None
