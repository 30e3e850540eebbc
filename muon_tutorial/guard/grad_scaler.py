"""A step under ``torch.amp.GradScaler``: all ranks skip it, or none.

The scaler leaves ``found_inf`` and, where nobody has unscaled the gradients, ``grad_scale`` on an optimizer
that says it can skip by itself; every rank then calls ``step()``, and can be asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import GradientError
from ..step.agreement import agree_on_overflow
from .current_steps import MeshStep


def skip_overflow(steps: Sequence[MeshStep], scaled: torch.optim.Optimizer, found_inf: Tensor) -> bool:
    """Whether all ranks found infinity; else the gradients of ``scaled`` are unscaled, if nobody did.

    All ranks must call.

    Raises:
        GradientError: on every rank: only some found infinity, or gradients that are each rank's own were not
            unscaled, so that one rank alone may find it.
    """
    scale: Tensor | None = getattr(scaled, "grad_scale", None)
    if scale is not None and any(mesh.step.averages for mesh in steps):
        raise GradientError(
            "these gradients are each rank's own, and may overflow on one rank alone: scale with "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, and call its unscale_(optimizer) "
            "before step, so that all ranks skip together"
        )
    answers = [
        mesh.run(agree_on_overflow(found_inf, mesh.step.ranks)) for mesh in steps
    ]  # every mesh is asked
    if not any(answers) and scale is not None:
        _unscale(scaled, scale)
    return any(answers)


def _unscale(scaled: torch.optim.Optimizer, scale: Tensor) -> None:
    inverse = scale.double().reciprocal().float()  # as GradScaler does it
    for group in scaled.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(inverse.to(param.grad.device))
