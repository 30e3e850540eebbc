"""``DistributedConfig``: a user's or a helper's functions that assign, gather and redistribute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import ConfigError

if TYPE_CHECKING:
    from .create_configs import HelperFunctions


@dataclass
class DistributedConfig:
    """The functions with which a distributed Muon assigns, gathers and redistributes matrices.

    Args:
        assign_fn: ``(params, state) -> {param_idx: rank}`` says which rank orthogonalizes each parameter.
            Called once; returns a global rank for every parameter, the same on all ranks.
        gather_fn: ``(momentum_buffer, dst_rank, state) -> Tensor | None`` gets the Newton–Schulz input in
            bfloat16, a DTensor or a plain tensor. Returns the full plain tensor on ``dst_rank``, and None on
            all other ranks.
        redistribute_fn: ``(update | None, src_rank, state) -> Tensor`` gets the plain update in bfloat16 on
            ``src_rank``, and None on all other ranks. Returns this rank's part of the update.
        state: what the functions need. Each call gets a fresh copy of ``state`` that also contains
            ``param_idx``, ``full_shape`` (None if it is not known), ``local_shape``, the parameter's
            ``dtype``, and ``wire_dtype``, the dtype of matrices and updates: bfloat16. Under
            ``"agree_group"`` you may give the process group of the ranks that share parameters. By default,
            all ranks share parameters.
        async_gpu_parallelism: whether owners work at the same time. False is for debugging: parameters are
            stepped one after the other.
        prefetch_count: how many parameters (or buckets of parameters) are gathered ahead.
        helper: set if ``create_…_config`` made this config. The optimizer then runs the helper's plan instead
            of ``gather_fn`` and ``redistribute_fn``, unless you have replaced one of these functions.

    ``gather_fn`` and ``redistribute_fn`` may also return a handle whose ``wait()`` returns the tensor. A
    returned tensor is copied at once, but a handle's buffer must not change until the step ends. Ranks that
    hold the same part of a parameter must begin with the same values. With your own functions, the optimizer
    cannot check these values, because it does not know which ranks hold the same part.
    """

    assign_fn: Callable[[list[Tensor], dict[str, Any]], dict[int, int]]
    gather_fn: Callable[[Tensor, int, dict[str, Any]], Any]
    redistribute_fn: Callable[[Tensor | None, int, dict[str, Any]], Any]
    state: dict[str, Any] = field(default_factory=dict)
    async_gpu_parallelism: bool = True
    prefetch_count: int = 1
    helper: HelperFunctions | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("assign_fn", "gather_fn", "redistribute_fn"):
            if not callable(getattr(self, name)):
                raise ConfigError(f"{name} must be a function, got {getattr(self, name)!r}")
        if not isinstance(self.prefetch_count, int) or self.prefetch_count < 0:
            raise ConfigError(f"prefetch_count must be an integer of at least 0, got {self.prefetch_count!r}")
        if not isinstance(self.state, dict):
            raise ConfigError(f"state must be a dict, got {type(self.state).__name__}")

    @property
    def planned(self) -> bool:
        """Whether gather and redistribute are the helper's own, so that its plan may replace them."""
        own = self.helper
        return own is not None and own.gather == self.gather_fn and own.redistribute == self.redistribute_fn
