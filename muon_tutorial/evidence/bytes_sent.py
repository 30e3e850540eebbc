"""What a collective costs on the wire: as a ring (NCCL's usual algorithm), and as Gloo really sends it.

Knows sizes and positions alone. Two models, because Gloo's bytes are not NCCL's: Gloo's reduce_scatter is an
all_reduce whose answer is cut, and its broadcast a tree in which the root sends log₂ P times. Gloo's side
follows facebookincubator/gloo (``allreduce.cc``: ring; ``allgather.cc``, ``alltoallv.cc``, ``gather.cc``,
``scatter.cc``, ``broadcast.cc``; ``transport/tcp/pair.h``: 48 bytes before each message, and a notice of 48
from either side), and equals the kernel's own TCP counters to the byte (``evidence/kernel_counters.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.collective import Collective
from ..plan.grid import Coordinate

PREAMBLE = 48
LARGEST_SEGMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank puts on the wire for one collective: bytes of data, and messages each way."""

    data: int
    messages_out: int
    messages_in: int

    @property
    def tcp(self) -> int:
        """Bytes handed to TCP: the data, and what Gloo says around it."""
        return self.data + PREAMBLE * (2 * self.messages_out + self.messages_in)

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.data + other.data,
            self.messages_out + other.messages_out,
            self.messages_in + other.messages_in,
        )


NOTHING = Sent(0, 0, 0)


def ring_bytes(request: Collective, at: Coordinate) -> int:
    """Bytes this rank sends for a request when the collective runs as a ring, or point to point.

    gather, scatter and all_to_all are counted point to point, as NCCL runs them; broadcast as a chain, in
    which every rank but the last passes the tensor on (counted at all but the rank before the root).
    """
    parts, here = at.size(*request.axes), at.position(*request.axes)
    sent = 0 if request.send is None else request.send.numel()
    if request.kind == "broadcast":
        elements = request.receive if (here + 1) % parts != request.root else 0
    elif request.kind == "gather":
        elements = 0 if here == request.root else sent
    elif request.kind == "scatter":
        elements = (parts - 1) * request.receive if here == request.root else 0
    elif request.kind == "all_to_all":
        elements = sum(request.sends or ()) - (request.sends or (0,) * parts)[here]
    else:
        return _around(request, parts, sent)
    return elements * request.dtype.itemsize


def ring_received(request: Collective, at: Coordinate) -> int:
    """Bytes this rank receives in that model."""
    parts, here = at.size(*request.axes), at.position(*request.axes)
    sent = 0 if request.send is None else request.send.numel()
    if request.kind == "broadcast":
        elements = 0 if here == request.root else request.receive
    elif request.kind == "gather":
        elements = request.receive - sent if here == request.root else 0
    elif request.kind == "scatter":
        elements = 0 if here == request.root else request.receive
    elif request.kind == "all_to_all":
        elements = sum(request.receives or ()) - (request.receives or (0,) * parts)[here]
    else:
        return _around(request, parts, sent)
    return elements * request.dtype.itemsize


def _around(request: Collective, parts: int, sent: int) -> int:
    """What passes through a rank of a ring: (P−1)/P of the whole tensor, for an all_reduce twice."""
    if request.kind == "all_reduce":
        return 2 * (parts - 1) * sent * request.dtype.itemsize // parts
    elements = request.receive if request.kind == "reduce_scatter" else sent
    return (parts - 1) * elements * request.dtype.itemsize


def gloo_sent(request: Collective, at: Coordinate) -> Sent:
    """What this rank puts on the wire for a request when Gloo runs the collective."""
    parts, here = at.size(*request.axes), at.position(*request.axes)
    if parts == 1:
        return NOTHING
    size = request.dtype.itemsize
    sent = 0 if request.send is None else request.send.numel()
    if request.kind in ("all_reduce", "reduce_scatter"):
        return _segmented_ring(sent * size, size, here, parts)
    if request.kind == "all_gather":
        blocks = 2 * (parts - 1) if sent else 0
        return Sent((parts - 1) * sent * size, blocks, blocks)
    if request.kind == "all_to_all":
        return Sent(ring_bytes(request, at), parts - 1, parts - 1)
    assert request.root is not None
    if request.kind == "broadcast":
        return _tree(request.receive * size, (here - request.root) % parts, parts)
    rooted = here == request.root
    messages = (parts - 1, 0) if rooted == (request.kind == "scatter") else (0, parts - 1)
    if not rooted:
        messages = (1, 0) if request.kind == "gather" else (0, 1)
    return Sent(ring_bytes(request, at), *messages)


def gloo_barrier(parts: int) -> Sent:
    """What a rank sends in a barrier: an empty message for each bit of the number of ranks."""
    rounds = (parts - 1).bit_length()
    return Sent(0, rounds, rounds)


def _segmented_ring(total: int, element: int, here: int, parts: int) -> Sent:
    """Gloo's all_reduce of ``total`` bytes: a chunk a rank, each of two segments or more.

    Out, a rank sends all chunks but its own, then all but its predecessor's. The last chunks may be short.
    """
    if not total:
        return NOTHING
    largest = element * max(1, LARGEST_SEGMENT // element)
    segments = _up(max(_ceil(total, largest), 2 * parts), parts)
    segment = _up(_ceil(total, segments), element)
    count, filled = segments // parts, _ceil(total, segment)

    def data(chunk: int) -> int:
        start = chunk % parts * count * segment
        return max(0, min(count * segment, total - start))

    def messages(chunk: int) -> int:
        return max(0, min(count, filled - chunk % parts * count))

    return Sent(
        2 * total - data(here) - data(here - 1),
        2 * filled - messages(here) - messages(here - 1),
        2 * filled - messages(here + 1) - messages(here),
    )


def _tree(total: int, here: int, parts: int) -> Sent:
    """Gloo's broadcast: in round i every position below 2^i sends to the one 2^i further on."""
    sends = sum(1 for i in range((parts - 1).bit_length()) if here < 1 << i and here + (1 << i) < parts)
    return Sent(sends * total, sends, int(here > 0))


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _up(number: int, multiple: int) -> int:
    return _ceil(number, multiple) * multiple
