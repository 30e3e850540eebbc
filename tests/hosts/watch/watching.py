"""The notes of a watched process about its optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from muon_tutorial import MuonWithAdamW

WRAPPERS = {"module", "_orig_mod", "_forward_module", "model", "_checkpoint_wrapped_module"}


class Watch:
    """Notes about the outermost optimizer's steps. The file is rewritten after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.depth = 0
        self.norm_before_clipping: float | None = None
        self.start: dict[str, Tensor] = {}
        self.steps: list[dict[str, Any]] = []

    def before_step(self, optimizer: Optimizer, *_: object) -> None:
        self.start = self.start or {name: _whole(param) for name, param in _named(optimizer)}
        self.depth += 1

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note the step. By now a closure has filled the gradients, and no optimizer here writes to them."""
        self.depth -= 1
        if self.depth:
            return
        named = dict(_named(optimizer))
        gradients = [_whole(param.grad) for param in named.values() if param.grad is not None]
        step: dict[str, Any] = {
            "norm_before_clipping": self.norm_before_clipping,
            "norm": float(torch.stack([gradient.norm() for gradient in gradients]).norm()),
            "lrs": [float(group["lr"]) for group in optimizer.param_groups],
        }
        if not step["norm"] and not any(step["lrs"]):
            return  # a step by torch.distributed.checkpoint, which creates the state before it loads
        self.steps.append(step)
        self.norm_before_clipping = None
        state = optimizer.state
        notes = {
            "optimizer": type(optimizer).__name__,
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "start": self.start,
            "steps": self.steps,
            "parameters": {name: _whole(param) for name, param in named.items()},
            "state": {name: _tensors(state[param]) for name, param in named.items()},
            "placements": {name: str(getattr(param, "placements", "")) for name, param in named.items()},
        }
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.save(notes, self.folder / f"rank-{rank}.pt")

    def noting_norm(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that clips gradients and returns their norm before clipping."""

        def noting(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            if norm is not None:
                self.norm_before_clipping = float(_whole(norm))
            return norm

        return noting


def start(folder: str) -> None:
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        _shard_on_cpus()
    watch = Watch(Path(folder))
    register_optimizer_step_pre_hook(watch.before_step)
    register_optimizer_step_post_hook(watch.after_step)
    _replace(torch.nn.utils, "clip_grad_norm_", watch.noting_norm)
    _replace(MuonWithAdamW, "ready_gradients", watch.noting_norm)


def _shard_on_cpus() -> None:
    """Have Accelerate shard on CPUs too, where it would silently use DDP."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        def initialising(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
            init(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
            if fsdp_plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
                state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
                PartialState._shared_state["distributed_type"] = DistributedType.FSDP
                if state.mixed_precision != "no":
                    fsdp_plugin.set_mixed_precision(state.mixed_precision)

        return initialising

    _replace(AcceleratorState, "__init__", wrap)


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, wrap(getattr(owner, name)))


def _named(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters, by their names in the bare model."""
    return [
        (".".join(word for word in name.split(".") if word not in WRAPPERS), param)
        for group in optimizer.param_groups
        for name, param in zip(group.get("param_names", ()), group["params"], strict=True)
    ]


def _tensors(entry: dict[str, Any]) -> dict[str, Tensor]:
    return {key: _whole(value) for key, value in entry.items() if isinstance(value, Tensor)}


def _whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor. Must be called by all ranks that hold a part of it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
