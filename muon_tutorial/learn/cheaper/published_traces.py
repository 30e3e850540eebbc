"""Numbers from four traces of a published report, with each collective counted once.

The report is "Reproducing and Validating Distributed Muon"; its traces are at ``SOURCE``. The numbers are in
``report_001.json``. ``python -m scripts.lab.report_001`` reads the traces again and checks every figure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from importlib.resources import files
from typing import Any

from ...evidence import formulas
from ...evidence.traces.profiler_trace import CollectiveSum, NameSum, TraceEvent

SOURCE = "huggingface.co/datasets/bird-of-paradise/muon-distributed-reproducibility, traces/comparison"
MB = 1e6  # bytes


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The numbers of one trace, each collective counted once; times are nanoseconds over all ``steps``.

    ``matched`` are the names that the report added up. The CPU's track has the annotations ``full_step`` and
    ``launch`` (the optimizer's call), the GPU's has ``optimizer``. ``gpu_span`` goes from the GPU's first
    event to its last. ``busy`` is the part of that span in which any event ran; ``computing`` and
    ``communicating`` are the parts in which kernels of that kind ran.
    """

    file: str
    devices: int
    device: str
    nccl: str
    steps: int
    gpu_span: int
    busy: int
    computing: int
    communicating: int
    full_step: NameSum
    launch: NameSum
    optimizer: NameSum
    matched: tuple[NameSum, ...]
    collectives: tuple[CollectiveSum, ...]

    @property
    def sum_over_names(self) -> int:
        """The durations of all events with a ``matched`` name, added up."""
        return sum(row.total for row in self.matched)

    @property
    def kernels(self) -> int:
        """The sum of the communication kernels' durations."""
        return sum(row.total for row in self.collectives)

    @property
    def times_counted(self) -> float:
        """The average number of events with a ``matched`` name per collective."""
        return sum(row.count for row in self.matched) / sum(row.count for row in self.collectives)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One ratio: what it measures, how it is shown, and how it was computed."""

    what: str
    shown: str
    how: str


def report() -> dict[str, TraceSummary]:
    """The numbers from the report's four traces, by run; the traces themselves are not needed."""
    data = json.loads(files(__package__).joinpath("report_001.json").read_text(encoding="utf-8"))
    found = {}
    for key, entry in data["traces"].items():
        rows: dict[str, Any] = {name: NameSum(**entry[name]) for name in ("full_step", "launch", "optimizer")}
        rows["matched"] = tuple(NameSum(**row) for row in entry["matched"])
        rows["collectives"] = tuple(CollectiveSum(**row) for row in entry["collectives"])
        found[key] = TraceSummary(**{**entry, **rows})
    return found


def gpu_step() -> tuple[TraceEvent, ...]:
    """One step of the report's ``muon_async`` on rank 0; times begin with the step's call."""
    data = json.loads(files(__package__).joinpath("report_001.json").read_text(encoding="utf-8"))
    fields = ("name", "sort", "begin", "duration", "process", "thread")
    return tuple(TraceEvent(**dict(zip(fields, row, strict=True)), args={}) for row in data["step"])


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How many elements one rank moves in a step, according to the sizes in the traces.

    ``world`` ranks train the ``whole`` model. tp cuts it into pieces of the size ``shard``, and dp divides
    each piece among ``ranks`` ranks (2 of the 4 in the traces). To complete the matrices on boundaries
    between slices, a rank receives ``straddling`` elements.
    """

    world: int
    whole: int
    shard: int
    ranks: int
    straddling: int

    def zero1_adamw(self) -> Fraction:
        """Bytes a rank sends in ZeRO-1 AdamW, with gradients and parameters in fp32."""
        return formulas.zero1_adamw(self.ranks, self.shard, 4, 4)

    def zero1_muon(self) -> Fraction:
        """Bytes a rank sends in ZeRO-1 Muon, with the momentum gathered in bf16."""
        return formulas.zero1_gather_all(self.ranks, self.shard, 4, 4)

    def tp_gather(self) -> int:
        """Bytes received over tensor parallelism, in bf16."""
        return self.straddling * 2


def step_sizes(adamw: TraceSummary, muon: TraceSummary) -> StepSizes:
    """The sizes that follow from the collectives in the two traces."""
    slices, straddling = muon.collectives
    return StepSizes(
        world=adamw.devices,
        whole=sum(row.sent * row.count for row in adamw.collectives) // adamw.steps,
        shard=slices.received,
        ranks=slices.group,
        straddling=straddling.received - straddling.sent,
    )


def compare_bytes(adamw: TraceSummary, muon: TraceSummary) -> tuple[Ratio, ...]:
    """Muon's bytes divided by AdamW's: as the two runs sent them, and with equal settings."""
    sizes = step_sizes(adamw, muon)
    zero1, with_tp = sizes.zero1_muon(), sizes.zero1_muon() + sizes.tp_gather()
    # Muon's traces show only bf16 gathers; DDP all-reduces the whole model's fp32 gradients
    moved = formulas.rho(sizes.ranks) * sizes.shard * 2 + sizes.tp_gather()
    all_reduced = formulas.ddp_adamw(sizes.world, sizes.whole, 4)
    return (
        _bytes("what a rank of these two runs sent in a step: not the same work", moved, all_reduced),
        _bytes("like for like, bytes: ZeRO-1 both, DP2×TP2", zero1, sizes.zero1_adamw()),
        _bytes("and with Muon's gather over tp", with_tp, sizes.zero1_adamw()),
    )


def _bytes(what: str, one: Fraction, other: Fraction) -> Ratio:
    return Ratio(what, f"{float(one / other):.2f}×", f"{float(one) / MB:.1f} / {float(other) / MB:.1f} MB")
