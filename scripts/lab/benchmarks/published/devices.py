"""Machines for hardware that has no file of its own: the A100's file, scaled by datasheets.

Every rate is the same fraction of the peak as in the A100's file for a product or copy of that size. So
nothing is fitted to the figures that such a machine is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from muon_tutorial.timing.commands import find_machine
from muon_tutorial.timing.machine import Link, Machine, Rates

REACHED = 0.8
"""The fraction of a link's bandwidth inside a node that is reached, as machine files assume for NVLink."""

A100_PEAK, A100_MEMORY = 312e12, 2.039e12


@dataclass(frozen=True, slots=True)
class Datasheet:
    """A device's datasheet: dense bf16 operations per second, memory bytes per second, and its link.

    ``link`` is bytes per second in each direction to the other devices; ``source`` names the datasheet.
    """

    name: str
    peak: float
    memory: float
    link: float
    source: str


RTX_A4000 = Datasheet(
    "RTX A4000 on PCIe 4.0 ×4",
    76.7e12,
    448e9,
    16e9 * 4 / 8 * 128 / 130,
    "NVIDIA RTX A4000 datasheet (153.4 TFLOP/s with sparsity, 448 GB/s); PCIe 4.0, 16 GT/s a lane",
)
MI250_DIE = Datasheet(
    "one die of an Instinct MI250",
    362.1e12 / 2,
    3.2768e12 / 2,
    200e9,
    "AMD Instinct MI250 datasheet: 362.1 TFLOP/s bf16 and 3.28 TB/s for both dies; four links of 50 GB/s "
    "each way between them",
)


def machine_of(sheet: Datasheet) -> Machine:
    """One node of such devices."""
    base = find_machine("a100-infiniband")
    sources: Mapping[str, str] = {"gemm": sheet.source, "copy": sheet.source, "inside": sheet.source}
    return replace(
        base,
        name=sheet.name,
        gemm={dtype: _scaled(rates, sheet.peak / A100_PEAK) for dtype, rates in base.gemm.items()},
        copy=_scaled(base.copy, sheet.memory / A100_MEMORY),
        inside=Link(REACHED * sheet.link, base.inside.latency),
        between=None,
        memory=None,
        sources=sources,
    )


def a800s() -> Machine:
    """The A100's file with an A800's links inside a node, by its datasheet 200 GB/s in each direction."""
    base = find_machine("a100-infiniband")
    return replace(base, name="A800", inside=Link(REACHED * 200e9, base.inside.latency))


def _scaled(rates: Rates, factor: float) -> Rates:
    return tuple((size, rate * factor) for size, rate in rates)
