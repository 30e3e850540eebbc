"""Machines for hardware that has no file of its own: the A100's file, scaled by datasheets.

Each product or copy is assumed to reach the same fraction of the device's peak as in the A100's file. So
nothing is fitted to the published figures.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from muon_tutorial.timing.machine import Link, Machine, Rates, find_machine

REACHED = 0.8
"""A link inside a node reaches this fraction of its bandwidth. Machine files assume the same for NVLink."""

A100_PEAK, A100_MEMORY = 312e12, 2.039e12


def machine_of(name: str) -> Machine:
    """One node of devices, from the entry of this name in ``datasheets.json``.

    An entry gives ``peak``, dense bf16 operations per second; ``memory``, the memory's bytes per second; and
    ``link``, bytes per second in each direction between devices.
    """
    sheet = json.loads(Path(__file__).with_name("datasheets.json").read_text(encoding="utf-8"))[name]
    base = find_machine("a100-infiniband")
    return replace(
        base,
        name=sheet["device"],
        gemm={dtype: _scaled(rates, sheet["peak"] / A100_PEAK) for dtype, rates in base.gemm.items()},
        copy=_scaled(base.copy, sheet["memory"] / A100_MEMORY),
        inside=Link(REACHED * sheet["link"], base.inside.latency),
        between=None,
        memory=None,
        sources=dict.fromkeys(("gemm", "copy", "inside"), sheet["source"]),
    )


def a800s() -> Machine:
    """The A100's file with an A800's links inside a node: 200 GB/s in each direction, by its datasheet."""
    base = find_machine("a100-infiniband")
    return replace(base, name="A800", inside=Link(REACHED * 200e9, base.inside.latency))


def _scaled(rates: Rates, factor: float) -> Rates:
    return tuple((size, rate * factor) for size, rate in rates)
