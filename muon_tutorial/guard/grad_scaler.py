"""A step under ``torch.amp.GradScaler``: all ranks skip it, or none.

If an optimizer says that it can skip by itself, the scaler sets ``found_inf`` on it and, if the gradients are
not unscaled yet, ``grad_scale``. Every rank then calls ``step()``, so ranks can agree there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import GradientError
from ..step.agreement import agree_on_overflow
from .current_steps import MeshStep


def skip_overflow(steps: Sequence[MeshStep], scaled: torch.optim.Optimizer, found_inf: Tensor) -> bool:
    """Return whether all ranks found infinity; if not, unscale the gradients of ``scaled`` if needed.

    All ranks must call.

    Raises:
        GradientError: on every rank: only some found infinity, or gradients were not unscaled before they are
            averaged, so that only some might find it.
    """
    scale: Tensor | None = getattr(scaled, "grad_scale", None)
    if scale is not None and any(mesh.step.averages for mesh in steps):
        raise GradientError(
            "these gradients are each rank's own, and may overflow on one rank alone: scale with "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, and call its unscale_(optimizer) "
            "before step, so that all ranks skip together"
        )
    answers = [
        mesh.world.run(agree_on_overflow(found_inf, mesh.step.ranks)) for mesh in steps
    ]  # a list, so that every mesh is asked
    if not any(answers) and scale is not None:
        inverse = scale.double().reciprocal().float()  # as in GradScaler
        for group in scaled.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(inverse.to(param.grad.device))
    return any(answers)
