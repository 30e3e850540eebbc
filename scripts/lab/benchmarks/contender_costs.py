"""Measures what a contender's step costs on one rank: bytes, memory and seconds.

All ranks must make the same calls. Bytes are counted in two ways: from the requests, and by the kernel's
TCP counters of this process. Seconds are measured for ``learn`` (forward and backward), for ``finish`` (the
rest of the step), and for the step's collectives alone, repeated without computation in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from muon_tutorial.engine.collective import Collective, Walk
from muon_tutorial.evidence.gloo_bytes import GlooTraffic, gloo_barrier
from muon_tutorial.evidence.ledger import LedgerRow, total
from muon_tutorial.evidence.memory import PeakMemory, tensor_bytes

from ..kernel_counters import tcp_sent
from ..torch_collectives import TorchCollectives
from .contenders import Contender, Workload, build_contender

SETTLE = 0.05  # seconds between two looks at a counter that may still grow
PATIENCE = 2.0  # seconds to wait for missing bytes


@dataclass(frozen=True, slots=True)
class ContenderMemory:
    """Bytes that one rank holds between steps, and the ``peak`` of the bytes that ``finish`` adds to them."""

    parameters: int
    gradients: int
    state: int
    matrix_state: int
    peak: int


@dataclass(frozen=True, slots=True)
class ContenderCost:
    """The costs of one contender on one rank.

    ``asked``: the requests of a step, summed. ``wire``: what Gloo should send for these requests. ``tcp``:
    the bytes that the kernel counted; None if it has no counter. ``learn``, ``finish`` and ``collectives``:
    seconds, one per step.
    """

    asked: LedgerRow
    wire: GlooTraffic
    tcp: int | None
    memory: ContenderMemory
    learn: tuple[float, ...]
    finish: tuple[float, ...]
    collectives: tuple[float, ...]


def read_contenders(rank: int, names: Sequence[str], work: Workload, rounds: int) -> list[ContenderCost]:
    """Measure all contenders. Contenders take turns, so that other load slows all of them alike."""
    contenders = {name: _warm(name, work) for name in names}
    asked = {name: _asked(contender, work) for name, contender in contenders.items()}
    wires = {name: sum((entry.wire for entry in asked[name].entries), GlooTraffic()) for name in names}
    tcp = {name: _read_tcp(contenders[name], work, wires[name]) for name in names}
    memory = {name: _read_memory(contender, work) for name, contender in contenders.items()}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for step in range(rounds):
        for name in names:
            times[name].append(_read_seconds(contenders[name], work, asked[name], step))
    return [
        ContenderCost(
            total(asked[one].entries), wires[one], tcp[one], memory[one], *zip(*times[one], strict=True)
        )
        for one in names
    ]


def _warm(name: str, work: Workload) -> Contender:
    """Make a contender and take two steps; then state and connections exist, and buckets are final."""
    contender = build_contender(name, work)
    for step in range(2):
        _step(contender, work, step)
    return contender


def _step(contender: Contender, work: Workload, step: int) -> None:
    contender.learn(work, step)
    contender.finish()


def _asked(contender: Contender, work: Workload) -> TorchCollectives:
    with TorchCollectives(contender.world.at) as asked:
        _step(contender, work, 0)
    return asked


def _read_tcp(contender: Contender, work: Workload, wire: GlooTraffic) -> int | None:
    before = settled_tcp()
    _step(contender, work, 0)
    dist.barrier()
    tcp = tcp_after(before, wire.tcp + _barriers().tcp)
    return None if tcp is None else tcp - _barriers().tcp


def settled_tcp() -> int | None:
    """Wait until this rank's count of TCP bytes stops growing; returns the count. All ranks must call."""
    last, found = -1, tcp_sent()
    while found is not None and found != last:
        time.sleep(SETTLE)
        last, found = found, tcp_sent()
    dist.barrier()
    return None if found is None else found + (tcp_after(found, _barriers().tcp) or 0)


def tcp_after(before: int | None, due: int) -> int | None:
    """TCP bytes since ``before``, read once they reach ``due``, or after ``PATIENCE`` seconds.

    The wait is needed because Gloo may send a notice later than the message itself.
    """
    if before is None:
        return None
    deadline = time.monotonic() + PATIENCE
    while (tcp_sent() or 0) - before != due and time.monotonic() < deadline:
        time.sleep(0.002)
    return (tcp_sent() or 0) - before


def _read_memory(contender: Contender, work: Workload) -> ContenderMemory:
    contender.learn(work, 0)
    params = list(contender.model.parameters())
    gradients = tensor_bytes(param.grad for param in params if param.grad is not None)
    with PeakMemory() as peak:
        contender.finish()
    return ContenderMemory(
        parameters=tensor_bytes(params),
        gradients=gradients,
        state=tensor_bytes(contender.state),
        matrix_state=tensor_bytes(contender.matrix_state),
        peak=peak.peak,
    )


def _read_seconds(
    contender: Contender, work: Workload, asked: TorchCollectives, step: int
) -> tuple[float, float, float]:
    dist.barrier()
    start = time.perf_counter()
    contender.learn(work, step)
    learnt = time.perf_counter()
    contender.finish()
    finished = time.perf_counter()
    requests = [
        replace(it, send=None if it.send is None else torch.zeros(it.send.numel(), dtype=it.dtype))
        for it in asked.requests
    ]
    dist.barrier()
    again = time.perf_counter()
    contender.world.run(_ask_all(requests))
    return learnt - start, finished - learnt, time.perf_counter() - again


def _ask_all(requests: Sequence[Collective]) -> Walk:
    for request in requests:
        _ = yield request


def _barriers() -> GlooTraffic:
    """The bytes that the barrier between two readings sends."""
    return gloo_barrier(dist.get_world_size())
