"""What a contender's step costs, read by several instruments on one rank. All ranks must call alike.

Bytes by the witness (what was asked for), by the kernel's TCP counters of this process, and by an interface's
counter where the ranks are alone on it. Seconds for learning (forward and backward), for finishing (all that
follows), and for the step's collectives alone, asked again with nothing to compute in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ..engine.collective import Collective, Label, Walk
from ..evidence.bytes_sent import NOTHING, Sent, gloo_barrier
from ..evidence.kernel_counters import interface_sent, tcp_sent
from ..evidence.ledger import Row, total
from ..evidence.memory import PeakMemory, tensor_bytes
from ..evidence.torch_collectives import Witness
from ..worlds.live import LiveWorld, build_mesh
from .contenders import Contender, Work, build_contender

SETTLE = 0.05  # seconds in which what is under way goes on
PATIENCE = 2.0  # seconds until bytes that are not there will not come


@dataclass(frozen=True, slots=True)
class Bytes:
    """One step of one rank. ``learn`` and ``finish`` are what was asked for before and after backward's end.

    ``wire`` is what Gloo sends for both; ``tcp`` is what the kernel counted, None where nobody counts.
    """

    learn: Row
    finish: Row
    wire: Sent
    tcp: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one rank holds between steps, and the most that ``finish`` adds to them."""

    parameters: int
    gradients: int
    state: int
    matrix_state: int
    peak: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """Each step's seconds on one rank."""

    learn: tuple[float, ...]
    finish: tuple[float, ...]
    collectives: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """All that one rank read of one contender."""

    name: str
    bytes: Bytes
    memory: Memory
    seconds: Seconds


def read_contenders(rank: int, names: Sequence[str], work: Work, rounds: int) -> list[Reading]:
    """Read every contender, timing them in turn within one run, so that a busy machine meets all alike."""
    contenders = {name: _warm(name, work) for name in names}
    seen = {name: _asked(contender, work) for name, contender in contenders.items()}
    found = {name: _read_bytes(contenders[name], work, seen[name]) for name in names}
    memory = {name: _read_memory(contender, work) for name, contender in contenders.items()}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for step in range(rounds):
        for name in names:
            times[name].append(_read_seconds(contenders[name], work, seen[name], step))
    return [Reading(name, found[name], memory[name], _columns(times[name])) for name in names]


@dataclass(frozen=True, slots=True)
class Interface:
    """All ranks' bytes of ``steps`` steps on an interface, and what one rank says it sent of them."""

    name: str
    steps: int
    counted: int | None
    wire: Sent


def read_interface(rank: int, names: Sequence[str], work: Work, steps: int) -> list[Interface]:
    """Steps of each contender, by the interface's counter; means something only where ranks are alone."""
    found = []
    for name in names:
        contender = _warm(name, work)
        wire = sum((entry.wire for entry in _asked(contender, work).ledger.entries), NOTHING)
        before = _settled_interface()
        for step in range(steps):
            _step(contender, work, step)
        after = _settled_interface()
        counted = None if before is None or after is None else after - before
        found.append(Interface(name, steps, counted, _times(wire, steps) + _barriers()))
    return found


def read_sizes(rank: int, sizes: Sequence[int], repeats: int) -> list[Interface]:
    """All_reduces of other sizes, in elements: what the interface's overhead is fitted on."""
    world = LiveWorld(build_mesh({"dp": dist.get_world_size()}))
    found = []
    for size in sizes:
        send = torch.ones(size)
        request = Collective("all_reduce", ("dp",), send.dtype, send, size, Label("fit"))
        seen = Witness(world.at)
        with seen:
            world.run(_ask_all([request]))
        wire = sum((entry.wire for entry in seen.ledger.entries), NOTHING)
        before = _settled_interface()
        for _ in range(repeats):
            world.run(_ask_all([request]))
        after = _settled_interface()
        counted = None if before is None or after is None else after - before
        wire = _times(wire, repeats) + _barriers()
        found.append(Interface(f"all_reduce of {size}", repeats, counted, wire))
    return found


