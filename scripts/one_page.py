"""Distributed Muon on one page: ZeRO-1 over dp, tensor parallelism over tp, seven phases, only torch.

    torchrun --nproc-per-node 4 scripts/one_page.py --dp 2 --tp 2

The ranks form a grid of dp × tp. Each phase of ``step()`` but the fourth takes a tensor from one layout to
the next, and the comment above it names both, in an extension of the JAX scaling book's notation:

    W[I, J]       a matrix of I rows and J columns, whole; every rank has a copy
    W[I, J_tp]    tp cuts the columns: each tp rank has its own run of them, and dp ranks have copies
    w[B]          a flat buffer of B elements: a tp rank's pieces of all matrices; dp ranks have copies
    w[a:b]        a range of the buffer: one matrix's piece, then any padding
    w[B_dp]       dp cuts the buffer into equal slices; a slice may begin and end in the middle of a matrix
    g[B]{U_dp}    unreduced: each dp rank has a summand, which must still be summed over dp
    X[I, J]@dp=k  owned: each tp rank at dp position k has a copy (at several k, if slices meet in w[a:b])

Phases 5 and 6 undo 3 and 2. Phase 7 undoes only the scatter of phase 1, for weights: w[B_dp] to w[B]. The sum
of phase 1 cannot be undone, but the summands are not needed again: every rank only needs the new weights.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, rms_norm


@dataclass
class Matrix:
    """Where a matrix lies and how tp cuts it (``dist_meta`` in Moonshot's code), the same on every rank."""

    shape: tuple[int, int]  # (I, J), of the whole matrix
    tp_dim: int  # the dimension that tp cuts: 0 for rows, 1 for columns
    lengths: list[int]  # the number of its rows or columns on each tp rank
    slot: slice  # a:b, its range of the buffer: as long as the largest piece, so the same on all tp ranks

    def piece(self, flat: Tensor, tp_rank: int) -> Tensor:
        """View a slot, w[a:b], as a tp rank's piece, W[I_tp, J] or W[I, J_tp], without the padding."""
        shape = list(self.shape)
        shape[self.tp_dim] = self.lengths[tp_rank]
        return flat[: math.prod(shape)].view(shape)


class DistributedMuon:
    """torch.optim.Muon for matrices that tp has cut. dp shares out momentum and Newton–Schulz's work.

    ``params``: tuples of this rank's piece (fp32, as ``chunk`` cuts), the whole shape, the dim that tp cuts.
    Their gradients are views of this object's buffer, which ``step`` clears; ``zero_grad`` would detach them.
    """

    def __init__(self, params: list[tuple], mesh: DeviceMesh, lr=0.02, momentum=0.95, weight_decay=0.1):
        self.lr, self.mu, self.weight_decay = lr, momentum, weight_decay
        self.dp_group, self.tp_group = mesh.get_group("dp"), mesh.get_group("tp")  # ranks of my tp; of my dp
        self.dp, self.tp = self.dp_group.size(), self.tp_group.size()

        # The plan: one list of all matrices, laid one after the other in a buffer that dp cuts into slices.
        self.matrices, end = [], 0
        for _, shape, tp_dim in params:
            most, across = math.ceil(shape[tp_dim] / self.tp), shape[1 - tp_dim]
            lengths = [max(0, min(most, shape[tp_dim] - most * rank)) for rank in range(self.tp)]
            self.matrices.append(Matrix(shape, tp_dim, lengths, slice(end, end + most * across)))
            end += most * across
        size = math.ceil(end / self.dp)  # B/dp, the elements of a slice; padding fills the buffer up to B
        self.slice = slice(self.dp_group.rank() * size, (self.dp_group.rank() + 1) * size)

        self.weights = params[0][0].new_zeros(self.dp * size)  # w[B]
        self.grads = torch.zeros_like(self.weights)  # g[B]{U_dp}
        self.momentum = self.weights.new_zeros(size)  # m[B_dp]: ZeRO-1 cuts this, not weights or grads
        for (param, *_), matrix in zip(params, self.matrices, strict=True):  # make parameters views
            param.data = self.own_piece(matrix, self.weights).copy_(param.data)
            param.grad = self.own_piece(matrix, self.grads)

    def own_piece(self, matrix: Matrix, buffer: Tensor) -> Tensor:
        """This rank's piece of a matrix: a view of a whole buffer, as parameters and gradients are."""
        return matrix.piece(buffer[matrix.slot], self.tp_group.rank())

    def gather_over_dp(self, own: Tensor) -> Tensor:
        """Gather the whole buffer from each dp rank's slice: x[B_dp] → x[B]."""
        whole = own.new_empty(self.dp * len(own))  # [B]
        dist.all_gather(list(whole.chunk(self.dp)), own, group=self.dp_group)
        return whole

    def gather_over_tp(self, matrix: Matrix, buffer: Tensor) -> Tensor:
        """Gather the whole matrix from each tp rank's piece: X[I, J_tp] → X[I, J]."""
        own = buffer[matrix.slot]  # [b - a], with padding, so of equal length on all tp ranks
        received = own.new_empty(self.tp, len(own))  # [tp, b - a]
        dist.all_gather(list(received), own, group=self.tp_group)
        return torch.cat([matrix.piece(flat, rank) for rank, flat in enumerate(received)], matrix.tp_dim)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Take one step, with all other ranks; return this rank's slice of the mean gradient, g[B_dp]."""
        # Phase 1, reduce-scatter over dp, fp32: g[B]{U_dp} → g[B_dp]. Each rank averages its slice.
        grad = torch.empty_like(self.momentum)  # [B/dp]
        dist.reduce_scatter(grad, list(self.grads.chunk(self.dp)), group=self.dp_group)
        grad /= self.dp

        # Momentum, then Nesterov, by element: m[B_dp], x[B_dp]. lerp: 1 - mu times the sums in torch's docs.
        self.momentum.lerp_(grad, 1 - self.mu)
        x = grad.lerp(self.momentum, self.mu).bfloat16()  # bf16, as torch's Muon casts it: half the bytes

        # Phase 2, gather over dp: x[B_dp] → x[B]. Each rank then has all of its tp piece of each matrix.
        x = self.gather_over_dp(x)  # [B]; only matrices in several slices need it; this keeps the code short

        for matrix in self.matrices:
            # dp position k works on a matrix if slice k overlaps its slot: several do if slices meet inside.
            # The tp ranks at k repeat the work, too. Their slices have equal bounds, so their calls match.
            if matrix.slot.stop <= self.slice.start or self.slice.stop <= matrix.slot.start:
                continue
            # Phase 3, gather over tp: X[I, J_tp] → X[I, J]@dp=k, or from X[I_tp, J] where tp cuts rows.
            X = self.gather_over_tp(matrix, x)

            # Phase 4, Newton–Schulz: X[I, J]@dp=k → Y[I, J]@dp=k. It needs the whole matrix; nothing is sent.
            Y = newton_schulz(X)

            # Phase 5, slice over tp (undoes 3): Y[I, J]@dp=k → Y[I, J_tp]@dp=k or Y[I_tp, J]@dp=k, into x.
            self.own_piece(matrix, x).copy_(Y.split(matrix.lengths, matrix.tp_dim)[self.tp_group.rank()])

        # Phase 6, slice over dp (undoes 2): x[B] → y[B_dp]. Phase 5 put y in all slots that meet this slice.
        y = x[self.slice]  # [B/dp]

        # Decay and step w[B_dp]; the whole shape sets the step. w[first:last] stops at w's end, or is empty.
        w = self.weights[self.slice].clone()  # [B/dp]
        for matrix in self.matrices:
            first, last = (max(0, edge - self.slice.start) for edge in (matrix.slot.start, matrix.slot.stop))
            adjusted = self.lr * math.sqrt(max(1, matrix.shape[0] / matrix.shape[1]))
            w[first:last].mul_(1 - self.lr * self.weight_decay).add_(y[first:last], alpha=-adjusted)

        # Phase 7, gather over dp, fp32: w[B_dp] → w[B]. Parameters are views of w[B], so they change with it.
        self.weights.copy_(self.gather_over_dp(w))
        self.grads.zero_()  # or the next backward would add to them, which no check below would notice
        return grad


def newton_schulz(G: Tensor) -> Tensor:
    """Bring the singular values of a bf16 G[I, J] near 1, and leave its singular vectors as they are."""
    X = G.T if G.size(0) > G.size(1) else G  # [s, l] with s ≤ l
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.T  # [s, s]
        P = torch.addmm(A, A, A, beta=-4.7750, alpha=2.0315)  # [s, s]
        X = torch.addmm(X, P, X, beta=3.4445)  # [s, l]
    return X.T if G.size(0) > G.size(1) else X


def train(dp: int, tp: int, steps: int) -> None:
    """Train a tensor-parallel block on this file's bytes; torch.optim.Muon steps a copy of the block."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.set_default_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    dp_rank, tp_rank, tp_group = mesh.get_local_rank("dp"), mesh.get_local_rank("tp"), mesh.get_group("tp")

    torch.manual_seed(0)  # every rank makes the same whole matrices, and cuts its own pieces out of them
    text = torch.tensor(list(Path(__file__).read_bytes()))
    letters, readout = torch.randn(256, 12), torch.randn(256, 96) / 10  # these two are not trained
    shapes, cuts = [(250, 96), (250, 96), (96, 250)], [0, 0, 1]  # gate[H_tp, D], up[H_tp, D], down[D, H_tp]
    wholes = [nn.Parameter(torch.randn(shape) / shape[1] ** 0.5) for shape in shapes]
    pieces = [w.detach().chunk(tp, cut)[tp_rank].clone() for w, cut in zip(wholes, cuts, strict=True)]
    gate, up, down = params = [nn.Parameter(piece) for piece in pieces]
    ours = DistributedMuon(list(zip(params, shapes, cuts, strict=True)), mesh, lr=0.02)
    stock = torch.optim.Muon(wholes, lr=0.02)

    for step in range(1, steps + 1):
        torch.manual_seed(step * dp + dp_rank)  # each dp rank reads bytes of its own; its tp ranks share them
        first = torch.randint(len(text) - 8, (128,))  # [batch]
        x = letters[text[first[:, None] + torch.arange(8)]].flatten(1)  # [batch, D]: 8 bytes, 12 numbers each
        summand = ((x @ gate.T).relu() * (x @ up.T)) @ down.T  # [batch, H_tp] @ [H_tp, D]: [batch, D]{U_tp}
        dist.all_reduce(total := summand.detach().clone(), group=tp_group)  # [batch, D]{U_tp} → [batch, D]
        loss = cross_entropy(rms_norm(total.requires_grad_(), (96,)) @ readout.T, text[first + 8])
        loss.backward()
        summand.backward(total.grad)  # d total / d summand = 1; x is not trained, so tp sums no gradient

        # Sums in another order may differ in last bits: torch's Muon gets phase 1's. Only step() is tested.
        dist.all_reduce(again := ours.grads / dp, group=ours.dp_group)  # g[B]{U_dp} → g[B]
        average = ours.gather_over_dp(ours.step())  # g[B_dp] → g[B]
        torch.testing.assert_close(average, again)
        for whole, matrix in zip(wholes, ours.matrices, strict=True):
            whole.grad = ours.gather_over_tp(matrix, average)  # G[I, J_tp] → G[I, J]
        stock.step()
        found = [ours.gather_over_tp(matrix, ours.weights) for matrix in ours.matrices]  # W[I, J]
        assert all(map(torch.equal, found, wholes)), f"rank {dist.get_rank()} differs from torch.optim.Muon"
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}; all weights equal those of torch.optim.Muon, bit by bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Distributed Muon on one page. Start it with torchrun.")
    for name, default in (("--dp", 2), ("--tp", 2), ("--steps", 40)):
        parser.add_argument(name, type=int, default=default)
    train(**vars(parser.parse_args()))
