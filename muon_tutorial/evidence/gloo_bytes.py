"""Predicts what Gloo really sends for a collective: bytes of data, messages, and bytes of TCP.

Gloo does not send the same bytes as a ring (``ring_bytes``). Gloo's reduce_scatter is an all_reduce after
which each rank keeps a part of the result. Its broadcast is a tree, in which the root sends log₂ P times. An
all_to_all sends no empty messages, because the live world leaves them out. The formulas follow
facebookincubator/gloo (``allreduce.cc``: ring; ``allgather.cc``, ``gather.cc``, ``scatter.cc``,
``broadcast.cc``, ``reduce.cc``; ``transport/tcp/pair.h``: 48 bytes before each message, and a notice of 48
bytes from each side). The predictions equal the kernel's TCP counters to the byte
(``scripts/lab/kernel_counters.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.collective import Collective
from ..plan.grid import Coordinate
from .ring_bytes import ring_bytes

PREAMBLE = 48
LARGEST_SEGMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class GlooTraffic:
    """One rank's traffic in one collective: bytes of data that it sends, and messages in both directions."""

    data: int = 0
    messages_out: int = 0
    messages_in: int = 0

    @property
    def writes(self) -> int:
        """Writes to TCP: two for each message sent (notice and data), one for each received (a notice)."""
        return 2 * self.messages_out + self.messages_in

    @property
    def tcp(self) -> int:
        """Bytes handed to TCP: the data, Gloo's headers and its notices."""
        return self.data + PREAMBLE * self.writes

    def __add__(self, other: GlooTraffic) -> GlooTraffic:
        data, out = self.data + other.data, self.messages_out + other.messages_out
        return GlooTraffic(data, out, self.messages_in + other.messages_in)


def gloo_sent(request: Collective, at: Coordinate) -> GlooTraffic:
    """What this rank sends for a request when Gloo runs the collective."""
    parts, here = at.size(*request.axes), at.position(*request.axes)
    if parts == 1:
        return GlooTraffic()
    size = request.dtype.itemsize
    sent = 0 if request.send is None else request.send.numel()
    if request.kind in ("all_reduce", "reduce_scatter"):
        return _segmented_ring(sent * size, size, here, parts)
    if request.kind == "all_gather":
        blocks = 2 * (parts - 1) if sent else 0
        return GlooTraffic((parts - 1) * sent * size, blocks, blocks)
    if request.kind == "all_to_all":
        others = [position for position in range(parts) if position != here]
        out, into = (
            sum(1 for p in others if row[p]) for row in (request.sends or (), request.receives or ())
        )
        return GlooTraffic(ring_bytes(request, at), out, into)
    assert request.root is not None
    if request.kind == "broadcast":  # a tree: in round i, every place p below 2^i sends to p + 2^i
        place, steps = (here - request.root) % parts, [1 << i for i in range((parts - 1).bit_length())]
        sends = sum(1 for step in steps if place < step and place + step < parts)
        return GlooTraffic(sends * request.receive * size, sends, int(place > 0))
    rooted = here == request.root
    if request.kind == "reduce":
        return _ring_to_root(sent * size, size, here, parts, request.root)
    messages = (parts - 1, 0) if rooted == (request.kind == "scatter") else (0, parts - 1)
    if not rooted:
        messages = (1, 0) if request.kind == "gather" else (0, 1)
    return GlooTraffic(ring_bytes(request, at), *messages)


def gloo_barrier(parts: int) -> GlooTraffic:
    """What a rank sends in a barrier: ⌈log₂ ranks⌉ empty messages."""
    rounds = (parts - 1).bit_length()
    return GlooTraffic(0, rounds, rounds)


def _segmented_ring(total: int, element: int, here: int, parts: int) -> GlooTraffic:
    """Gloo's all_reduce of ``total`` bytes: one chunk per rank, each of two or more segments.

    A rank first sends all chunks except its own. Then it sends all chunks except the previous
    rank's chunk. The last chunks may be short.
    """
    if not total:
        return GlooTraffic()
    largest = element * max(1, LARGEST_SEGMENT // element)
    segments = _up(max(_ceil(total, largest), 2 * parts), parts)
    segment = _up(_ceil(total, segments), element)
    count, filled = segments // parts, _ceil(total, segment)

    def data(chunk: int) -> int:
        start = chunk % parts * count * segment
        return max(0, min(count * segment, total - start))

    def messages(chunk: int) -> int:
        return max(0, min(count, filled - chunk % parts * count))

    return GlooTraffic(
        2 * total - data(here) - data(here - 1),
        2 * filled - messages(here) - messages(here - 1),
        2 * filled - messages(here + 1) - messages(here),
    )


def _ring_to_root(total: int, element: int, here: int, parts: int, root: int) -> GlooTraffic:
    """Gloo's reduce: the first half of an all_reduce's ring, after which every chunk goes to the root.

    The ring stops two segments before a full round, however many segments a chunk has. If a chunk has more
    than two segments, a rank also sends segments of its own chunk that no rank needs.
    """
    if not total:
        return GlooTraffic()
    largest = element * max(1, LARGEST_SEGMENT // element)
    segment = _up(min(_ceil(total, 2 * parts), largest), element)
    segments = _up(max(_ceil(total, segment), 2 * parts), parts)
    count = segments // parts

    def data(start: int, length: int) -> int:
        return max(0, min(length, total - start * segment))

    def ring(sender: int) -> tuple[int, int]:
        """Bytes and messages of ``sender``: all segments except the two before the next rank's chunk."""
        first = (sender + 1) % parts * count
        left = [n for i in (1, 2) if (n := data((first - i) % segments, segment))]
        return total - sum(left), _ceil(total, segment) - len(left)

    def chunk(sender: int) -> int:
        return data(sender * count, count * segment) if sender != root else 0

    (sent, messages), (_, coming) = ring(here), ring((here + 1) % parts)
    arriving = sum(1 for other in range(parts) if chunk(other)) if here == root else 0
    own = chunk(here)
    return GlooTraffic(sent + own, messages + bool(own), coming + arriving)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _up(number: int, multiple: int) -> int:
    return _ceil(number, multiple) * multiple
