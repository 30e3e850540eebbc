"""A distributed Muon, function by function from the course: ZeRO-1 over dp, tensor parallelism over tp.

It needs only torch. Each block between two marks answers one exercise. The blocks call each other, and the
code after the last block connects them. ``DistributedMuon`` is the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


# ── lesson 02: newton_schulz ──
def newton_schulz(G, steps=5):
    tall = G.shape[0] > G.shape[1]
    X = G.T if tall else G
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(steps):
        A = X @ X.T
        B = torch.addmm(A, A, A, beta=-4.7750, alpha=2.0315)
        X = torch.addmm(X, B, X, beta=3.4445)
    return X.T if tall else X


# ── lesson 03: ring_all_gather ──
def ring_all_gather(mine, rank, ranks, group=None):
    pieces = [torch.empty_like(mine) for _ in range(ranks)]
    pieces[rank] = mine
    for step in range(ranks - 1):
        sending = dist.isend(pieces[(rank - step) % ranks], group=group, group_dst=(rank + 1) % ranks)
        dist.recv(pieces[(rank - step - 1) % ranks], group=group, group_src=(rank - 1) % ranks)
        sending.wait()
    return pieces


# ── lesson 03: ring_reduce_scatter ──
def ring_reduce_scatter(pieces, rank, ranks, group=None):
    total = pieces[(rank - 1) % ranks]
    for step in range(ranks - 1):
        sending = dist.isend(total, group=group, group_dst=(rank + 1) % ranks)
        arrived = torch.empty_like(total)
        dist.recv(arrived, group=group, group_src=(rank - 1) % ranks)
        sending.wait()
        total = arrived + pieces[(rank - step - 2) % ranks]
    return total


# ── lesson 04: gathered_share ──
def gathered_share(parameters, rank, ranks):
    owned = [parameters[owner::ranks] for owner in range(ranks)]
    sizes = [sum(p.numel() for p in each) for each in owned]
    mine = torch.zeros(max(sizes), dtype=torch.bfloat16)
    own = [zeropower_via_newtonschulz(p.grad).flatten() for p in owned[rank]]
    mine[: sizes[rank]] = torch.cat([mine[:0], *own])
    segments = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(segments, mine)
    flat, taken = [], [0] * ranks
    for number, parameter in enumerate(parameters):
        owner, size = number % ranks, parameter.numel()
        flat.append(segments[owner][taken[owner] : taken[owner] + size])
        taken[owner] += size
    return torch.cat(flat)


# ── lesson 05: local_range ──
def local_range(global_range, place, length):
    start, stop = global_range
    begin = place * length
    first = max(start, begin) - begin
    last = min(stop, begin + length) - begin
    return (first, last) if first < last else (0, 0)


# ── lesson 06: groups ──
def groups(dp, tp):
    dp_groups = [list(range(tp_rank, dp * tp, tp)) for tp_rank in range(tp)]
    tp_groups = [list(range(dp_rank * tp, dp_rank * tp + tp)) for dp_rank in range(dp)]
    return dp_groups, tp_groups


# ── lesson 07: local_shape ──
def local_shape(shape, kind, tp_rank, tp):
    out, into = shape
    n = out if kind == "column" else into
    step = -(-n // tp)  # rounded up
    mine = max(0, min(step, n - step * tp_rank))
    return (mine, into) if kind == "column" else (out, mine)


# ── lesson 08: gather_whole ──
def gather_whole(shard, dim, group):
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    return torch.cat(shards, dim=dim)


# ── lesson 09: unpack ──
def unpack(flat, meta):
    start, stop = meta.global_range
    return flat[start:stop].view(meta.shape)


# ── lesson 09: way_back ──
def way_back(x, route, at, label):
    for hop in reversed(route.hops):
        x = yield from take(x, hop.inverse, route.dtype, at, label)
    return x


# ── lesson 09: my_step ──
def my_step(job, bucket, at):
    summed = yield from travel(job.gradients(bucket), bucket.gradient, at, job.label(1))
    flat = yield from travel(job.momentum(bucket, summed), bucket.compute, at, job.label(2))
    done = torch.zeros_like(flat)
    for entry, meta in job.matrices(bucket):
        whole = yield from travel(unpack(flat, meta), entry.route, at, job.label(3, entry))
        update = job.newton_schulz(entry, whole)  # phase 4
        piece = yield from way_back(update, entry.route, at, job.label(5, entry))
        done[slice(*meta.global_range)] = piece.flatten()
    kept = yield from way_back(done, bucket.compute, at, job.label(6))
    fresh = yield from travel(job.apply(bucket, kept), bucket.parameter, at, job.label(7))
    job.write(bucket, fresh)


# ── lesson 10: bill ──
def bill(total, touched, dp, tp):
    mine = total // dp
    return {
        "gradient reduce_scatter": 4 * (dp - 1) * mine,
        "dp gather": 2 * (dp - 1) * mine,
        "tp gather": 2 * (tp - 1) * touched,
        "parameter all_gather": 4 * (dp - 1) * mine,
    }


# ── lesson 11: assign ──
def assign(params, state):
    ranks = dist.get_process_group_ranks(state["group"])
    return {index: ranks[index % len(ranks)] for index in range(len(params))}


# ── lesson 11: gather ──
def gather(momentum_buffer, dst_rank, state):
    send, take = splits_of(dst_rank, state)
    whole = momentum_buffer.new_empty(sum(take))
    dist.all_to_all_single(whole, momentum_buffer.flatten(), take, send, group=state["group"])
    shape = state["shapes"][state["param_idx"]]
    return whole.view(shape) if dist.get_rank() == dst_rank else None


# ── lesson 11: redistribute ──
def redistribute(update, src_rank, state):
    take, send = splits_of(src_rank, state)
    mine = torch.empty(sum(take), dtype=torch.bfloat16)
    flat = mine.new_empty(0) if update is None else update.flatten()
    dist.all_to_all_single(mine, flat, take, send, group=state["group"])
    return mine.view(state["local_shape"])


# ── lesson 12: prefetch ──
def prefetch(count, gather, work, window):
    tickets, asked = [], 0
    for i in range(count):
        while asked < min(count, i + window):
            tickets.append((yield Start(gather(asked))))
            asked += 1
        whole = yield Wait(tickets.pop(0))
        work(i, whole)


# ── lesson 16: save ──
def save(manager, step, model, optimizer, scheduler):
    extra = {"step": step, "scheduler": scheduler.state_dict()}
    manager.save(step, model, optimizer, extra=extra)


# ── lesson 16: load ──
def load(manager, model, optimizer, scheduler):
    if manager.latest_step() is None:
        return 0
    extra = manager.load(model, optimizer)
    scheduler.load_state_dict(extra["scheduler"])
    return extra["step"]


def zeropower_via_newtonschulz(G: Tensor) -> Tensor:
    """Newton–Schulz in bfloat16, under the name that lessons use."""
    return newton_schulz(G.bfloat16())


@dataclass(frozen=True)
class Hop:
    """One move from a layout to the next, and the move that undoes it; a sum cannot be undone."""

    go: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor] | None = None

    @property
    def inverse(self) -> Hop:
        """The move back."""
        if self.back is None:
            raise ValueError("a sum cannot be taken apart")
        return Hop(self.back, self.go)


@dataclass(frozen=True)
class Route:
    """Hops in order, and the dtype that is sent."""

    hops: tuple[Hop, ...]
    dtype: torch.dtype

    @property
    def inverse(self) -> Route:
        """The inverse hops in reverse order."""
        return Route(tuple(hop.inverse for hop in reversed(self.hops)), self.dtype)


def take(x: Tensor, hop: Hop, dtype: torch.dtype, at: Any, label: str) -> Generator[Any, Any, Tensor]:
    """One hop. In lessons, a network answers a yielded request; torch.distributed answers without a yield."""
    return hop.go(x.to(dtype))
    yield


def travel(x: Tensor, route: Route, at: Any, label: str) -> Generator[Any, Any, Tensor]:
    """All hops of a route, in order."""
    for hop in route.hops:
        x = yield from take(x, hop, route.dtype, at, label)
    return x


@dataclass
class Matrix:
    """A matrix in the buffer: its whole shape, how tp cuts it, its padded piece's shape, and its range."""

    global_shape: tuple[int, int]
    kind: str
    shape: tuple[int, int]
    global_range: tuple[int, int]
    route: Route = field(repr=False)


