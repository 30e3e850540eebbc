"""Checks an optimizer's groups, and raises a clear error before anything changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from ..adjusted_lr_and_decay import ADJUST_LR_FNS
from ..errors import UsageError
from ..newton_schulz import coefficients_per_step
from ..orthogonalizers.orthogonalize_option import check_orthogonalize


def plain_number(value: Any) -> Any:
    """Turn a one-element tensor into a plain number; return any other value unchanged."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def check_options(window: int, compare_every: int | None, initial_values: str, guard: str) -> None:
    """Raise ``UsageError`` if an option of ``Muon`` is out of range."""
    if window < 1:
        raise UsageError(f"window counts rounds in flight, and must be at least 1; got {window}")
    if compare_every is not None and compare_every < 1:
        raise UsageError(f"compare_every must be at least 1, or None for never; got {compare_every}")
    if initial_values not in ("broadcast", "compare"):
        raise UsageError(f"initial_values must be 'broadcast' or 'compare', got {initial_values!r}")
    if guard not in ("on", "off"):
        raise UsageError(f"guard must be 'on' or 'off', got {guard!r}")


def check_hyperparameters(group: Mapping[str, Any], index: int | None = None) -> None:
    """Raise ``UsageError`` if a hyperparameter of Muon is out of range. The message names it."""
    check_numbers(group, index)
    if group["adjust_lr_fn"] not in ADJUST_LR_FNS:
        raise UsageError(f"adjust_lr_fn must be one of {ADJUST_LR_FNS}, got {group['adjust_lr_fn']!r}")
    coefficients_per_step(group["ns_coefficients"], group["ns_steps"])
    check_orthogonalize(group)


def check_numbers(group: Mapping[str, Any], index: int | None = None) -> None:
    """Raise ``UsageError`` if a value is no finite number, a rate is negative, or ``ns_steps`` is not whole.

    AdamW beside a Muon may not maximize either. The message names the hyperparameter and its group.
    """
    if isinstance(group.get("lr"), Tensor) and group["lr"].numel() != 1:
        shape = tuple(group["lr"].shape)
        raise UsageError(f"a tensor lr must have one element, got shape {shape}{_of(group, index)}")
    if "lr" not in group:
        raise UsageError(f"a group needs an lr{_of(group, index)}")
    if group.get("maximize"):
        raise UsageError(f"maximize must be False, Muon only minimizes{_of(group, index)}: negate the loss")
    if not isinstance(group.get("ns_steps", 0), Integral):
        raise UsageError(f"ns_steps must be a whole number, got {group['ns_steps']!r:.40}{_of(group, index)}")
    for name in ("lr", "momentum", "weight_decay", "eps"):
        value: Any = group.get(name, 0.0)
        if type(value) is float and 0 <= value < math.inf:
            continue
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and not value.is_complex()):
            raise UsageError(f"{name} must be a number, got {value!r:.40}{_of(group, index)}")
        if not 0 <= float(value) < math.inf:
            number = plain_number(value)
            raise UsageError(f"{name} must not be negative or infinite, got {number}{_of(group, index)}")
    for name in ("betas", "ns_coefficients"):
        if name in group and not _all_finite(group[name]):
            raise UsageError(f"{name} must be finite numbers, got {group[name]!r:.60}{_of(group, index)}")


def _of(group: Mapping[str, Any], index: int | None) -> str:
    """Name a group in a message; empty if the group is not in an optimizer yet."""
    names = group.get("param_names")
    return f", in the group of {names[0]}" if names else "" if index is None else f", in group {index}"


def _all_finite(values: Any) -> bool:
    """Whether these are finite numbers, or sequences of finite numbers."""
    if isinstance(values, (list, tuple)):
        return all(map(_all_finite, values))
    return isinstance(values, (Real, Tensor)) and math.isfinite(values)
