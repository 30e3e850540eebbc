"""Lesson 03: the latency and bandwidth of a machine, fitted to measured messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..inputs.measure import fastest

__all__ = ["fastest"]  # the notebook uses it, too


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A message's time as ``latency + bytes / bandwidth``, in seconds and bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        """The model's seconds for a message."""
        return self.latency + nbytes / self.bandwidth


def fit_wire(sizes: Sequence[int], seconds: Sequence[float]) -> LinkSpeed:
    """The latency and bandwidth that fit measured messages with the least relative error; never negative."""
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    slope, latency = np.polyfit(size, time, 1, w=1 / time)
    if latency <= 0 or slope <= 0:
        latency, slope = time.min(), max(time[-1] - time.min(), 1e-12) / size[-1]
    return LinkSpeed(float(latency), float(1 / slope))


def say_wire(wire: LinkSpeed, sizes: Sequence[int], seconds: Sequence[float]) -> str:
    """A machine's latency and bandwidth, in words."""
    same = wire.latency * wire.bandwidth
    return (
        f"{f'a message of {sizes[0]} bytes':<29}{seconds[0] * 1e6:10,.0f} µs\n"
        f"{f'a message of {sizes[-1] / 1e6:.1f} MB':<29}{seconds[-1] * 1e6:10,.0f} µs\n"
        f"{'latency':<29}{wire.latency * 1e6:10,.0f} µs\n"
        f"{'bandwidth, of the line':<29}{wire.bandwidth / 1e9:10.2f} GB/s\n"
        f"{'bandwidth, of the last dot':<29}{sizes[-1] / seconds[-1] / 1e9:10.2f} GB/s\n"
        f"{'bytes take as long as latency':<29}{same / 1e3:10,.0f} kB\n"
        f"{'64 messages of 1 kB':<29}{64 * wire.seconds(1e3) * 1e6:10,.0f} µs\n"
        f"{'1 message of 64 kB':<29}{wire.seconds(64e3) * 1e6:10,.0f} µs"
    )