@dataclass
class Bucket:
    """The buffer: its matrices, and the routes of phases 1, 2 and 7."""

    entries: list[Matrix]
    gradient: Route
    compute: Route
    parameter: Route


class DistributedMuon:
    """torch.optim.Muon for matrices that tp cuts; momentum and work are divided over dp.

    ``params`` has for each matrix this rank's piece (fp32), the whole shape, and "column" if tp cuts its
    rows, as in a column parallel Linear, or "row" if tp cuts its columns. All ranks must call everything.
    """

    def __init__(self, params: Sequence[tuple], dp: int, tp: int, lr=0.02, momentum=0.95, weight_decay=0.1):
        self.lr, self.mu, self.weight_decay, self.dp, self.tp = lr, momentum, weight_decay, dp, tp
        self.place, self.tp_rank = divmod(dist.get_rank(), tp)
        dp_groups, tp_groups = ([dist.new_group(ranks) for ranks in each] for each in groups(dp, tp))
        self.dp_group, self.tp_group = dp_groups[self.tp_rank], tp_groups[self.place]
        self.params, entries, end = [param for param, *_ in params], [], 0
        for _, shape, kind in params:
            piece = local_shape(shape, kind, 0, tp)  # the largest, so that ranges agree on all tp ranks
            entries.append(
                Matrix(tuple(shape), kind, piece, (end, end + math.prod(piece)), Route((), torch.bfloat16))
            )
            entries[-1].route = Route((self._tp_hop(entries[-1]),), torch.bfloat16)
            end += math.prod(piece)
        self.length = math.ceil(end / dp)
        spread = Hop(self._gather_slices, self._own_slice)
        summed = Route((Hop(self._sum_slices),), torch.float32)
        self.bucket = Bucket(
            entries, summed, Route((spread,), torch.bfloat16), Route((spread,), torch.float32)
        )
        self.state = torch.zeros(self.length)  # m[B_dp]: the momentum of this rank's slice
        self.phase, self.mean = 0, torch.zeros(0)

    def _sum_slices(self, x: Tensor) -> Tensor:
        return ring_reduce_scatter(list(x.chunk(self.dp)), self.place, self.dp, self.dp_group)

    def _gather_slices(self, x: Tensor) -> Tensor:
        return torch.cat(ring_all_gather(x, self.place, self.dp, self.dp_group))

    def _own_slice(self, x: Tensor) -> Tensor:
        return x[self.place * self.length :][: self.length]

    def _tp_hop(self, matrix: Matrix) -> Hop:
        dim, size = int(matrix.kind == "row"), matrix.shape[int(matrix.kind == "row")]
        full = matrix.global_shape[dim]

        def join(piece: Tensor) -> Tensor:
            return gather_whole(piece.contiguous(), dim, self.tp_group).narrow(dim, 0, full)

        def cut(whole: Tensor) -> Tensor:
            shape = list(whole.shape)
            shape[dim] = size * self.tp
            padded = whole.new_zeros(shape)
            padded.narrow(dim, 0, full).copy_(whole)
            return padded.narrow(dim, self.tp_rank * size, size)

        return Hop(join, cut)

    def pack(self, pieces: Sequence[Tensor]) -> Tensor:
        """Pieces, one after the other in a flat buffer: w[B]."""
        flat = torch.zeros(self.dp * self.length)
        for matrix, piece in zip(self.bucket.entries, pieces, strict=True):
            rows, columns = piece.shape
            unpack(flat, matrix)[:rows, :columns] = piece
        return flat

    def whole(self, flat: Tensor) -> list[Tensor]:
        """Whole matrices from a flat buffer: w[B] to W[I, J], on all ranks."""
        return [matrix.route.hops[0].go(unpack(flat, matrix)) for matrix in self.bucket.entries]

    def gradients(self, bucket: Bucket) -> Tensor:
        """Before phase 1: this rank's own gradients, flat."""
        return self.pack([param.grad for param in self.params])

    def momentum(self, bucket: Bucket, summed: Tensor) -> Tensor:
        """Before phase 2: update the momentum of this rank's slice; returns Newton–Schulz's input."""
        self.mean = summed / self.dp
        self.state.lerp_(self.mean, 1 - self.mu)
        return self.mean.lerp(self.state, self.mu).bfloat16()

    def matrices(self, bucket: Bucket) -> list[tuple[Matrix, Matrix]]:
        """Before phase 3: the matrices that overlap this rank's slice."""
        held = [local_range(matrix.global_range, self.place, self.length) for matrix in bucket.entries]
        return [(m, m) for m, (start, stop) in zip(bucket.entries, held, strict=True) if start < stop]

    def newton_schulz(self, entry: Matrix, whole: Tensor) -> Tensor:
        """Phase 4."""
        return newton_schulz(whole)

    def apply(self, bucket: Bucket, updates: Tensor) -> Tensor:
        """Before phase 7: the new weights of this rank's slice; lr depends on the whole matrix's shape."""
        w = self._own_slice(self.pack([param.detach() for param in self.params])).clone()
        for matrix in bucket.entries:
            mine = slice(*local_range(matrix.global_range, self.place, self.length))
            lr = self.lr * math.sqrt(max(1, matrix.global_shape[0] / matrix.global_shape[1]))
            w[mine].mul_(1 - self.lr * self.weight_decay).add_(updates[mine], alpha=-lr)
        return w

    def write(self, bucket: Bucket, fresh: Tensor) -> None:
        """After phase 7: write the new weights into the parameters."""
        for param, matrix in zip(self.params, bucket.entries, strict=True):
            rows, columns = param.shape
            param.copy_(unpack(fresh, matrix)[:rows, :columns])

    def label(self, phase: int, entry: Matrix | None = None) -> str:
        """A name for the messages of this phase."""
        self.phase = phase
        return f"phase {phase}"

    @torch.no_grad()
    def step(self) -> None:
        """Take one step, together with all other ranks."""
        for _ in my_step(self, self.bucket, self):
            raise RuntimeError("my_step yielded, but torch.distributed answers at once: remove the yield")

    def expected_bytes(self) -> dict[str, int]:
        """The bytes that one rank sends in a step, by the bill of lesson 10."""
        touched = sum(math.prod(matrix.shape) for matrix, _ in self.matrices(self.bucket))
        return bill(self.dp * self.length, touched, self.dp, self.tp)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The whole momentum of each matrix, on all ranks, so that another grid can load it."""
        return {"momentum": self.whole(self._gather_slices(self.state))}

    def load_state_dict(self, saved: dict[str, list[Tensor]]) -> None:
        """Load this rank's slice of a momentum that was saved on any grid."""
        pieces = [
            m.route.hops[0].inverse.go(w) for m, w in zip(self.bucket.entries, saved["momentum"], strict=True)
        ]
        self.state.copy_(self._own_slice(self.pack(pieces)))


