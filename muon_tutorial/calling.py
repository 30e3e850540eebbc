"""One rank's part of a step through a user's own functions: opaque calls, a window of them, in plan order.

Gathered is the Newton–Schulz input, with Nesterov already in, in bfloat16, as the parameter's kind. Every
answer is checked; an error names the function, the parameter and the rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .config import DistributedConfig, global_rank
from .engine.collective import IDLE, Call, Label, Walk
from .engine.pipeline import pipeline
from .errors import ConfigError, GradientError
from .newton_schulz import zeropower_via_newtonschulz
from .stepping import Slot, as_scalar, local_part
from .update import adjusted_lr, decay_and_add, momentum_update
from .worlds.live import sum_counts

WIRE = torch.bfloat16


@dataclass(slots=True, eq=False)
class Caller:
    """Walks the parameters of one rank through a config's functions. ``names`` and ``slots`` go by index."""

    config: DistributedConfig
    assignments: dict[int, int]
    names: Sequence[str]
    slots: Sequence[Slot]
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, slot in zip(self.names, self.slots, strict=True):
            parts = slot.group.get("parts")
            if parts not in (None, "flatten", "stack"):
                raise ConfigError(f"{name}: parts={parts!r} needs a strategy or a helper's config")

    @property
    def window(self) -> int:
        """How many parameters are in flight: one an owner where owners work side by side, and those ahead."""
        return self.stride + self.config.prefetch_count

    @property
    def stride(self) -> int:
        """How many parameters are taken up at once."""
        return len(set(self.assignments.values())) if self.config.async_gpu_parallelism else 1

    def fill_state(self) -> None:
        """Give every parameter its momentum, of its own kind and shape."""
        for slot in self.slots:
            slot.state.setdefault("momentum_buffer", torch.zeros_like(slot.param.detach()))

    def forget(self) -> None:
        """Nothing is kept between steps but the momentum."""

    def step(self) -> Walk:
        """One optimizer step. Must be walked by all ranks."""
        present = yield Call(self._agree, Label("gradients present"))
        yield from pipeline((self._step(index) for index in present), self.window, self.stride)

    def _step(self, index: int) -> Walk:
        slot, owner = self.slots[index], self.assignments[index]
        ns_input = self._momentum(slot)
        gathering = self._call("gather_fn", index, ns_input, owner)
        full = yield Call(gathering, Label("gather_fn", self.names[index]))
        full = self._checked_full(index, full)
        update = None if full is None else self._orthogonalized(full, slot.group)
        # A turn of its own: all owners in the window compute before any of them waits to send.
        yield IDLE if index in self.shapes else self._share_shape(index, full)
        answer = yield Call(
            self._call("redistribute_fn", index, update, owner), Label("redistribute_fn", self.names[index])
        )
        self._apply(index, self._checked_part(index, answer))

    def _momentum(self, slot: Slot) -> Tensor:
        assert slot.grad is not None
        buffer, group = local_part(slot.state["momentum_buffer"]), slot.group
        moved = momentum_update(buffer, slot.grad, group["momentum"], group["nesterov"])
        local = moved.to(WIRE, copy=True)
        if not isinstance(slot.param, DTensor):
            return local
        mesh, placements = slot.param.device_mesh, slot.param.placements
        shape, stride = slot.param.shape, slot.param.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def _orthogonalized(self, full: Tensor, group: dict) -> Tensor:
        flat = full if group.get("parts") == "stack" else full.reshape(full.shape[0], -1)
        update = zeropower_via_newtonschulz(flat, group["ns_steps"], group["ns_coefficients"], group["eps"])
        return update.reshape(full.shape)

    def _apply(self, index: int, update: Tensor) -> None:
        slot, shape = self.slots[index], self.shapes[index]
        lr, group = as_scalar(slot.group["lr"]), slot.group
        sides = shape[-2:] if group.get("parts") == "stack" else (shape[0], math.prod(shape[1:]))
        adjusted = adjusted_lr(lr, group["adjust_lr_fn"], sides)
        decay_and_add(slot.data, update, lr, adjusted, group["weight_decay"])

    def _share_shape(self, index: int, full: Tensor | None) -> Call:
        """Let all ranks know the shape of the full matrix, once: the learning rate is scaled by it."""

        def share() -> None:
            local = self.slots[index].data
            shape = torch.zeros(local.ndim, device=local.device) if full is None else torch.tensor(full.shape)
            shape = shape.to(local.device, torch.float32)
            if dist.is_initialized():
                shape = sum_counts(shape, self.config.state.get("agree_group"))
            self.shapes[index] = tuple(int(length) for length in shape.tolist())

        return Call(share, Label("full shape", self.names[index]))

    def _call(self, name: str, index: int, tensor: Tensor | None, rank: int) -> Callable[[], Any]:
        return partial(self._guarded, name, index, tensor, rank)

    def _guarded(self, name: str, index: int, tensor: Tensor | None, rank: int) -> Any:
        slot = self.slots[index]
        state = {
            **self.config.state,
            "param_idx": index,
            "full_shape": tuple(slot.param.shape) if isinstance(slot.param, DTensor) else None,
            "local_shape": tuple(slot.data.shape),
            "dtype": slot.param.dtype,
        }
        answer = getattr(self.config, name)(tensor, rank, state)
        if isinstance(answer, dist.Work):
            raise ConfigError(
                f"{self._where(name, index)} returned a bare Work, whose wait() returns no tensor: "
                "return the tensor after waiting, or a handle whose wait() returns it"
            )
        return answer

    def _checked_full(self, index: int, answer: Any) -> Tensor | None:
        owner = self.assignments[index]
        if global_rank() != owner:
            if answer is not None:
                raise ConfigError(f"{self._where('gather_fn', index)} must return None off rank {owner}")
            return None
        if not isinstance(answer, Tensor) or isinstance(answer, DTensor):
            raise ConfigError(
                f"{self._where('gather_fn', index)} must return the full plain tensor on its owner, "
                f"got {_kind(answer)}"
            )
        param = self.slots[index].param
        if isinstance(param, DTensor) and answer.shape != param.shape:
            raise ConfigError(
                f"{self._where('gather_fn', index)} must return shape {tuple(param.shape)}, "
                f"got {tuple(answer.shape)}"
            )
        return answer

    def _checked_part(self, index: int, answer: Any) -> Tensor:
        local = self.slots[index].data
        part = local_part(answer) if isinstance(answer, Tensor) else None
        if part is None or part.shape != local.shape:
            got = _kind(answer) if part is None else f"shape {tuple(part.shape)}"
            raise ConfigError(
                f"{self._where('redistribute_fn', index)} must return this rank's part of the update, "
                f"shape {tuple(local.shape)}; got {got}"
            )
        return part

    def _agree(self) -> list[int]:
        """The parameters that have a gradient, the same on all ranks of ``state["agree_group"]``.

        Raises:
            GradientError: a gradient is missing on some ranks only.
        """
        mine = torch.tensor([float(slot.grad is not None) for slot in self.slots])
        if not dist.is_initialized():
            return mine.nonzero().flatten().tolist()
        group = self.config.state.get("agree_group")
        device = self.slots[0].data.device if self.slots else torch.device("cpu")
        count, size = sum_counts(mine.to(device), group), dist.get_world_size(group)
        torn = [index for index, ranks in enumerate(count.tolist()) if 0 < ranks < size]
        if torn:
            raise GradientError(
                f"the gradient of {self.names[torn[0]]} is missing on {size - int(count[torn[0]])} of {size} "
                "ranks: give it to all ranks or to none, or name the ranks that share parameters in "
                'state["agree_group"]'
            )
        return count.nonzero().flatten().tolist()

    def _where(self, name: str, index: int) -> str:
        return f"{name}, for {self.names[index]} on rank {global_rank()},"


def _kind(answer: Any) -> str:
    return f"a {type(answer).__name__}" if answer is not None else "None"
