"""What a watched process notes of its optimizer, and the faults that can be planted in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

WRAPPERS = {"module", "_orig_mod", "_forward_module", "model", "_checkpoint_wrapped_module"}


class Watch:
    """Notes of the outermost optimizer's steps; written anew after each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.depth = 0
        self.norm_before_clipping: float | None = None
        self.steps: list[dict[str, Any]] = []

    def before_step(self, *_: object) -> None:
        self.depth += 1

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        self.depth -= 1
        if self.depth:
            return
        named = dict(_named(optimizer))
        gradients = [_whole(param.grad) for param in named.values() if param.grad is not None]
        step = {
            "norm before clipping": self.norm_before_clipping,
            "norm": float(torch.stack([gradient.norm() for gradient in gradients]).norm()),
            "lrs": [float(group["lr"]) for group in optimizer.param_groups],
        }
        self.steps.append(step)
        self.norm_before_clipping = None
        notes = {
            "optimizer": type(optimizer).__name__,
            "steps": self.steps,
            "parameters": {name: _whole(param) for name, param in named.items()},
            "state": {name: _state(optimizer.state[param]) for name, param in named.items()},
            "placements": {name: str(getattr(param, "placements", "plain")) for name, param in named.items()},
        }
        torch.save(notes, self.folder / f"rank-{os.environ.get('RANK', os.environ.get('LOCAL_RANK', '0'))}.pt")

    def note_clipping(self, clip: Any) -> Any:
        """Wrap a function that clips and returns the norm from before."""

        def noting(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            if norm is not None:
                self.norm_before_clipping = float(_whole(norm))
            return norm

        return noting


def start(folder: str, fault: str) -> None:
    """Watch this process."""
    from muon_tutorial import MuonWithAdamW

    watch = Watch(Path(folder))
    register_optimizer_step_pre_hook(watch.before_step)
    register_optimizer_step_post_hook(watch.after_step)
    torch.nn.utils.clip_grad_norm_ = watch.note_clipping(torch.nn.utils.clip_grad_norm_)
    MuonWithAdamW.ready_gradients = watch.note_clipping(MuonWithAdamW.ready_gradients)  # type: ignore[method-assign]
    if os.environ.get("DEV_ADAMW"):
        def fm(model, **k):
            return torch.optim.AdamW(list(model.named_parameters()), lr=k["adamw_lr"])
        MuonWithAdamW.from_model = staticmethod(fm)


def _named(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (".".join(word for word in name.split(".") if word not in WRAPPERS), param)
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    ]


def _state(entry: dict[str, Any]) -> dict[str, Tensor]:
    return {key: _whole(value) for key, value in entry.items() if isinstance(value, Tensor)}


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