class OwnerMuon:
    """Muon for matrices whose rows lie on all ranks, as in FSDP2: each goes to one owner and back."""

    def __init__(self, params: Sequence[Tensor], shapes: Sequence[tuple[int, int]], momentum=0.95):
        self.params, self.mu = params, momentum
        self.state = {"group": dist.group.WORLD, "shapes": dict(enumerate(shapes))}
        self.buffers = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def updates(self) -> list[Tensor]:
        """This rank's rows of each matrix's update; matrix i + 1 is gathered during the work on i."""
        owners, inputs, found = assign(self.params, self.state), [], {}
        for param, buffer in zip(self.params, self.buffers, strict=True):
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            buffer.lerp_(grad, 1 - self.mu)
            inputs.append(grad.lerp(buffer, self.mu).bfloat16())
        states = [{**self.state, "param_idx": i, "local_shape": tuple(x.shape)} for i, x in enumerate(inputs)]

        def fetch(i: int) -> Callable[[], Tensor | None]:
            return lambda: gather(inputs[i], owners[i], states[i])

        def work(i: int, whole: Tensor | None) -> None:
            found[i] = None if whole is None else newton_schulz(whole)

        drive(prefetch(len(inputs), fetch, work, 2))
        return [redistribute(found[i], owners[i], states[i]) for i in range(len(inputs))]


