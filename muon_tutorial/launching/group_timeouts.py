"""Sets the timeout of every process group when it is made, reads it back, and warns of a long one.

torch gives new groups a timeout of 30 minutes (10 with NCCL), even if the default group has another one.
Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` a group's timeout cannot be changed later. So this module replaces
torch's default while groups are made.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from numbers import Real

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import UsageError

_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")
_LONGEST = 10**9  # seconds; torch counts nanoseconds in 64 bits, up to 292 years

LONG_WAIT = 600.0
"""A longer group timeout, in seconds, gets a warning. torch's defaults are 1,800 (Gloo) and 600 (NCCL)."""


def check_timeout(timeout: object, what: str = "the timeout") -> None:
    """Check that a timeout is a positive number of seconds that torch can hold.

    Raises:
        UsageError: the timeout is something else; the message calls it `what`.
    """
    seconds = float(timeout) if isinstance(timeout, Real) else math.nan
    if not 0 < seconds <= _LONGEST:  # also refuses NaN
        raise UsageError(f"{what} is a positive number of seconds, {_LONGEST:,} at most, not {timeout!r}")


@contextlib.contextmanager
def new_groups_time_out(timeout: float) -> Iterator[None]:
    """Set the timeout, in seconds, of every group that ``new_group`` or a mesh makes in this context.

    A timeout passed to such a call takes precedence. All ranks that make the groups must enter this context.
    """
    before = {name: getattr(distributed_c10d, name) for name in _DEFAULTS}
    let_new_groups_time_out(timeout)
    try:
        yield
    finally:
        vars(distributed_c10d).update(before)


def let_new_groups_time_out(timeout: float) -> None:
    """Set the timeout, in seconds, of groups that this process makes from now on without a timeout."""
    vars(distributed_c10d).update(dict.fromkeys(_DEFAULTS, timedelta(seconds=timeout)))


def group_timeout(group: dist.ProcessGroup) -> float:
    """Return the timeout in seconds."""
    device = min(group._device_types, key=lambda device: device.type)
    backend = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)
    return backend.options._timeout.total_seconds()


def warn_of_long_waits(groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Warn of axes whose group has a longer timeout than the default group."""
    usual = group_timeout(distributed_c10d._get_default_group())
    for axis, group in groups.items():
        seconds = group_timeout(group)
        if seconds > max(usual, LONG_WAIT):
            warnings.warn(
                f"the process group of axis {axis!r} times out after {seconds:g} s, not {usual:g} s like "
                "the default group, so a stopped rank would hold up the others for that long: make the "
                "mesh with build_mesh(grid)",
                stacklevel=4,
            )