def _warm(name: str, work: Work) -> Contender:
    """After two steps state is filled, buckets are settled and connections are made."""
    contender = build_contender(name, work)
    for step in range(2):
        _step(contender, work, step)
    return contender


def _step(contender: Contender, work: Work, step: int) -> None:
    contender.learn(work, step)
    contender.finish()


def _asked(contender: Contender, work: Work) -> Witness:
    """The requests of one step, those of learning filed apart from those of finishing."""
    seen = Witness(contender.world.at, "learn")
    with seen:
        contender.learn(work, 0)
        seen.phase = "finish"
        contender.finish()
    return seen


def _read_bytes(contender: Contender, work: Work, seen: Witness) -> Bytes:
    entries = seen.ledger.entries
    wire = sum((entry.wire for entry in entries), NOTHING)
    before = settled_tcp()
    _step(contender, work, 0)
    dist.barrier()
    tcp = tcp_after(before, wire.tcp + _barriers().tcp)
    learn, finish = ([e for e in entries if e.phase == phase] for phase in ("learn", "finish"))
    counted = None if tcp is None else tcp - _barriers().tcp
    return Bytes(total(learn), total(finish), wire, counted)


def settled_tcp() -> int | None:
    """This rank's TCP bytes once nothing is under way any more. All ranks must call."""
    last, found = -1, tcp_sent()
    while found is not None and found != last:
        time.sleep(SETTLE)
        last, found = found, tcp_sent()
    dist.barrier()
    return None if found is None else tcp_after(found, _barriers().tcp, since=0)


def tcp_after(before: int | None, due: int, since: int | None = None) -> int | None:
    """TCP bytes since ``before``, read once they are what is due, or are not after all this time.

    A notice may follow its message; a busy machine may take its time.
    """
    if before is None:
        return None
    deadline = time.monotonic() + PATIENCE
    while (tcp_sent() or 0) - before != due and time.monotonic() < deadline:
        time.sleep(0.002)
    return (tcp_sent() or 0) - (before if since is None else since)


def _read_memory(contender: Contender, work: Work) -> Memory:
    contender.learn(work, 0)
    params = list(contender.model.parameters())
    gradients = tensor_bytes(param.grad for param in params if param.grad is not None)
    with PeakMemory() as peak:
        contender.finish()
    return Memory(
        parameters=tensor_bytes(params),
        gradients=gradients,
        state=tensor_bytes(contender.state),
        matrix_state=tensor_bytes(contender.matrix_state),
        peak=peak.peak,
    )


def _read_seconds(contender: Contender, work: Work, seen: Witness, step: int) -> tuple[float, float, float]:
    dist.barrier()
    start = time.perf_counter()
    contender.learn(work, step)
    learnt = time.perf_counter()
    contender.finish()
    finished = time.perf_counter()
    requests = [_filled(request) for request in seen.requests]
    dist.barrier()
    again = time.perf_counter()
    contender.world.run(_ask_all(requests))
    return learnt - start, finished - learnt, time.perf_counter() - again


def _ask_all(requests: Sequence[Collective]) -> Walk:
    for request in requests:
        _ = yield request


def _filled(request: Collective) -> Collective:
    """The request with data to send, all zeros."""
    send = None if request.send is None else torch.zeros(request.send.numel(), dtype=request.dtype)
    return replace(request, send=send)


def _settled_interface() -> int | None:
    """The interface's bytes after a pause. All ranks must call."""
    time.sleep(SETTLE)
    dist.barrier()
    time.sleep(SETTLE)
    return interface_sent()


def _barriers() -> Sent:
    """What the barrier between two readings sends."""
    return gloo_barrier(dist.get_world_size())


def _times(wire: Sent, repeats: int) -> Sent:
    return Sent(wire.data * repeats, wire.messages_out * repeats, wire.messages_in * repeats)


def _columns(rows: Sequence[tuple[float, float, float]]) -> Seconds:
    learn, finish, collectives = (tuple(column) for column in zip(*rows, strict=True))
    return Seconds(learn, finish, collectives)