def splits_of(owner: int, state: dict) -> tuple[list[int], list[int]]:
    """On the way to an owner: elements that this rank sends to each rank of the group, and gets from it."""
    ranks = dist.get_process_group_ranks(state["group"])
    shape, many = state["shapes"][state["param_idx"]], len(ranks)
    send = [math.prod(state["local_shape"]) * (rank == owner) for rank in ranks]
    rows = [local_shape(shape, "column", place, many)[0] for place in range(many)]
    take = [n * shape[1] * (dist.get_rank() == owner) for n in rows]
    return send, take


@dataclass(frozen=True)
class Start:
    """A request to begin something; the answer is a ticket."""

    walk: Callable[[], Any]


@dataclass(frozen=True)
class Wait:
    """A request to wait for a ticket's result."""

    ticket: Any


def drive(walk: Iterator[Any]) -> None:
    """Answer a loop's Start and Wait: started requests run in a second thread, in order."""
    with ThreadPoolExecutor(1) as sender:
        answer = None
        while True:
            try:
                asked = walk.send(answer)  # type: ignore[attr-defined]
            except StopIteration:
                return
            answer = sender.submit(asked.walk) if isinstance(asked, Start) else asked.ticket.result()


class Checkpoints:
    """The manager for ``save`` and ``load``: whole matrices in files, each complete or missing."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def latest_step(self) -> int | None:
        """The newest checkpoint's step, or None."""
        return max((int(path.stem) for path in self.folder.glob("*.pt")), default=None)

    def save(self, step: int, model: torch.nn.Module, optimizer: Any, extra: dict) -> None:
        """Write a checkpoint. All ranks must call, because state_dict() gathers; rank 0 writes."""
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}
        if dist.get_rank() == 0:
            draft = self.folder / f"{step}.draft"
            torch.save(saved, draft)
            draft.replace(self.folder / f"{step}.pt")
        dist.barrier()

    def load(self, model: torch.nn.Module, optimizer: Any) -> dict:
        """Load the newest checkpoint into both; returns its ``extra``."""
        saved = torch.load(self.folder / f"{self.latest_step()}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["extra"]
