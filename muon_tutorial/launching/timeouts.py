"""Timeouts of process groups: given to every group when it is made, and read back.

torch gives new groups 30 minutes (10 with NCCL), whatever the default group was told, and cannot change the
timeout of one later under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. Its default is replaced while groups are made.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from datetime import timedelta
from numbers import Real

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import UsageError

_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")
_LONGEST = 10**9  # seconds; torch counts nanoseconds in 64 bits, 292 years


def check_timeout(timeout: object, what: str = "the timeout") -> None:
    """Refuse what is no time to wait: not a number, NaN, infinity, nothing, or less.

    Raises:
        UsageError: it is one of these.
    """
    seconds = float(timeout) if isinstance(timeout, Real) else math.nan
    if not 0 < seconds <= _LONGEST:  # NaN is neither
        raise UsageError(f"{what} is a positive number of seconds, {_LONGEST:,} at most, not {timeout!r}")


@contextlib.contextmanager
def new_groups_time_out(timeout: float) -> Iterator[None]:
    """Give every group made inside, by ``new_group`` or ``init_device_mesh``, `timeout` seconds.

    A timeout that a call states itself wins. Must be entered by all ranks that make the groups.
    """
    before = {name: getattr(distributed_c10d, name) for name in _DEFAULTS}
    let_new_groups_time_out(timeout)
    try:
        yield
    finally:
        vars(distributed_c10d).update(before)


def let_new_groups_time_out(timeout: float) -> None:
    """Give every group this process makes from now on `timeout` seconds, unless the call states its own."""
    vars(distributed_c10d).update(dict.fromkeys(_DEFAULTS, timedelta(seconds=timeout)))


def group_timeout(group: dist.ProcessGroup) -> float:
    """Return a group's timeout in seconds."""
    device = min(group._device_types, key=lambda device: device.type)
    backend = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)
    return backend.options._timeout.total_seconds()
