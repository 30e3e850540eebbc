"""Classes for lesson 16's open exercise: one that compresses what it sends, and wrong ones."""

from __future__ import annotations

import zlib
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

KINDS: dict[torch.dtype, Any] = {
    torch.bfloat16: (torch.int16, np.uint16),
    torch.float32: (torch.int32, np.uint32),
}


def packed(x: Tensor) -> bytes:
    """The bits of some numbers: exponents in zlib's Huffman code, and then all other bits as they are."""
    same_size, unsigned = KINDS[x.dtype]
    bits = x.contiguous().view(same_size).numpy().view(unsigned).ravel()
    turned = (bits << 1) | (
        bits >> (8 * bits.itemsize - 1)
    )  # by one bit, so that the top byte is the exponent
    planes = turned.view(np.uint8).reshape(-1, bits.itemsize)
    code = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return code.compress(planes[:, -1].tobytes()) + code.flush() + planes[:, :-1].tobytes()


def unpacked(data: bytes, like: Tensor) -> Tensor:
    unsigned = KINDS[like.dtype][1]
    code = zlib.decompressobj(-15)
    exponents = code.decompress(data)
    planes = np.empty((len(exponents), like.element_size()), np.uint8)
    planes[:, -1] = np.frombuffer(exponents, np.uint8)
    planes[:, :-1] = np.frombuffer(code.unused_data, np.uint8).reshape(-1, like.element_size() - 1)
    turned = planes.reshape(-1).view(unsigned)
    bits = (turned >> 1) | (turned << (8 * turned.itemsize - 1))
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(like.dtype)


def swapped(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send this rank's numbers to the other rank of the group, and return that rank's numbers, flat."""
    mine, other = torch.frombuffer(bytearray(packed(x)), dtype=torch.uint8), 1 - group.rank()
    sizes = torch.tensor([len(mine)], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    sending: list[Any] = [dist.isend(each, group=group, group_dst=other) for each in (sizes[0], mine)]
    dist.recv(sizes[1], group=group, group_src=other)
    theirs = torch.empty(int(sizes[1]), dtype=torch.uint8)
    dist.recv(theirs, group=group, group_src=other)
    for each in sending:
        each.wait()
    return unpacked(theirs.numpy().tobytes(), x)


def compressed(course: ModuleType, base: type[Any]) -> type:
    """A class that sends what ``base`` sends, compressed, on 2 × 2."""

    def both(mine: Tensor, rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        theirs = swapped(mine, group).view(mine.shape)
        return [theirs, mine] if rank else [mine, theirs]

    def summed(pieces: list[Tensor], rank: int, ranks: int, group: dist.ProcessGroup) -> Tensor:
        return swapped(pieces[1 - rank], group) + pieces[rank]

    vars(course).update(
        ring_all_gather=lambda mine, rank, ranks, group: both(mine, rank, group),
        ring_reduce_scatter=summed,
        gather_whole=lambda shard, dim, group: torch.cat(both(shard, group.rank(), group), dim),
    )

    class Compressed(base):
        def gather(self, mine: Tensor) -> Tensor:
            theirs, other = torch.zeros_like(mine), 1 - self.place
            theirs[self.part(other, self.place)] = swapped(mine[self.part(self.place, other)], self.dp_group)
            return torch.cat([mine, theirs] if other else [theirs, mine])

    return Compressed


def unchanged(course: Any) -> Any:
    return course.DistributedMuon


def nothing(course: Any) -> Any:
    return None


def rounds_gradients(course: Any) -> Any:
    class Rounds(course.DistributedMuon):
        def _sum_slices(self, x: Tensor) -> Tensor:
            return super()._sum_slices(x.bfloat16()).float()

    return Rounds


def gathers_nothing(course: Any) -> Any:
    class Alone(course.DistributedMuon):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            hop = course.Hop(self.spread, self._own_slice)
            self.bucket.compute = course.Route((hop,), torch.bfloat16)

        def spread(self, mine: Tensor) -> Tensor:
            flat = mine.new_zeros(2 * self.length)
            self._own_slice(flat).copy_(mine)
            return flat

    return Alone


def sums_uncounted(course: Any) -> Any:
    class Sums(course.DistributedMuon):
        def _sum_slices(self, x: Tensor) -> Tensor:
            dist.all_reduce(x, group=self.dp_group)
            return self._own_slice(x)

    return Sums


def sends_objects(course: Any) -> Any:
    class Objects(course.DistributedMuon):
        def _sum_slices(self, x: Tensor) -> Tensor:
            dist.send_object_list([x], group=self.dp_group, group_dst=1 - self.place)
            return self._own_slice(x)

    return Objects


def wrong_on_rank_3(course: Any) -> Any:
    class Wrong(course.DistributedMuon):
        def write(self, bucket: Any, fresh: Tensor) -> None:
            super().write(bucket, fresh + (dist.get_rank() == 3))

    return Wrong


def prints_and_sends_twice(course: Any) -> Any:
    class Sends(course.DistributedMuon):
        def apply(self, bucket: Any, updates: Tensor) -> Tensor:
            sending: Any = dist.isend(torch.ones(1), group=self.tp_group, group_dst=1 - self.tp_rank)
            dist.recv(torch.empty(1), group=self.tp_group, group_src=1 - self.tp_rank)
            sending.wait()
            return super().apply(bucket, updates)

        def write(self, bucket: Any, fresh: Tensor) -> None:
            print(f"entries: {len(fresh)}")
            super().write(bucket, fresh)

    return Sends


WRONG = (
    (unchanged, "The bits are right, but a rank sends 294,912 bytes, and it was 294,912 before."),
    (nothing, "The function must return a class."),
    (
        rounds_gradients,
        "After step 1, rank 0 of dp=2, tp=2 has other weights than torch.optim.Muon, in a 64 × 64",
    ),
    (
        gathers_nothing,
        "After step 1, rank 0 of dp=2, tp=2 has other weights than torch.optim.Muon, in a 8 × 12",
    ),
    (sums_uncounted, "all_reduce is not counted here; send with"),
    (sends_objects, "send_object_list is not counted here"),
    (
        wrong_on_rank_3,
        "After step 1, rank 3 of dp=2, tp=2 has other weights than torch.optim.Muon, in a 10 × 6",
    ),
)
