"""Machines of hardware that has no file of its own: the A100's file, scaled by what datasheets state.

Every rate keeps the part of the peak that the A100's file gives a product or a copy of that size. So nothing
is fitted to the figures that such a machine is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from muon_tutorial.timing.commands import find_machine
from muon_tutorial.timing.machine import Link, Machine, Rates

REACHED = 0.8
"""What part of a link inside a node is reached: as the machine files assume of NVLink."""

A100_PEAK, A100_MEMORY = 312e12, 2.039e12


@dataclass(frozen=True, slots=True)
class Datasheet:
    """What a maker states of a device: dense bf16 operations and memory bytes a second, and its link.

    ``link`` is bytes a second each way to the other devices; ``source`` says where it all stands.
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
    """The A100's file with the links inside a node of an A800, 200 GB/s each way by its datasheet."""
    base = find_machine("a100-infiniband")
    return replace(base, name="A800", inside=Link(REACHED * 200e9, base.inside.latency))


def _scaled(rates: Rates, factor: float) -> Rates:
    return tuple((size, rate * factor) for size, rate in rates)
