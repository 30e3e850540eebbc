"""One rank's part of a step through a user's own functions: opaque calls, a window of them, in plan order.

Gathered is the Newton–Schulz input, with Nesterov already in, in bfloat16, as the parameter's kind. Every
answer is checked; an error names the function, the parameter and the rank. What is wrong with the first
answers for a parameter, all ranks learn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.collective import IDLE, Call, Idle, Label, Walk
from ..engine.order import pipeline
from ..errors import ConfigError, GradientError, TutorialError, UsageError
from ..newton_schulz import zeropower_via_newtonschulz
from ..parameters.meshes import global_rank
from ..step.step import ParameterState, as_scalar, local_part
from ..weight_update import adjusted_lr, decay_and_add, momentum_update
from ..worlds.live import gather_objects, sum_counts
from .config import DistributedConfig

WIRE = torch.bfloat16


@dataclass(slots=True, eq=False)
class CallbackStep:
    """Walks the parameters of one rank through a config's functions. ``names`` and ``slots`` go by index.

    ``shapes`` are those of the full matrices, ``settled`` the parameters whose first answers were right on
    all ranks, and ``present`` those that have a gradient in this step.
    """

    config: DistributedConfig
    assignments: dict[int, int]
    names: Sequence[str]
    slots: Sequence[ParameterState]
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    present: list[int] | None = None

    def __post_init__(self) -> None:
        for name, slot in zip(self.names, self.slots, strict=True):
            parts = slot.group.get("parts")
            if parts not in (None, "flatten", "stack"):
                raise ConfigError(
                    f"{name}: parts={parts!r} needs a strategy or a helper's config; functions of your own "
                    "are given whole parameters"
                )

    @property
    def window(self) -> int:
        """How many parameters are in flight: one an owner where owners work side by side, and those ahead."""
        return self.stride + self.config.prefetch_count

    @property
    def stride(self) -> int:
        """How many parameters are taken up at once."""
        return len(set(self.assignments.values())) if self.config.async_gpu_parallelism else 1

    def fill_state(self) -> None:
        """Give every parameter its momentum, of its own kind and shape.

        Raises:
            UsageError: a loaded momentum has another shape.
        """
        for name, slot in zip(self.names, self.slots, strict=True):
            buffer = slot.state.setdefault("momentum_buffer", torch.zeros_like(slot.param.detach()))
            if buffer.shape != slot.param.shape:
                raise UsageError(
                    f"{name}: a loaded momentum of shape {tuple(buffer.shape)} does not fit the parameter "
                    f"that rank {global_rank()} holds, {tuple(slot.param.shape)}"
                )

    def forget(self) -> None:
        """Gradients have been used, or have changed since."""
        self.present = None

    def agree(self) -> Walk:
        """Find out which gradients there are, before anything changes. Must be walked by all ranks."""
        if self.present is None:
            self.present = yield Call(self._agree, Label("gradients present"))

    def step(self) -> Walk:
        """One optimizer step. Must be walked by all ranks."""
        yield from self.agree()
        assert self.present is not None
        yield from pipeline((self._step(index) for index in self.present), self.window, self.stride)
        self.forget()

    def _step(self, index: int) -> Walk:
        slot, owner = self.slots[index], self.assignments[index]
        full = yield self._call("gather_fn", index, self._momentum(slot), owner)
        trouble = self._trouble_with_full(index, full)
        update = None if full is None or trouble else self._orthogonalized(full, slot.group)
        # A turn of its own: all owners in the window have computed before any of them waits to send.
        yield self._settle("gather_fn", index, full, trouble)
        part = yield self._call("redistribute_fn", index, update, owner)
        yield self._settle("redistribute_fn", index, None, self._trouble_with_part(index, part))
        self.settled.add(index)
        if slot.data.numel():  # an empty shard may have any empty shape
            self._apply(index, local_part(part))

    def _momentum(self, slot: ParameterState) -> Tensor:
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
        """Row-major in and out: what a column-major matrix gives differs in bits, and sent as it lies in
        memory it arrives transposed."""
        full = full.contiguous()
        flat = full if group.get("parts") == "stack" else full.reshape(full.shape[0], -1)
        update = zeropower_via_newtonschulz(flat, group["ns_steps"], group["ns_coefficients"], group["eps"])
        return update.reshape(full.shape).contiguous()

    def _apply(self, index: int, update: Tensor) -> None:
        slot, shape = self.slots[index], self.shapes[index]
        lr, group = as_scalar(slot.group["lr"]), slot.group
        sides = shape[-2:] if group.get("parts") == "stack" else (shape[0], math.prod(shape[1:]))
        adjusted = adjusted_lr(lr, group["adjust_lr_fn"], sides)
        decay_and_add(slot.data, update, lr, adjusted, group["weight_decay"])

    def _call(self, name: str, index: int, tensor: Tensor | None, rank: int) -> Call:
        return Call(partial(self._ask, name, index, tensor, rank), Label(name, self.names[index]))

    def _ask(self, name: str, index: int, tensor: Tensor | None, rank: int) -> Any:
        """What the user's function answers, with its own copy of the state."""
        slot = self.slots[index]
        state = {
            **self.config.state,
            "param_idx": index,
            "full_shape": tuple(slot.param.shape) if isinstance(slot.param, DTensor) else None,
            "local_shape": tuple(slot.data.shape),
            "dtype": slot.param.dtype,
        }
        try:
            answer = getattr(self.config, name)(tensor, rank, state)
        except TutorialError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self._where(name, index)} raised {what}") from error
        return _BareWork() if isinstance(answer, dist.Work) else answer

    def _settle(self, name: str, index: int, full: Tensor | None, trouble: str) -> Call | Idle:
        """Let all ranks know, the first time, what is wrong with an answer, and the full matrix' shape."""
        if index not in self.settled:
            return Call(
                partial(self._share, index, full, trouble), Label(f"check of {name}", self.names[index])
            )
        if trouble:
            raise ConfigError(trouble)
        return IDLE

    def _share(self, index: int, full: Tensor | None, trouble: str) -> None:
        mine = trouble, None if full is None or trouble else tuple(full.shape)
        found = gather_objects(mine, self._group) if dist.is_initialized() else [mine]
        for text in (trouble, *(text for text, _ in found)):
            if text:
                raise ConfigError(text)
        for _, shape in found:
            if shape is not None:
                self.shapes[index] = shape

    def _trouble_with_full(self, index: int, answer: Any) -> str:
        where, owner = self._where("gather_fn", index), self.assignments[index]
        if isinstance(answer, _BareWork):
            return f"{where} {answer}"
        if global_rank() != owner:
            return "" if answer is None else f"{where} must return None off rank {owner}, got {_kind(answer)}"
        if not isinstance(answer, Tensor) or isinstance(answer, DTensor):
            return f"{where} must return the full plain tensor on its owner, got {_kind(answer)}"
        param, due = self.slots[index].param, tuple(self.slots[index].data.shape)
        if isinstance(param, DTensor) and answer.shape != param.shape:
            return f"{where} must return shape {tuple(param.shape)}, got {tuple(answer.shape)}"
        if answer.ndim != len(due) or any(mine > all_ for mine, all_ in zip(due, answer.shape, strict=True)):
            return f"{where} returned shape {tuple(answer.shape)}, which cannot hold this rank's part, {due}"
        return ""

    def _trouble_with_part(self, index: int, answer: Any) -> str:
        where, slot = self._where("redistribute_fn", index), self.slots[index]
        if isinstance(answer, _BareWork):
            return f"{where} {answer}"
        due = f"must return this rank's part of the update, shape {tuple(slot.data.shape)}"
        if not isinstance(answer, Tensor):
            return f"{where} {due}; got {_kind(answer)}"
        if isinstance(answer, DTensor) and not _lies_as(answer, slot.param):
            return f"{where} {due}; got a DTensor that lies as {answer.placements}"
        part = local_part(answer)
        fits = part.shape == slot.data.shape or not (part.numel() or slot.data.numel())
        return "" if fits else f"{where} {due}; got shape {tuple(part.shape)}"

    def _agree(self) -> list[int]:
        """The parameters that have a gradient, the same on all ranks of ``state["agree_group"]``.

        Raises:
            GradientError: on all of them, before anything has changed: a gradient is missing on some ranks
                only, or not finite.
        """
        grads = [slot.grad for slot in self.slots]
        mine = [grad is not None for grad in grads]
        spoilt = [grad is not None and not bool(grad.isfinite().all()) for grad in grads]
        device = self.slots[0].data.device if self.slots else torch.device("cpu")
        count, size = torch.tensor([*mine, *spoilt], dtype=torch.float32, device=device), 1
        if dist.is_initialized():
            count, size = sum_counts(count, self._group), dist.get_world_size(self._group)
        holders, bad = count[: len(grads)].tolist(), count[len(grads) :].tolist()
        self._check_flags(holders, bad, size)
        return [index for index, ranks in enumerate(holders) if ranks]

    def _check_flags(self, holders: list[float], bad: list[float], size: int) -> None:
        for name, ranks, wrong in zip(self.names, holders, bad, strict=True):
            if wrong:
                raise GradientError(
                    f"the gradient of {name} holds NaN or infinity on {int(wrong)} of {size} ranks; nothing "
                    "was changed: skip this step, or mend the loss"
                )
            if 0 < ranks < size:
                raise GradientError(
                    f"the gradient of {name} is missing on {size - int(ranks)} of {size} ranks: give it to "
                    'all ranks or to none, or name the ranks that share parameters in state["agree_group"]'
                )

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self.config.state.get("agree_group")

    def _where(self, name: str, index: int) -> str:
        return f"{name}, for {self.names[index]} on rank {global_rank()},"


@dataclass(frozen=True, slots=True)
class _BareWork:
    """Stands for a ``dist.Work`` that a user's function returned."""

    def __str__(self) -> str:
        return (
            "returned a bare Work, whose wait() returns no tensor: return the tensor after waiting, or a "
            "handle whose wait() returns it"
        )


def _lies_as(answer: DTensor, param: Tensor) -> bool:
    return (
        isinstance(param, DTensor)
        and answer.device_mesh == param.device_mesh
        and answer.placements == param.placements
    )


def _kind(answer: Any) -> str:
    return f"a {type(answer).__name__}" if answer is not None else "None"
